"""A KV cache of packed numbers for the models of transformers.

Self-contained, with the files that it imports from beside it: it travels with a model.

    cache = PackedCache(model, read_spec("folder/cache.safetensors"))
    model.generate(..., past_key_values=cache)
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import cached_file

from .joint_layer import JointLayer
from .latent_layer import LatentLayer, latent_attention, let_tell
from .packed_attention import use_packed_attention
from .packed_layer import PackedLayer
from .packing import (
    CacheSpec,
    LayerCodes,
    decode,
    encode,
    one_entry,
    pack,
    read_spec,
    read_tensors,
    storable,
    together,
    unpack,
    write_bytes,
    write_spec,
)
from .slots import Pass, Rope

__all__ = [
    "CacheSpec",
    "LayerCodes",
    "PackedCache",
    "decode",
    "encode",
    "pack",
    "read_spec",
    "storable",
    "together",
    "unpack",
    "write_spec",
]
FORMAT, VERSION = "headwise-prefix", "2"
CODES = "cache.safetensors"  # beside the weights


class PackedCache(Cache):
    """A cache for ``model`` that packs the layers which ``spec`` has codes for; others are plain layers.

    The model's attention is set to read packed numbers; with any other cache, or none, it does what it did. Where that
    cannot be, ``fused=False`` hands all keys and values over unpacked, at every step; it sees no mask, so sequences
    must not be padded in front. Latent attention is always given its latents unpacked, and may be padded.
    """

    def __init__(self, model: Any, spec: CacheSpec, fused: bool = True) -> None:
        name = type(model).__name__
        if model.config.is_encoder_decoder:
            raise ValueError(f"{name} has an encoder and a decoder; packed caches are for decoders alone.")
        layers = DynamicCache(config=model.config).layers
        outside = [number for number in spec.layers if number >= len(layers)]
        if outside:
            raise ValueError(f"The codes are for a layer {outside[0]}, but the cache of {name} has {len(layers)}.")
        odd = [number for number in spec.layers if type(layers[number]) is not DynamicLayer]
        if odd:
            raise ValueError(
                f"Layer {odd[0]} of {name} keeps a {type(layers[odd[0]]).__name__}, which cannot be packed."
            )
        latents = latent_attention(model)
        self.spec, self.fused = spec, fused and not latents
        self.rope = Rope(model, spec.rotary)
        self.padding = self.ahead = torch.zeros(0, dtype=torch.long)  # (B,) slots before, and slot less position
        self.current: Pass | None = None
        pairs = {m.layer_idx: m.rope_pairs for m in model.modules() if getattr(m, "rope_pairs", None) is not None}
        for number, codes in spec.layers.items():
            turned = 2 * len(self.rope.frequencies) if pairs.get(number) is None else spec.rotary
            if turned != spec.rotary:
                raise ValueError(f"The codes are for RoPE on {spec.rotary} coordinates; {name} turns {turned}.")
            kind = LatentLayer if number in latents else JointLayer if codes.joint else PackedLayer
            layers[number] = kind(self, codes, pairs.get(number))
        for attention in latents.values():
            let_tell(attention)
        if self.fused:
            use_packed_attention(model)
        super().__init__(layers=layers)

    layers: list[Any]
    update = torch.compiler.disable(Cache.update)

    def forward_pass(self, past: int, batch: int, tokens: int, packed: int, positions: Any, mask: Any) -> Pass:
        """The `Pass` that all layers of this forward pass share."""
        if self.current is None or not self.current.is_of(past, batch, tokens, packed, positions, mask):
            self.current = Pass(self, past, batch, tokens, packed, positions, mask)
        return self.current

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: as many as a negative number says."""
        self.current = None
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything."""
        self.current = None
        super().reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Take the rows ``beam_idx``, for beam search."""
        self._rearrange(lambda t: t.index_select(0, beam_idx.to(t.device)), "reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._rearrange(lambda t: t.repeat_interleave(repeats, dim=0), "batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` (numbers or booleans)."""
        self._rearrange(lambda t: t[indices.to(t.device)], "batch_select_indices", indices)

    def _rearrange(self, change: Any, name: str, argument: Any) -> None:
        self.current = None
        if self.padding.numel():
            self.padding = change(self.padding)
        if self.ahead.numel():
            self.ahead = change(self.ahead)
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                layer.rearrange(change)
            else:
                getattr(layer, name)(argument)

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored, and of the bits and levels by which it is read."""
        return sum(layer.nbytes if isinstance(layer, PackedLayer) else plain_bytes(layer) for layer in self.layers)

    def save(self, path: Path | str) -> None:
        """Write what the cache holds to ``path``, under another name first."""
        tensors = {"padding": self.padding, "ahead": self.ahead}
        for number, layer in enumerate(self.layers):
            if type(layer) not in (PackedLayer, JointLayer, LatentLayer, DynamicLayer, DynamicSlidingWindowLayer):
                raise ValueError(f"Layer {number} is a {type(layer).__name__}, which cannot be saved.")
            if layer.get_seq_length():
                plain = not isinstance(layer, PackedLayer)
                parts = {"keys": layer.keys, "values": layer.values} if plain else layer.stored
                tensors |= {f"{number}.{name}": part for name, part in parts.items()}
        metadata = {"format": FORMAT, "version": VERSION, "tokens": str(self.get_seq_length())}
        metadata |= {"fingerprint": self.spec.fingerprint, "codes": self.spec.digest}
        write_bytes(Path(path), save({name: t.contiguous() for name, t in tensors.items()}, one_entry(metadata)))

    @classmethod
    def load(cls, path: Path | str, model: Any, spec: CacheSpec, fused: bool = True) -> "PackedCache":
        """The cache that was saved to ``path``; it must be of the same weights and codes."""
        tensors, metadata = read_tensors(path)
        if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
            raise ValueError(f"{path} is not a {FORMAT} file of version {VERSION}: its metadata say {metadata}.")
        for name, own in (("fingerprint", spec.fingerprint), ("codes", spec.digest)):
            if metadata.get(name) != own:
                raise ValueError(f"{path} was saved for another model or other codes: {name} {metadata.get(name)}.")
        cache = cls(model, spec, fused)
        place = model.device
        try:
            cache.padding, cache.ahead = tensors["padding"].to(place), tensors["ahead"].to(place)
            for number, layer in enumerate(cache.layers):
                if isinstance(layer, PackedLayer):
                    names = ("packed", "whole_keys", "whole_values")
                    layer.fill(*(tensors[f"{number}.{name}"].to(place) for name in names))
                elif f"{number}.keys" in tensors:
                    layer.update(tensors[f"{number}.keys"].to(place), tensors[f"{number}.values"].to(place))
                    if hasattr(layer, "cumulative_length"):
                        layer.cumulative_length = int(metadata["tokens"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path} does not hold what a cache of {type(model).__name__} does: {error}") from None
        return cache


class TakesPackedCache:
    """Mixed into a model class: `generate` takes a packed cache by itself where codes lie beside the weights."""

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        free = generation_config.cache_implementation is None and generation_config.use_cache is not False
        if free and model_kwargs.get("past_key_values") is None:
            spec = codes_beside(self)
            if spec is not None:
                model_kwargs["past_key_values"] = cache = PackedCache(self, spec)
                if generation_config.is_assistant:
                    cache.activate_past_recording()
        prepare: Any = super()
        return prepare._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)


def codes_beside(model: Any) -> CacheSpec | None:
    """The codes beside the weights that ``model`` was opened from; None where there are none.

    A folder is looked into; on the Hub only where ``config.headwise["cache"]`` says that there are codes.
    """
    place, config = model.config._name_or_path, model.config
    if place and Path(place).expanduser().is_dir():
        path = Path(place).expanduser() / CODES
        return read_spec(path) if path.is_file() else None
    if not (getattr(config, "headwise", None) or {}).get("cache"):
        return None
    return read_spec(str(cached_file(place, CODES, revision=getattr(config, "_commit_hash", None))))


def plain_bytes(layer: Any) -> int:
    """Bytes of the keys and values, and of the states if there are any, of a layer of transformers."""
    keep = [getattr(layer, name, None) for name in ("keys", "values", "conv_states", "recurrent_states")]
    tensors = [t for part in keep for t in (part.values() if isinstance(part, dict) else (part,))]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
