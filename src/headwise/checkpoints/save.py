"""Saving a student so that others can open it: written under another name, checked in a fresh process, renamed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from headwise.checkpoints.companions import MODULES, copy_companions
from headwise.data.foreign import without_code
from headwise.families.reduced import auto_map, stock_class_of
from headwise.families.shapes import shape_of
from headwise.families.sites import base_type
from headwise.files.errors import InputError
from headwise.files.locks import locking
from headwise.files.reading import read_json
from headwise.files.writing import new_folder, write_text
from headwise.records.budget import budget_words
from headwise.records.cost import cost_of
from headwise.records.plan import Plan
from headwise.records.shape import DIMS, ModelShape
from headwise.runtime import modeling_headwise, reopen
from headwise.tracing.example import example_inputs

SCORES = "## Scores"
DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2}  # relative to the largest output


@locking("folder", "save")
def save_student(
    student: PreTrainedModel,
    folder: Path | str,
    *,
    plan: Plan,
    source: str,
    command: str = "",
    facts: Mapping[str, Any] | None = None,
    files: Mapping[str, str] | None = None,
    shard: str = "5GB",
) -> dict[str, Any]:
    """Write ``student`` to ``folder``, prove that a fresh process opens it, and return what that process found.

    ``source`` is the model it was made from; its tokenizer or processor files are copied along, and "notes" say which
    could not be. ``facts`` (method and what was refitted, or how it was healed or trained) go into the card, ``files``
    are texts to lay beside.
    Nothing appears under ``folder`` until all is written and checked.
    """
    with new_folder(Path(folder)) as temporary:
        student.save_pretrained(temporary, max_shard_size=shard)
        keep_own_code(student, temporary)
        notes = copy_companions(source, temporary, pooling=plan.blueprint is None)
        plan.save(temporary / "plan.json")
        for name, text in (files or {}).items():
            write_text(temporary / name, text)
        found = {**check_saved(student, temporary), "notes": notes}
        facts = {**found, **(facts or {}), "pools": (temporary / MODULES).exists()}
        write_text(temporary / "README.md", card(student, plan, source, command, facts))
    return found


def keep_own_code(student: PreTrainedModel, folder: Path) -> None:
    """Leave no code in ``folder`` but headwise's modelling file, and that only beside a per-layer model.

    Saving lays a copy of the file that a class was read from beside the model, and keeps what its config named before.
    """
    for path in folder.rglob("*.py"):
        path.unlink()
    for path in folder.glob("*config.json"):
        content = read_json(path)
        cleaned = without_code(content)
        if content.get("model_type") == modeling_headwise.HeadwiseConfig.model_type:
            shutil.copyfile(reopen.OWN_CODE, folder / reopen.OWN_CODE.name)
            cleaned["auto_map"] = auto_map(base_type(student.config), stock_class_of(student))
        if cleaned != content:
            write_text(path, json.dumps(cleaned, indent=2, sort_keys=True) + "\n")


def check_saved(student: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Reload ``folder`` in a fresh process and compare outputs, weights and the bytes of a real cache."""
    inputs = example_inputs(student)
    training = student.training
    with torch.inference_mode():
        expected = student.eval()(**inputs)[0]
    student.train(training)
    if not expected.isfinite().all():
        raise InputError("The model gives NaN or infinity: its config or its weights are damaged, or overflow.")
    backend = student.config._attn_implementation
    backends = [backend] if backend in ("eager", "sdpa") else []  # others may not exist in the fresh process
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # goes with the folder if this process is killed
        asked, answered = Path(scratch) / "inputs.safetensors", Path(scratch) / "outputs.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in inputs.items()}, asked)
        process = subprocess.run(
            [sys.executable, "-P", reopen.__file__, str(folder), str(asked), str(answered), *backends],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HF_MODULES_CACHE": str(Path(scratch) / "modules"), "HF_HUB_OFFLINE": "1"},
        )
        if process.returncode:
            raise RuntimeError(f"The saved model does not open in a fresh process:\n{process.stderr.strip()}")
        found = json.loads(process.stdout.strip().splitlines()[-1])
        output = load_file(answered)["output"]
    difference = (output.float() - expected.cpu().float()).abs().max().item()
    allowed = TOLERANCE[DTYPES[student.dtype]] * max(expected.abs().max().item(), 1.0)
    predicted = predicted_cache(student, inputs)
    for wrong, what in (
        (found["missing"], f"weights newly initialised: {found['missing'][:3]}"),
        (found["unexpected"], f"weights left over: {found['unexpected'][:3]}"),
        (not difference <= allowed, f"outputs differ by {difference:.2g}"),
        (found["cache_bytes"] != predicted, f"the cache holds {found['cache_bytes']} bytes, not {predicted}"),
    ):
        if wrong:
            raise RuntimeError(f"The saved model does not come back as it was: {what}.")
    return {**found, "difference": difference}


def predicted_cache(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> int:
    """Bytes the cache must hold after one pass over ``inputs``, by the arithmetic of `headwise.records`."""
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    shape = shape_of(model)
    if ids is None or not getattr(model.config, "use_cache", False):
        return 0
    return cost_of(shape, ids.shape[1], ids.shape[0], DTYPES[model.dtype]).kv_bytes


def card(student: PreTrainedModel, plan: Plan, source: str, command: str, facts: Mapping[str, Any]) -> str:
    """The model card: where the model comes from, how it was made, what it costs, how to open it."""
    reduced = plan.blueprint is None
    base = source if reduced and source and not Path(source).expanduser().exists() else None
    data = ModelCardData(
        base_model=base,
        base_model_relation="finetune" if base else None,
        library_name="transformers",
        tags=["headwise", "pruned", "attention-compression"] if reduced else ["headwise"],
    )
    shape = shape_of(student)
    opener, trust, note = type(student).__name__, "", "It is a stock architecture: no custom code."
    if isinstance(student, modeling_headwise.ReducedModel):
        own = {"auto_map": auto_map(base_type(student.config), stock_class_of(student))}
        opener, trust = reopen.openers(own, opener)[0], ", trust_remote_code=True"
        note = (
            "Its layers differ in shape, so it brings its own modelling file; with `import headwise` no "
            "`trust_remote_code` is needed."
        )
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
{_pooled(trust) if facts.get("pools") else ""}
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
    """The layers of the saved model and, where it was reduced, what was done to each; dropped blocks have no number."""
    if plan.dropped().count(False) != len(shape.layers):
        raise InputError(f"The model has {len(shape.layers)} layers, its plan leaves {plan.dropped().count(False)}.")
    layers = iter(enumerate(shape.layers))
    rows = []
    for phrase, dropped in zip(plan.describe(), plan.dropped(), strict=True):
        index, cells = "-", ("-",) * len(DIMS)
        if not dropped:
            index, layer = next(layers)
            cells = layer.dims
        rows.append([index, *cells, phrase or "-"])
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
