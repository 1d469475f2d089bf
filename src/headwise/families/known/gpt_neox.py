"""GPT-NeoX and Pythia: q, k and v fused head by head, partial rotary positions, biases."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    stacks=(
        Stack(
            "layers",
            attention="attention",
            out="attention.dense",
            norms=("input_layernorm",),
            mlp=Mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", norms=("post_attention_layernorm",)),
        ),
    ),
    fused="query_key_value",
    fused_by="heads",
)
