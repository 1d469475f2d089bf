"""Phi-1/1.5/2: biases, partial rotary positions; the input norm also feeds the MLP, so it always stays."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="phi",
    model_types=("phi",),
    stacks=(
        Stack(
            "layers",
            attention="self_attn",
            out="self_attn.dense",
            common_norm="input_layernorm",
            mlp=Mlp("mlp.fc1", "mlp.fc2"),
        ),
    ),
    norms=("q_layernorm", "k_layernorm"),
)
