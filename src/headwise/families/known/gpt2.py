"""GPT-2: learned positions, biases, q, k and v in one transposed matrix."""

from headwise.families.family import Family, Stack

FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    stacks=(Stack("h", attention="attn", out="attn.c_proj", norms=("ln_1",)),),
    fused="c_attn",
    positions="learned",
)
