"""Gemma 3 (text): Gemma 2 with norms on queries and keys, and one set of frequencies per kind of layer."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    stacks=(
        Stack(
            "layers",
            attention="self_attn",
            out="self_attn.o_proj",
            norms=("input_layernorm", "post_attention_layernorm"),
            norm_behind=True,
            mlp=Mlp(
                gate="mlp.gate_proj",
                norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
                norm_behind=True,
            ),
        ),
    ),
    norms=("q_norm", "k_norm"),
    head_dim=True,
)
