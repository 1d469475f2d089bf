"""Gemma 2: a second norm after the attention, alternating windows, capped logits."""

from headwise.families.family import Family, Stack

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
        ),
    ),
    head_dim=True,
    rope_list=True,
)
