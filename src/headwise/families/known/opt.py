"""OPT: learned positions, biases; the 350M model has its norm after the attention."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="opt",
    model_types=("opt",),
    stacks=(
        Stack(
            "decoder.layers",
            attention="self_attn",
            out="self_attn.out_proj",
            norms=("self_attn_layer_norm",),
            norms_if="do_layer_norm_before",
            mlp=Mlp("fc1", "fc2", norms=("final_layer_norm",), norms_if="do_layer_norm_before", width="ffn_dim"),
        ),
    ),
    positions="learned",
)
