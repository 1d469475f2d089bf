"""The cost table of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from headwise.records.cost import Cost, CostReport
from headwise.records.shape import ModelShape

UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
ROLES = {"none": "encoder", "tokens": "decoder", "source": "cross"}
Row = TypeVar("Row")
COLUMNS = ("layers", "heads", "kv heads", "qk dim", "v dim", "mlp", "parameters", "KV / token", "KV cache")


def print_costs(report: CostReport, console: Console | None = None) -> None:
    """One row per run of equal layers, then totals; with a plan, every changed number as ``before > after``."""
    console = console or Console(width=None if Console().is_terminal else 110)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "layers" else "right", no_wrap=True)
    for first, last, row in runs([_row(index, report) for index in range(len(report.before.layers))]):
        numbers = str(first) if first == last else f"{first}-{last}"
        table.add_row(f"{numbers} {row[0]}".rstrip(), *row[1:])
    console.print(table)
    console.print()
    totals = Table(box=None, show_header=False, pad_edge=False)
    totals.add_column()
    totals.add_column(justify="right", style="bold")
    for name, value in _totals(report):
        totals.add_row(name, value)
    console.print(totals)


def _row(index: int, report: CostReport) -> tuple[str, ...]:
    before = _cells(index, report.cost, report.before)
    if report.after is None or report.cost_after is None:
        return before
    number = report.kept[index]
    if number is None:  # the last thing done to a block is that it goes, or is joined to another
        place = f"{before[0]} {report.changes[index].rpartition('; ')[2]}".strip()
        return place, *(_change(old, "-") for old in before[1:])
    after = _cells(number, report.cost_after, report.after)
    return before[0], *(_change(old, new) for old, new in zip(before[1:], after[1:], strict=True))


def _cells(index: int, cost: Cost, shape: ModelShape) -> tuple[str, ...]:
    layer, spent = shape.layers[index], cost.layers[index]
    dims = (layer.heads, layer.kv_heads, layer.qk_dim, layer.v_dim)
    return (
        ROLES[layer.cache] if shape.source_tokens else "",
        *(str(value) if layer.heads else "-" for value in dims),
        "-" if layer.mlp is None else f"{layer.mlp.channels:,}",
        count(spent.parameters),
        size(spent.kv_bytes_per_token),
        size(spent.kv_bytes),
    )


def _totals(report: CostReport) -> list[tuple[str, str]]:
    cost, after = report.cost, report.cost_after
    where = f"{cost.context:,} tokens x {cost.batch}, {cost.dtype}"
    lines = [
        ("attention parameters", count, "attention_parameters"),
        ("all parameters", count, "total_parameters"),
    ]
    if any(layer.cache != "none" for layer in report.before.layers):
        lines += [
            ("KV cache per token", size, "kv_bytes_per_token"),
            (f"KV cache, {where}", size, "kv_bytes"),
        ]
    lines.append(("FLOPs per input token, mean", count, "prefill_flops"))
    if cost.decode_flops:
        lines.append((f"FLOPs per new token after {cost.context:,}", count, "decode_flops"))
    return [
        (name, _total(show, getattr(cost, key), getattr(after, key) if after else None)) for name, show, key in lines
    ]


def _total(show: Callable[[int], str], before: int, after: int | None) -> str:
    if after is None:
        return show(before)
    share = f"  ({after / before:.1%})" if before else ""
    return f"{_change(show(before), show(after))}{share}"


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} > {after}"


def runs(rows: Sequence[Row]) -> list[tuple[int, int, Row]]:
    """Neighbouring equal rows as (first, last, row)."""
    merged: list[tuple[int, int, Row]] = []
    for index, row in enumerate(rows):
        if merged and merged[-1][2] == row:
            merged[-1] = (merged[-1][0], index, row)
        else:
            merged.append((index, index, row))
    return merged


def count(value: int) -> str:
    """A number in four digits, with k, M, G or T."""
    return _scaled(value, UNITS, "")


def size(value: int) -> str:
    """Bytes in four digits, with their unit."""
    return _scaled(value, BYTES, " B")


def _scaled(value: int, units: tuple[tuple[float, str], ...], plain: str) -> str:
    for unit, name in units:
        if value >= unit:
            return f"{value / unit:.4g} {name}"
    return f"{value}{plain}"
