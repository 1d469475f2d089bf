"""headwise export"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headwise.cli.heavy import importing
from headwise.cli.options import AsJson, Model
from headwise.cli.progress import notes
from headwise.records.settings import GgufPrecision

WIDTH = 32  # llama.cpp's caches of 8 and 4 bits come in blocks


def export(
    model: Model,
    gguf: Annotated[Path, typer.Option(metavar="FILE", help="The GGUF file to write, for llama.cpp and Ollama.")],
    quantise: Annotated[GgufPrecision, typer.Option(help="How its matrices are stored.")] = "f16",
    as_json: AsJson = False,
) -> None:
    """Write a Llama-type model, reduced or not, as a GGUF file with its tokenizer, checked by its logits."""
    with importing():
        from headwise.steps.export import export_gguf

    report = export_gguf(model, gguf, quantise)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    cached, own = report["kv_bytes_per_token"], report["model_kv_bytes_per_token"]
    typer.echo(
        f"{gguf}: {report['bytes'] / 1e6:.1f} MB, architecture {report['architecture']}, heads of "
        f"{report['head_width']}; {report['divergence']:.2g} nats from the model, same next token at "
        f"{report['agreement']:.1%} of positions.\n"
        f"llama.cpp caches {cached:,} bytes a token (f16). Next: llama-cli -m {gguf}"
    )
    if cached > own:
        notes([f"The model needs {own:,} bytes a token; llama.cpp knows one head width for all layers and pads to it."])
    if report["packed"]:
        notes(["Rounded caches are headwise's own: llama.cpp caches this model whole, or with its --cache-type-k/-v."])
    if report["head_width"] % WIDTH:
        notes([f"Its q8_0 and q4_0 caches need head widths in multiples of {WIDTH}: plan with --multiple-of {WIDTH}."])
