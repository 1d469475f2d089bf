"""DeepSeek V2 and V3: multi-head latent attention (MLA). Its cache can be rounded; all else stays."""

from headwise.families.family import Family, Stack

FAMILY = Family(
    name="deepseek",
    model_types=("deepseek_v2", "deepseek_v3"),
    stacks=(Stack("layers", attention="self_attn", out="self_attn.o_proj", norms=("input_layernorm",)),),
    latent=True,
)
