"""The model card: where a model comes from, how it was made, what it costs, how to open it, how well it scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from headwise.families.reduced import auto_map, stock_class_of
from headwise.families.shapes import shape_of
from headwise.families.sites import base_type
from headwise.files.errors import InputError
from headwise.files.writing import write_text
from headwise.records.budget import budget_words
from headwise.records.cost import cost_of
from headwise.records.plan import Plan
from headwise.records.shape import DIMS, ModelShape
from headwise.runtime import modeling_headwise, reopen

SCORES = "## Scores"
LISTED = (
    " It lists its RoPE frequencies, which llama.cpp's own converter leaves out: its files talk nonsense. Make GGUF "
    "files with `headwise export`."
)


def card(model: PreTrainedModel, plan: Plan, source: str, command: str, facts: Mapping[str, Any]) -> str:
    """The model card: where the model comes from, how it was made, what it costs, how to open it."""
    reduced = plan.blueprint is None
    base = source if reduced and source and not Path(source).expanduser().exists() else None
    data = ModelCardData(
        base_model=base,
        base_model_relation="finetune" if base else None,
        library_name="transformers",
        tags=["headwise", "pruned", "attention-compression"] if reduced else ["headwise"],
    )
    shape = shape_of(model)
    opener, trust, note = type(model).__name__, "", "It is a stock architecture: no custom code."
    if isinstance(model, modeling_headwise.ReducedModel):
        own = {"auto_map": auto_map(base_type(model.config), stock_class_of(model))}
        opener, trust = reopen.openers(own, opener)[0], ", trust_remote_code=True"
        note = (
            "Its layers differ in shape, so it brings its own modelling file; with `import headwise` no "
            "`trust_remote_code` is needed."
        )
    if getattr(model.config, "rope_parameters", None) and model.config.rope_parameters.get("rope_type") == "longrope":
        note += LISTED
    if reduced:
        title = f"{Path(source).name or 'model'}, reduced"
        origin = f"Made from a {plan.family} model with {len(plan.before)} attention layers"
    else:
        title = f"{plan.family} model, built from scratch"
        origin = f"Built as a {plan.family} model with {len(plan.layers)} layers"
    history = _budget(plan) + _history(facts)
    return (
        f"""---
{data.to_yaml()}
---

# {title} by headwise {version("headwise")}

{note}

```python
from transformers import {opener}

model = {opener}.from_pretrained("path/to/this/folder"{trust})
```
{_pooled(trust) if facts.get("pools") else ""}{_packed(shape, facts["map_bytes"]) if "map_bytes" in facts else ""}
{origin}{f", by `{command}`" if command else ""}.
{history}It has {shape.attention_parameters():,} attention parameters and {shape.total_parameters():,} in all; the
exact plan is in `plan.json`.

{_layer_table(shape, plan)}

Checked when saved: reopened in a fresh process, largest difference of outputs {facts["difference"]:.1e}.
{" ".join(facts.get("notes", ()))}
""".rstrip()
        + "\n"
    )


def _layer_table(shape: ModelShape, plan: Plan) -> str:
    """The layers of the saved model and what was done to those of the original; blocks that are gone have no number."""
    numbers = {run[0]: index for index, run in enumerate(plan.made_of())}
    if len(numbers) != len(shape.layers):
        raise InputError(f"The model has {len(shape.layers)} layers, its plan leaves {len(numbers)}.")
    rows = []
    for original, phrase in enumerate(plan.describe()):
        index = numbers.get(original)
        cells = ("-",) * len(DIMS) if index is None else shape.layers[index].dims
        rows.append(["-" if index is None else index, *cells, phrase or "-"])
    head = ["layer", "heads", "key/value heads", "query/key width", "value width", "change"]
    columns = len(head) if plan.blueprint is None else len(head) - 1
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line[:columns])} |" for line in lines)


def _pooled(trust: str) -> str:
    return f"""
Sentences become vectors as they did before:

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder"{trust})
```
"""


def _packed(shape: ModelShape, map_bytes: int) -> str:
    dense = replace(shape, layers=tuple(replace(layer, packed=None) for layer in shape.layers))
    bytes_each = [cost_of(each, 1).kv_bytes_per_token for each in (shape, dense)]
    return f"""
Its KV cache can be packed into {bytes_each[0]:,} bytes a token instead of {bytes_each[1]:,} in bf16, by the codes in
`cache.safetensors`; the maps in there are {map_bytes / 1e6:.1f} MB of weights. Without this it runs as any other model:

```python
import headwise as hw

tokens = model.generate(**inputs, past_key_values=hw.cache(model))
```
"""


def _budget(plan: Plan) -> str:
    """What the plan that was carried out had to keep to, for the card."""
    words = budget_words(plan.budget) if plan.blueprint is None else ""
    return f"Its budget: {words}.\n" if words else ""


def _history(facts: Mapping[str, Any]) -> str:
    """Where the weights come from, for the card."""
    ways = {
        "weighted": "Cut along the directions its loss feels most, measured on text",
        "token-weighted": "Cut along directions weighted by second moments of tokens",
        "svd": "Cut by the weights alone (truncated SVD)",
    }
    if healed := facts.get("healed"):
        return (
            f"Healed by distillation from {Path(healed['teacher']).name}: {healed['tokens']:,} tokens of "
            f"{Path(healed['text']).name}, {healed['train']} trained in {healed['precision']}; {healed['score']} on "
            f"held-out text "
            f"{healed['before']:.4f} before, {healed['after']:.4f} after.\n"
        )
    if trained := facts.get("trained"):
        scores = ", ".join(f"{name} {value:.4f}" for name, value in trained["scores"].items())
        return (
            f"Trained on {trained['tokens']:,} tokens of {trained['data']} (AdamW, learning rate "
            f"{trained['rate']:.2g}, seed {trained['seed']}, {trained['precision']}); on held-out data {scores}.\n"
        )
    if facts.get("method") not in ways:
        return ""
    fitted = f"; {' and '.join(facts['refit'])} refitted by least squares" if facts.get("refit") else ""
    return f"{ways[facts['method']]}{fitted}. No training.\n"


def add_scores(folder: Path, table: str) -> None:
    """Put a table of scores (Markdown) at the end of the card of a saved model, in place of an earlier one."""
    card_file = folder / "README.md"
    before = card_file.read_text(encoding="utf-8")
    after = f"{before.split(SCORES)[0].rstrip()}\n\n{SCORES}\n\n{table.rstrip()}\n"
    if after != before:
        write_text(card_file, after)
