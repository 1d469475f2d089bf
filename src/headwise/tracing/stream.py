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


class _Stop(Exception):
    """Raised from a hook to leave a forward pass early."""


class Stream:
    """The hidden states of all batches between two blocks of a model, and the other arguments of each block.

    ``path`` names the blocks of a model with several lists of them, such as those of an encoder and of a decoder.
    Batches of the same size and padding share one copy of positions and masks.
    """

    def __init__(self, model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], path: str | None = None) -> None:
        own = [site.block for site in sites_of(model) if path in (None, site.stack.blocks)]
        self.blocks: list[nn.Module] = list(dict.fromkeys(own))
        self.hidden: list[Tensor] = []
        self._arguments: list[list[tuple[tuple, dict]]] = []
        decoder = any(site.cache != "none" for site in sites_of(model))
        known: dict[tuple, list[tuple[tuple, dict]]] = {}
        for number, batch in enumerate(batches):
            masks = [tensor.numpy().tobytes() for name, tensor in sorted(batch.items()) if "mask" in name]
            alike = (tuple(batch[model.main_input_name].shape), *masks)
            if model.config.is_encoder_decoder:
                alike = (number,)  # its blocks also take the encoder's output for this very batch
            hidden, arguments = self._enter(model, batch, decoder, alike not in known)
            self._arguments.append(known.setdefault(alike, arguments))
            self.hidden.append(hidden)

    def _enter(
        self, model: PreTrainedModel, batch: dict[str, Tensor], decoder: bool, whole: bool
    ) -> tuple[Tensor, list[tuple[tuple, dict]]]:
        """The hidden states entering the first block and, with ``whole``, the other arguments of every block."""
        entered: list[Tensor] = []
        arguments: list[tuple[tuple, dict]] = []

        def see(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            others = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            entered.append(args[0] if args else kwargs["hidden_states"])
            arguments.append((args[1:], others))
            if not whole:
                raise _Stop

        handles = [block.register_forward_pre_hook(see, with_kwargs=True) for block in self.blocks]
        inputs = placed_inputs(model, batch)
        try:
            model.base_model(**inputs, **({"use_cache": False} if decoder else {}))
        except _Stop:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return entered[0], arguments

    def run(self, block: int, number: int) -> Tensor:
        """The output of block ``block`` for batch ``number``; ``hidden`` stays as it is."""
        args, kwargs = self._arguments[number][block]
        output = self.blocks[block](self.hidden[number], *args, **kwargs)
        return output if isinstance(output, Tensor) else output[0]

    def run_watched(self, module: nn.Module, block: int, number: int) -> tuple[Tensor, Tensor]:
        """The output of a block, and that of ``module`` inside it (0 where that is never called)."""
        outputs: list[Tensor] = []
        handle = module.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            return self.run(block, number), (outputs or [torch.zeros(())])[0]
        finally:
            handle.remove()

    def run_until(self, module: nn.Module, block: int, number: int) -> tuple[tuple, dict[str, Any]]:
        """Run a block until ``module`` inside it is called, and return that call's arguments."""
        seen: list[tuple[tuple, dict[str, Any]]] = []

        def see(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            seen.append((args, kwargs))
            raise _Stop

        self._run_with(module.register_forward_pre_hook(see, with_kwargs=True), block, number)
        return seen[0]

    def run_through(self, module: nn.Module, block: int, number: int) -> Tensor:
        """Run a block until ``module`` inside it is done, and return that module's output."""
        seen: list[Tensor] = []

        def see(_: nn.Module, args: tuple, output: Tensor) -> None:
            seen.append(output)
            raise _Stop

        self._run_with(module.register_forward_hook(see), block, number)
        return seen[0]

    def _run_with(self, handle: RemovableHandle, block: int, number: int) -> None:
        try:
            self.run(block, number)
        except _Stop:
            pass
        finally:
            handle.remove()
