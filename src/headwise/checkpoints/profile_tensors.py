"""The tensors of profile.safetensors: moments, bases and Fisher information of each layer, calibration inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.checkpoints.tensor_files import Kinds, check_tensors
from headwise.data.calibration import Batch
from headwise.data.fitness import check_inputs
from headwise.files.errors import InputError
from headwise.records.shape import LayerShape, ModelShape

INPUTS, HELD_OUT = "inputs.", "held_out."


def layer_kinds(layer: LayerShape) -> Kinds:
    """The tensors that a profile holds of ``layer``; none where there is no attention."""
    H, G, K, V = layer.heads, layer.kv_heads, layer.qk_dim, layer.v_dim
    U, F = layer.units, layer.qk_dim - layer.rotary
    shapes = {
        "q_moment": (H, K, K),
        "k_moment": (G, K, K),
        "k_mean": (G, K),
        "v_moment": (G, V, V),
        "out_moment": (H, V, V),
        "qk_fisher": (G, U, U),
        "v_fisher": (G, V, V),
        "qk_directions": (G, F, F),
        "qk_duals": (G, F, F),
        "v_directions": (G, V, V),
        "v_duals": (G, V, V),
    }
    return {name: (torch.float32, shape) for name, shape in shapes.items()} if layer.heads else {}


def code_kinds(layer: LayerShape) -> Kinds:
    """The tensors that a profile also holds of a layer whose cache can be packed."""
    cached = layer.cached
    G, K, A, W = cached.kv_heads, cached.qk_dim, cached.value_groups, cached.value_group_width
    shapes = {"k_code_directions": (G, K, K), "k_code_duals": (G, K, K), "v_code_map": (A, W, W)}
    if not layer.latent:
        shapes["kv_code_map"] = (A, layer.joint_group_width, layer.joint_group_width)
    return {name: (torch.float32, shape) for name, shape in shapes.items()}


def shared_kinds(layer: LayerShape) -> Kinds:
    """The tensors that a profile also holds of a layer whose key/value heads were measured together."""
    if not layer.joinable:
        return {}
    G, A, P, F, V = layer.kv_heads, layer.value_groups, layer.rotary // 2, layer.qk_dim - layer.rotary, layer.v_dim
    J, sizes = G // A, len(layer.joinable)
    shapes = {
        "shared_pair_moment": (A, P, J, J, 2),
        "shared_free_moment": (A, J * F, J * F),
        "shared_v_moment": (A, J * V, J * V),
        "shared_k_damage": (sizes, G * layer.units),
        "shared_v_damage": (sizes, G * V),
    }
    return {name: (torch.float32, shape) for name, shape in shapes.items()}


def absorbed_kinds(layer: LayerShape) -> Kinds:
    """The tensors that a profile also holds of a layer whose blocks of heads may cache latents."""
    A, R = layer.value_groups, layer.joint_group_width
    shapes = dict.fromkeys(("second", "clipped"), (A, R, R))
    return {f"absorbed_{name}": (torch.float32, shape) for name, shape in {"mean": (A, R), **shapes}.items()}


def mlp_kinds(layer: LayerShape) -> Kinds:
    """The tensor that a profile also holds of a layer whose MLP can be cut: its channels, the one felt most first."""
    return {} if layer.mlp is None else {"mlp_order": (torch.int32, (layer.mlp.channels,))}


def check_profile_tensors(path: Path, shape: ModelShape, tensors: Mapping[str, Tensor]) -> None:
    """Raise where ``tensors`` are not those of a profile of a model of ``shape``."""
    expected = {}
    for i, layer in enumerate(shape.layers):
        own = dict(layer_kinds(layer))
        for kinds in (code_kinds(layer), shared_kinds(layer), absorbed_kinds(layer), mlp_kinds(layer)):
            own |= dict(kinds) if any(f"{i}.{name}" in tensors for name in kinds) else {}
        expected |= {f"{i}.{name}": kind for name, kind in own.items()}
    measured = {name: tensor for name, tensor in tensors.items() if not name.startswith((INPUTS, HELD_OUT))}
    check_tensors(measured, expected, f"{path}")
    for which in (INPUTS, HELD_OUT):
        batches: dict[str, set[str]] = {}
        for key in tensors:
            if key.startswith(which):
                place, _, name = key.removeprefix(which).partition(".")
                batches.setdefault(place.partition("-")[0], set()).add(name)
        whole = set(batches) == {str(number) for number in range(len(batches))}
        if not whole or len({frozenset(names) for names in batches.values()}) > 1:
            raise InputError(f"{path} does not hold all that was measured on; inspect the model again.")


def check_profile_inputs(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Raise where the inputs among the tensors of a profile are not inputs of ``model``."""
    for which in (INPUTS, HELD_OUT):
        if any(key.startswith(which) for key in tensors):
            for batch in profiled_batches(tensors, which):
                check_inputs(model, batch.inputs, "The text of the profile")


def profiled_batches(tensors: Mapping[str, Tensor], which: str = INPUTS) -> list[Batch]:
    """The batches a profile was measured on or (`HELD_OUT`) held out, from its tensors ``<which><number>.<name>``.

    The kind of text stands behind the number: ``inputs.3-chat.input_ids``.
    """
    batches: dict[int, Batch] = {}
    for key, tensor in tensors.items():
        if key.startswith(which):
            place, name = key.removeprefix(which).split(".", 1)
            number, _, kind = place.partition("-")
            batch = batches.setdefault(int(number), Batch({}, 0, (), kind))
            batch.inputs[name] = tensor
    if not batches and which == INPUTS:
        raise InputError("This profile does not hold the text it was measured on; inspect the model again.")
    return [batches[number] for number in sorted(batches)]


def batch_tensors(batches: Sequence[Batch], which: str) -> dict[str, Tensor]:
    """The tensors that `profiled_batches` reads."""
    return {
        f"{which}{number}-{batch.kind}.{name}": tensor.contiguous()
        for number, batch in enumerate(batches)
        for name, tensor in batch.inputs.items()
    }
