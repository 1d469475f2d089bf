"""Gemma 2: a second norm after the attention, alternating windows, capped logits."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="gemma2",
    model_types=("gemma2",),
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
    head_dim=True,
    rope_list=True,
)
