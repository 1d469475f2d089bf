"""Running a model block by block over many batches: memory follows one block, and a block can change in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from headwise.families.sites import sites_of
from headwise.tracing.forward import placed_inputs


class _Enough(Exception):
    """Raised from a hook to leave a forward pass."""


class Stream:
    """What flows between the blocks of a model: hidden states of all batches, and what else blocks take.

    ``path`` names the blocks of a model with several lists of them, such as those of an encoder and of a decoder.
    Positions and masks are taken over from the first batch with the same ones: of one size and, if any, one padding.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], path: str | None = None) -> None:
        own = [site.block for site in sites_of(model) if path in (None, site.stack.blocks)]
        self.blocks: list[nn.Module] = list(dict.fromkeys(own))
        self.hidden: list[Tensor] = []
        self._rest: list[list[tuple[tuple, dict]]] = []
        decoder = any(site.cache != "none" for site in sites_of(model))
        known: dict[tuple, list[tuple[tuple, dict]]] = {}
        for number, batch in enumerate(batches):
            masks = [tensor.numpy().tobytes() for name, tensor in sorted(batch.items()) if "mask" in name]
            alike = (tuple(batch[model.main_input_name].shape), *masks)
            if model.config.is_encoder_decoder:
                alike = (number,)  # a decoder is also given what the encoder makes of this very batch
            first, rest = self._enter(model, batch, decoder, alike not in known)
            self._rest.append(known.setdefault(alike, rest))
            self.hidden.append(first)

    def _enter(
        self, model: PreTrainedModel, batch: dict[str, Tensor], decoder: bool, whole: bool
    ) -> tuple[Tensor, list[tuple[tuple, dict]]]:
        """What comes to the first block, and (of a ``whole`` run) all else each block is given: positions and masks."""
        entered: list[Tensor] = []
        rest: list[tuple[tuple, dict]] = []

        def see(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            entered.append(args[0] if args else kwargs["hidden_states"])
            rest.append((args[1:], others))
            if not whole:
                raise _Enough

        handles = [block.register_forward_pre_hook(see, with_kwargs=True) for block in self.blocks]
        inputs = placed_inputs(model, batch)
        try:
            model.base_model(**inputs, **({"use_cache": False} if decoder else {}))
        except _Enough:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return entered[0], rest

    def run(self, block: int, number: int) -> Tensor:
        """What block ``block`` makes of batch ``number``; the stream itself stays where it is."""
        args, kwargs = self._rest[number][block]
        output = self.blocks[block](self.hidden[number], *args, **kwargs)
        return output if isinstance(output, Tensor) else output[0]

    def run_watched(self, module: nn.Module, block: int, number: int) -> tuple[Tensor, Tensor]:
        """What a block gives, and what ``module`` inside it gives on the way (0 where that is never called)."""
        outputs: list[Tensor] = []
        handle = module.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            return self.run(block, number), (outputs or [torch.zeros(())])[0]
        finally:
            handle.remove()

    def run_until(self, module: nn.Module, block: int, number: int) -> tuple[tuple, dict[str, Any]]:
        """Run a block only until ``module`` inside it is called, and return what that is called with."""
        seen: list[tuple[tuple, dict[str, Any]]] = []

        def see(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            seen.append((args, kwargs))
            raise _Enough

        self._run_with(module.register_forward_pre_hook(see, with_kwargs=True), block, number)
        return seen[0]

    def run_through(self, module: nn.Module, block: int, number: int) -> Tensor:
        """Run a block only until ``module`` inside it is done, and return what that gives."""
        seen: list[Tensor] = []

        def see(_: nn.Module, args: tuple, output: Tensor) -> None:
            seen.append(output)
            raise _Enough

        self._run_with(module.register_forward_hook(see), block, number)
        return seen[0]

    def _run_with(self, handle: RemovableHandle, block: int, number: int) -> None:
        try:
            self.run(block, number)
        except _Enough:
            pass
        finally:
            handle.remove()
