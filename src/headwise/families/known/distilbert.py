"""DistilBERT: a BERT with names of its own."""

from headwise.families.family import Family, Mlp, Stack

FAMILY = Family(
    name="distilbert",
    model_types=("distilbert",),
    stacks=(
        Stack(
            "transformer.layer",
            attention="attention",
            out="attention.out_lin",
            cache="none",
            mlp=Mlp("ffn.lin1", "ffn.lin2", norm_after=True, width="hidden_dim"),
        ),
    ),
    q="q_lin",
    k="k_lin",
    v="v_lin",
    positions="learned",
)
