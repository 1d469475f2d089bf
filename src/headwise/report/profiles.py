"""The profile table of the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from headwise.records.profile import LayerProfile, Profile
from headwise.records.shape import LayerShape
from headwise.report.summary import sentence

ALIKE = 0.8
COLUMNS = (
    ("layer", "left"),
    ("qk dims", "right"),
    ("v dims", "right"),
    ("hard rank", "right"),
    ("eff. rank", "right"),
    ("Jacobian", "right"),
    ("slope", "right"),
    ("1st token", "right"),
    ("alike", "right"),
    ("condition", "right"),
    ("3/4 qk", "right"),
    ("3/4 v", "right"),
)


def print_profile(profile: Profile, console: Console | None = None) -> None:
    """One row per layer (medians over its heads), what the columns mean, and the summary."""
    console = console or Console(width=None if Console().is_terminal else 110)
    console.print(sentence(profile), highlight=False)
    console.print()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, side in COLUMNS:
        table.add_column(name, justify=side, no_wrap=True)
    for index, (layer, shape) in enumerate(zip(profile.layers, profile.shape.layers, strict=True)):
        table.add_row(str(index), *(_cells(layer, shape) if layer.values else ["-"] * (len(COLUMNS) - 1)))
    console.print(table)
    longest = max((length for layer in profile.layers for length in layer.lengths), default=0)
    console.print(
        "\nMedians over the heads of a layer. dims: hold 90 % of the energy on the text (by the weights alone). "
        f"Ranks as shares of the length, Jacobian (softmax sharpness) and share on the first token at {longest:,} "
        "tokens. slope: of the Jacobian against length, -1 is 1/L. alike: heads that share 80 % of their attention "
        "with their nearest head. 3/4: predicted loss increase, in nats per output, of keeping three quarters of the "
        "width.",
        highlight=False,
        style="dim",
    )


def _cells(layer: LayerProfile, shape: LayerShape) -> list[str]:
    values, longest = layer.values, layer.lengths[-1]

    def middle(name: str, place: int) -> float | None:
        numbers = [head[place] for head in values.get(name, ()) if head[place] is not None]
        return median(numbers) if numbers else None

    def dims(kind: str) -> str:
        return f"{middle(f'{kind}_data_dims', 0):.0f} ({middle(f'{kind}_weight_dims', 0):.0f})"

    conditions = [value for value in values["conditioning"] if value is not None]
    exponents = values.get("jacobian_exponent")
    return [
        dims("qk"),
        dims("vo"),
        _share(middle("hard_rank", -1), longest),
        _share(middle("effective_rank", -1), longest),
        _number(middle("jacobian_mean", -1)),
        _number(median(exponents) if exponents else None, "+.2f"),
        _share(middle("first_token", -1), 1),
        str(sum(overlap > ALIKE for overlap in values["twin_overlap"])),
        _number(conditions[-1] if conditions else None, ".2g"),
        _number(_at_share(values["qk_damage"], 0.75), ".2g"),
        _number(_at_share(values["v_damage"], 0.75), ".2g"),
    ]


def _at_share(losses: Sequence[float | None], share: float) -> float | None:
    """Predicted loss increase at the nearest possible width not below ``share`` of the full one."""
    width = math.ceil(share * (len(losses) - 1))
    return next((value for value in losses[width:] if value is not None), None)


def _share(value: float | None, whole: float) -> str:
    return "-" if value is None else f"{value / whole:.0%}"


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"
