"""What latent attention caches, watched and rounded where it is made: the shared key before RoPE, and the latent."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from headwise.families.latent import cached_order
from headwise.families.sites import Site
from headwise.runtime.packing import LayerCodes


@dataclass(frozen=True, slots=True)
class Latents:
    """What one latent attention is about to cache: its latent, and what holds the shared key in its last rows.

    ``order_R`` lists these rows as they are cached. Both come out as if of one head, (B, 1, T, width).
    """

    down_BTL: Tensor
    latent_BTV: Tensor
    order_R: Tensor

    @property
    def k_BGTK(self) -> Tensor:
        """The shared key before RoPE."""
        return _shared(self.down_BTL, self.order_R)

    @property
    def v_BGTV(self) -> Tensor:
        """The latent."""
        return self.latent_BTV[:, None]

    def watch_gradients(self, see: Callable[[str, Tensor], None]) -> None:
        """Call ``see`` with the gradients by the key ("k") and by the latent ("v"), as they come."""
        order = self.order_R  # hooks must not hold the tensors that they hang on
        self.down_BTL.register_hook(lambda gradient: see("k", _shared(gradient, order)))
        self.latent_BTV.register_hook(lambda gradient: see("v", gradient[:, None]))


Watcher = Callable[[str, Latents], None]


@contextmanager
def watching_latents(sites: Iterable[Site], watcher: Watcher) -> Generator[None, None, None]:
    """Call ``watcher(path, latents)`` at every latent attention among ``sites``, in every forward pass."""
    with ExitStack() as handles:
        for site in sites:
            if site.family.latent and not site.removed:
                for handle in _watch(site, watcher):
                    handles.callback(handle.remove)
        yield


@contextmanager
def rounding_latents(sites: Iterable[Site], codes: Mapping[int, LayerCodes], whole: int) -> Generator[None, None, None]:
    """In the block the latent attention among ``sites`` caches, and reads, what ``codes`` (by slot) give back.

    The first ``whole`` tokens of a sequence stay as they are; gradients pass as if nothing had happened.
    """
    with ExitStack() as handles:
        for site in sites:
            if site.family.latent and site.module.layer_idx in codes:
                for handle in _round(site, codes[site.module.layer_idx], whole):
                    handles.callback(handle.remove)
        yield


def _shared(down_BTL: Tensor, order_R: Tensor) -> Tensor:
    return down_BTL[..., -len(order_R) :][..., order_R.to(down_BTL.device)][:, None]


def _watch(site: Site, watcher: Watcher) -> list[RemovableHandle]:
    order, latest = cached_order(site.module.config), []

    def see_down(module: Any, inputs: Any, output: Tensor) -> None:
        latest[:] = [output]

    def see_latent(module: Any, inputs: Any, output: Tensor) -> None:
        watcher(site.path, Latents(latest.pop(), output, order))

    return [
        site.module.kv_a_proj_with_mqa.register_forward_hook(see_down),
        site.module.kv_a_layernorm.register_forward_hook(see_latent),
    ]


def _round(site: Site, codes: LayerCodes, whole: int) -> list[RemovableHandle]:
    order, places, placed = cached_order(site.module.config), {}, {}

    def enter(module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        places["now"] = kwargs.get("position_ids")

    def on(device: torch.device) -> LayerCodes:
        if device not in placed:
            placed[device] = codes.to(device)
        return placed[device]

    def first(x_BTC: Tensor) -> Tensor:
        positions = places.get("now")
        if positions is None:
            positions = torch.arange(x_BTC.shape[1], device=x_BTC.device)[None]
        return (positions < whole)[..., None]

    def round_down(module: Any, inputs: Any, output: Tensor) -> Tensor:
        keys = _shared(output, order).transpose(1, 2)  # (B, T, 1, R)
        rounded = on(output.device).round_keys(keys.float())[:, :, 0, order.argsort().to(output.device)]
        latent, shared = output.split([output.shape[-1] - len(order), len(order)], dim=-1)
        return torch.cat((latent, shared.where(first(output), rounded.to(output.dtype))), dim=-1)

    def round_latent(module: Any, inputs: Any, output: Tensor) -> Tensor:
        rounded = on(output.device).round_values(output.float().unsqueeze(2)).squeeze(2)
        return output.where(first(output), rounded.to(output.dtype))

    module = site.module
    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.kv_a_proj_with_mqa.register_forward_hook(round_down),
        module.kv_a_layernorm.register_forward_hook(round_latent),
    ]
