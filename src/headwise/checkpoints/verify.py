"""A saved model opened again in a fresh process: same outputs, every weight there, a cache as large as predicted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from headwise.families.shapes import shape_of
from headwise.files.errors import InputError
from headwise.records.cost import cost_of
from headwise.runtime import reopen
from headwise.runtime.cache import PackedCache, read_spec
from headwise.tracing.example import example_inputs

DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5, "fp16": 5e-3, "bf16": 2e-2}  # relative to the largest output


def check_saved(model: PreTrainedModel, folder: Path) -> dict[str, Any]:
    """Reload ``folder`` in a fresh process and compare outputs, weights and the bytes of a real cache."""
    inputs = example_inputs(model)
    training = model.training
    with torch.inference_mode():
        expected = model.eval()(**inputs)[0]
    model.train(training)
    if not expected.isfinite().all():
        raise InputError("The model gives NaN or infinity: its config or its weights are damaged, or overflow.")
    backend = model.config._attn_implementation
    backends = [backend] if backend in ("eager", "sdpa") else []  # others may not exist in the fresh process
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # goes with the folder if this process is killed
        given, answer = Path(scratch) / "inputs.safetensors", Path(scratch) / "outputs.safetensors"
        save_file({name: tensor.cpu().contiguous() for name, tensor in inputs.items()}, given)
        process = subprocess.run(
            [sys.executable, "-P", reopen.__file__, str(folder), str(given), str(answer), *backends],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HF_MODULES_CACHE": str(Path(scratch) / "modules"), "HF_HUB_OFFLINE": "1"},
        )
        if process.returncode:
            raise RuntimeError(f"The saved model does not open in a fresh process:\n{process.stderr.strip()}")
        report = json.loads(process.stdout.strip().splitlines()[-1])
        output = load_file(answer)["output"]
    difference = (output.float() - expected.cpu().float()).abs().max().item()
    allowed = TOLERANCE[DTYPES[model.dtype]] * max(expected.abs().max().item(), 1.0)
    predicted = predicted_cache(model, inputs)
    for wrong, what in (
        (report["missing"], f"weights newly initialised: {report['missing'][:3]}"),
        (report["unexpected"], f"weights left over: {report['unexpected'][:3]}"),
        (not difference <= allowed, f"outputs differ by {difference:.2g}"),
        (report["cache_bytes"] != predicted, f"the cache holds {report['cache_bytes']} bytes, not {predicted}"),
    ):
        if wrong:
            raise RuntimeError(f"The saved model does not come back as it was: {what}.")
    return {**report, "difference": difference}


def check_packed(model: PreTrainedModel, path: Path) -> dict[str, Any]:
    """Read how the cache of ``model`` is packed, fill one by a real pass, and compare its bytes with the prediction."""
    inputs, before = example_inputs(model), model.config._attn_implementation or "sdpa"
    cache = PackedCache(model, read_spec(path))
    try:
        with torch.inference_mode():
            model.eval()(**inputs, past_key_values=cache, use_cache=True)
    finally:
        model.set_attn_implementation(before)
    rows, tokens = inputs["input_ids"].shape
    predicted = cost_of(shape_of(model), tokens, rows, DTYPES[model.dtype]).kv_bytes
    if cache.nbytes != predicted:
        raise RuntimeError(f"The packed cache holds {cache.nbytes} bytes, not {predicted}.")
    maps = sum(codes.value_map.nbytes for codes in cache.spec.layers.values())
    return {"packed_bytes": cache.nbytes, "map_bytes": maps}


def predicted_cache(model: PreTrainedModel, inputs: Mapping[str, torch.Tensor]) -> int:
    """Bytes a plain cache must hold after one pass over ``inputs``, by the arithmetic of `headwise.records`."""
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    shape = shape_of(model)
    shape = replace(shape, layers=tuple(replace(layer, packed=None) for layer in shape.layers))
    if ids is None or not getattr(model.config, "use_cache", False):
        return 0
    return cost_of(shape, ids.shape[1], ids.shape[0], DTYPES[model.dtype]).kv_bytes
