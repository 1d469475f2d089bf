"""Phi-3: Llama with q, k and v in one matrix, possibly with partial rotary positions and a window."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    stacks=(
        Stack(
            "layers",
            attention="self_attn",
            out="self_attn.o_proj",
            norms=("input_layernorm",),
            mlp=Mlp("mlp.gate_up_proj", fused=True, norms=("post_attention_layernorm",)),
        ),
    ),
    fused="qkv_proj",
)
