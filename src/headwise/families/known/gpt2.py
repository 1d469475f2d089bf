"""GPT-2: learned positions, biases, q, k and v in one transposed matrix."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    stacks=(
        Stack(
            "h",
            attention="attn",
            out="attn.c_proj",
            norms=("ln_1",),
            mlp=Mlp("mlp.c_fc", "mlp.c_proj", norms=("ln_2",), width="n_inner"),
        ),
    ),
    fused="c_attn",
    positions="learned",
)
