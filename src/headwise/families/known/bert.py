"""BERT and RoBERTa: encoders (or decoders, if the config says so) whose output projection sits in another module."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="bert",
    model_types=("bert", "roberta"),
    stacks=(
        Stack(
            "encoder.layer",
            attention="attention.self",
            out="attention.output.dense",
            cache="none",
            mlp=Mlp("intermediate.dense", "output.dense", norm_after=True),
        ),
    ),
    q="query",
    k="key",
    v="value",
    positions="learned",
)
