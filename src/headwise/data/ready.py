"""What a model is measured on where that is no text: pictures, arrays of a file, or batches as a model takes them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from headwise.data.arrays import as_tensor, read_arrays, read_pictures
from headwise.data.calibration import CHECKED, TOKENS_AT_ONCE, Batch, Calibration
from headwise.data.fitness import check_inputs
from headwise.families.sites import sites_of
from headwise.files.errors import InputError

SPOKEN_TOKENS = 64  # that a speech model says itself where nobody gives it a transcript
MOST_INPUTS = 8  # times the tokens asked for, where a stack sees few tokens of each input

Arrays = dict[str, Tensor]


def are_batches(given: Any) -> bool:
    """Whether ``given`` holds tensors by the names of a model's inputs, or is a list of such."""
    rows = given if isinstance(given, list | tuple) else [given]
    return bool(rows) and all(
        isinstance(row, Mapping) and row and all(isinstance(value, Tensor | np.ndarray) for value in row.values())
        for row in rows
    )


def input_calibration(
    model: PreTrainedModel, source: str, inputs: Any, tokens: int, *, trust_remote_code: bool = False
) -> Calibration:
    """Pictures of a folder, the arrays of a .npz file, or batches, which carry the names of the model's inputs.

    As many are used as give the stack that sees the fewest tokens of an input ``tokens`` in all, within reason; every
    fifth of them is held out. Batches of several sizes are taken one size after the other, each with its share.
    """
    if isinstance(inputs, str | Path):
        path = Path(inputs)
        most = MOST_INPUTS * tokens
        folder = path.is_dir()
        arrays = read_pictures(source, path, most, trust_remote_code=trust_remote_code) if folder else read_arrays(path)
        return _of_arrays(model, source, arrays, tokens, str(path))
    if not are_batches(inputs):
        raise InputError("`inputs` may be a folder of pictures, a .npz file, or a list of batches: tensors by name.")
    sizes = _by_size(inputs)
    name = f"{len(inputs):,} batches" if isinstance(inputs, list | tuple) else "1 batch"
    rows = [len(next(iter(arrays.values()))) for arrays in sizes]
    parts = [
        _of_arrays(model, source, arrays, max(1, round(tokens * count / sum(rows))), name)
        for arrays, count in zip(sizes, rows, strict=True)
    ]
    return Calibration(
        tuple(batch for part in parts for batch in part.batches),
        name,
        list(dict.fromkeys(note for part in parts for note in part.notes)),
        tuple(batch for part in parts for batch in part.held_out),
    )


def _by_size(inputs: Any) -> list[Arrays]:
    """Batches of the same names and sizes put together."""
    rows = inputs if isinstance(inputs, list | tuple) else [inputs]
    alike: dict[tuple[Any, ...], list[Arrays]] = {}
    for number, row in enumerate(rows):
        batch = {name: as_tensor(np.asarray(_on_cpu(value)), f"Batch {number}: {name}") for name, value in row.items()}
        size = tuple((name, tensor.shape[1:]) for name, tensor in sorted(batch.items()))
        alike.setdefault(size, []).append(batch)
    return [{name: torch.cat([batch[name] for batch in some]) for name in some[0]} for some in alike.values()]


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", torch.float32 if value.is_floating_point() else None)


def _of_arrays(model: PreTrainedModel, source: str, arrays: Arrays, tokens: int, where: str) -> Calibration:
    name = model.main_input_name
    if name not in arrays:
        raise InputError(f"{where} holds {', '.join(sorted(arrays)) or 'nothing'}; {source} needs an array {name!r}.")
    if not len(arrays[name]):
        raise InputError(f"{where} holds no {name}.")
    check_inputs(model, arrays, where)
    one = _tokens_of(model, {key: array[:1] for key, array in arrays.items()})
    fewest = min(one, _spoken(arrays)) if model.config.is_encoder_decoder else one
    wanted = min(-(-tokens // fewest), MOST_INPUTS * -(-tokens // one))
    used = min(len(arrays[name]), max(1, round((1 + CHECKED) * wanted)))
    every = round(1 + 1 / CHECKED)
    held = [number for number in range(used) if number % every == every - 1] or ([used - 1] if used > 1 else [])
    main = [number for number in range(used) if number not in set(held)]
    calibration = Calibration(
        tuple(_input_batches(model, arrays, main, one, where)),
        where,
        held_out=tuple(_input_batches(model, arrays, held, one, where)),
    )
    if len(main) < wanted:
        calibration.notes.append(f"{where} gives {len(main) * fewest:,} tokens instead of {tokens:,}.")
    if not held:
        calibration.notes.append(f"{where} holds a single input: what is predicted is not checked.")
    return calibration


def _input_batches(
    model: PreTrainedModel, arrays: Arrays, numbers: Sequence[int], one: int, where: str
) -> Generator[Batch, None, None]:
    speaks = model.config.is_encoder_decoder and "decoder_input_ids" not in arrays  # one by one, of any length
    step = 1 if speaks else max(1, TOKENS_AT_ONCE // one)
    for some in torch.tensor(numbers, dtype=torch.long).split(step) if numbers else ():
        inputs = {key: array[some] for key, array in arrays.items()}
        if speaks:
            inputs["decoder_input_ids"] = _own_words(model, inputs[model.main_input_name], where)
        yield Batch(inputs, one * len(some), ())


def _spoken(arrays: Arrays) -> int:
    """About how many tokens the decoder sees of one input."""
    ids = arrays.get("decoder_input_ids")
    return SPOKEN_TOKENS // 2 if ids is None else ids.shape[1]


def _own_words(model: PreTrainedModel, sound: Tensor, where: str) -> Tensor:
    """What a speech model says to ``sound``, from its start token on, where nobody gives it a transcript."""
    if not hasattr(model, "generate"):
        raise InputError(f"{where} holds no decoder_input_ids, and a model without a head cannot say them itself.")
    longest = min(SPOKEN_TOKENS, cast(int, model.config.max_target_positions) - 2)
    heard = sound.to(model.device, model.dtype)
    ids = cast(Any, model).generate(heard, max_new_tokens=longest, do_sample=False).cpu()
    start = model.config.decoder_start_token_id
    return ids if ids[0, 0] == start else torch.cat((torch.tensor([[start]]), ids), dim=1)


def _tokens_of(model: PreTrainedModel, one: Arrays) -> int:
    """Tokens the (first) attention stack makes of one input; raises where it makes none."""
    seen: list[int] = []
    block = sites_of(model)[0].block
    handle = block.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
        with_kwargs=True,
    )
    inputs = {
        name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
        for name, tensor in one.items()
    }
    if model.config.is_encoder_decoder:
        inputs.setdefault("decoder_input_ids", torch.zeros(1, 1, dtype=torch.long, device=model.device))
    try:
        with torch.no_grad():
            model(**inputs)
    except Exception as error:
        raise InputError(f"The model does not take these inputs: {' '.join(str(error).split())[:200]}") from error
    finally:
        handle.remove()
    return seen[0]
