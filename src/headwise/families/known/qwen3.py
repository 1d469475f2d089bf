"""Qwen3: Llama with a norm on queries and keys of each head."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    stacks=(
        Stack(
            "layers",
            attention="self_attn",
            out="self_attn.o_proj",
            norms=("input_layernorm",),
            mlp=Mlp(gate="mlp.gate_proj", norms=("post_attention_layernorm",)),
        ),
    ),
    norms=("q_norm", "k_norm"),
    head_dim=True,
    rope_list=True,
)
