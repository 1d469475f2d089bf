"""ViT and DeiT: image encoders with learned positions."""

from headwise.families.family import Family, Stack

FAMILY = Family(
    name="vit",
    model_types=("vit", "deit"),
    stacks=(Stack("layers", attention="attention", out="attention.o_proj", norms=("layernorm_before",), cache="none"),),
    positions="learned",
    head_dim=True,
)
