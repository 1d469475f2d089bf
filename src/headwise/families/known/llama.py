"""Llama and its close relatives: split projections, full rotary positions, grouped key/value heads."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2", "gemma"),
    stacks=(
        Stack(
            "layers",
            attention="self_attn",
            out="self_attn.o_proj",
            norms=("input_layernorm",),
            mlp=Mlp(gate="mlp.gate_proj", norms=("post_attention_layernorm",)),
        ),
    ),
    head_dim=True,
    rope_list=True,
)
