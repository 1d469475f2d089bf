"""ViT and DeiT: image encoders with learned positions."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="vit",
    model_types=("vit", "deit"),
    stacks=(
        Stack(
            "layers",
            attention="attention",
            out="attention.o_proj",
            norms=("layernorm_before",),
            cache="none",
            mlp=Mlp("mlp.fc1", "mlp.fc2", norms=("layernorm_after",)),
        ),
    ),
    positions="learned",
    head_dim=True,
)
