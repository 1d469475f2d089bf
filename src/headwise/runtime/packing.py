"""Numbers of a KV cache as codes of few bits: the file that says how, the quantiser, the packing into bytes.

Self-contained: it travels with a model. A coordinate of b bits holds codes c of 0 .. 2^b - 1, read as

    offset + loudness * gain[b] * scale * (u + cubic * u^3),    u = (2c - (2^b - 1)) / (2^b - 1)

Tokens differ in how far all their numbers are from the mean, so each has a loudness for its keys and one for its
values, in 4 bits each: (low + step * code)^2.

A code is one or two fields of 8, 4, 2 or 1 bits (6 = 4 + 2, the first field holds the upper bits). All fields of one
size of a layer lie side by side, so that every coordinate is described by data: which byte, which bits of it.

Letters: B batch, T tokens, G key/value heads, K key width, V value width, N coordinates of a layer (G * (K + V), keys
first), R bytes a token takes.
"""

import hashlib
import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

FORMAT, VERSION = "headwise-cache", "2"
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8)
BYTE = 8
FIELDS = (BYTE, 4, 2, 1)
LOUD_BITS = 4
HEX_DIGITS = 64  # of a SHA-256
PARTS = {  # name of a tensor: its dtype and dimensions
    "key_bits": (torch.uint8, 2),
    "value_bits": (torch.uint8, 2),
    "key_levels": (torch.float16, 3),
    "value_levels": (torch.float16, 3),
    "key_gain": (torch.float16, 1),
    "value_gain": (torch.float16, 1),
    "key_loudness": (torch.float16, 1),
    "value_loudness": (torch.float16, 1),
}


@dataclass
class LayerCodes:
    """How the keys and values of one layer are coded.

    Of each bits (G, C), levels (G, C, 3), gains (9,) and loudness: low, step, and what it is of the root mean square
    of all deviations in units of their scale.
    """

    key_bits: torch.Tensor
    value_bits: torch.Tensor
    key_levels: torch.Tensor
    value_levels: torch.Tensor
    key_gain: torch.Tensor
    value_gain: torch.Tensor
    key_loudness: torch.Tensor
    value_loudness: torch.Tensor

    @property
    def keys(self) -> tuple[torch.Tensor, ...]:
        """Bits, levels, gain and loudness of keys."""
        return self.key_bits, self.key_levels, self.key_gain, self.key_loudness

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """Bits, levels, gain and loudness of values."""
        return self.value_bits, self.value_levels, self.value_gain, self.value_loudness

    @property
    def bits(self) -> torch.Tensor:
        """Bits of all coordinates (N,), keys first."""
        return torch.cat((self.key_bits.flatten(), self.value_bits.flatten())).long()

    @property
    def stored_bits(self) -> torch.Tensor:
        """Bits of everything that is stored of a token: all coordinates, loudness of keys, loudness of values."""
        return torch.cat((self.bits, self.bits.new_full((2,), LOUD_BITS)))

    @property
    def levels(self) -> torch.Tensor:
        """Levels of all coordinates (N, 3), keys first."""
        return torch.cat((self.key_levels.flatten(0, 1), self.value_levels.flatten(0, 1)))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes."""
        return field_rows(self.stored_bits)[1]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all these tensors."""
        return sum(getattr(self, name).numel() * dtype.itemsize for name, (dtype, _) in PARTS.items())


@dataclass
class CacheSpec:
    """How a model's cache is coded: layers by number, tokens kept whole, what RoPE turns, whose weights they fit."""

    layers: dict[int, LayerCodes]
    whole: int = 1
    rotary: int = 0
    interleaved: bool = False
    fingerprint: str = "0" * 64

    @property
    def digest(self) -> str:
        """A hash of everything that decides what a stored byte means."""
        metadata, tensors = as_saved(self)
        digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
        for name, tensor in tensors.items():
            digest.update(name.encode() + bytes(tensor.flatten().view(torch.uint8).tolist()))
        return digest.hexdigest()


def as_saved(spec: CacheSpec) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors of the file that holds ``spec``."""
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "whole": str(spec.whole),
        "rotary": str(spec.rotary),
        "interleaved": str(spec.interleaved).lower(),
        "fingerprint": spec.fingerprint,
    }
    tensors = {
        f"{number}.{name}": getattr(codes, name).detach().to("cpu", dtype).contiguous()
        for number, codes in sorted(spec.layers.items())
        for name, (dtype, _) in PARTS.items()
    }
    return metadata, tensors


def write_spec(path: Path | str, spec: CacheSpec) -> None:
    """Write ``spec`` to ``path``: under another name first, so that there is never half a file."""
    metadata, tensors = as_saved(spec)
    write_bytes(Path(path), save(tensors, one_entry(metadata)))


def one_entry(metadata: dict[str, str]) -> dict[str, str]:
    """All of it in one entry: several come out in another order every time."""
    return {"headwise": json.dumps(metadata)}


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under another name and rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_tensors(path: Path | str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    content = Path(path).read_bytes()
    try:
        tensors = load(content)
        (size,) = struct.unpack("<Q", content[:8])
        metadata = json.loads(json.loads(content[8 : 8 + size]).get("__metadata__", {}).get("headwise", "{}"))
        return tensors, metadata if isinstance(metadata, dict) else {}
    except (SafetensorError, struct.error, ValueError) as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None


def read_spec(path: Path | str) -> CacheSpec:
    """The spec that ``path`` holds; a ValueError says what is wrong with it."""
    tensors, metadata = read_tensors(path)
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise ValueError(f"{path} is not a {FORMAT} file of version {VERSION}: its metadata say {metadata}.")
    try:
        whole, rotary = int(metadata["whole"]), int(metadata["rotary"])
        interleaved = {"true": True, "false": False}[metadata["interleaved"]]
        fingerprint = metadata["fingerprint"]
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} has metadata that are missing or cannot be read: {error}.") from None
    if whole < 0 or rotary < 0 or rotary % 2 or len(fingerprint) != HEX_DIGITS:
        raise ValueError(f"{path} has metadata that cannot be: {metadata}.")
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, part = name.partition(".")
        if not number.isdecimal() or part not in PARTS:
            raise ValueError(f"{path} holds a tensor {name!r}; names are <layer>.<one of {', '.join(PARTS)}>.")
        layers.setdefault(int(number), {})[part] = tensor
    for number, parts in sorted(layers.items()):
        problem = problem_with(parts)
        if problem:
            raise ValueError(f"{path}, layer {number}: {problem}.")
    codes = {number: LayerCodes(**parts) for number, parts in sorted(layers.items())}
    return CacheSpec(codes, whole, rotary, interleaved, fingerprint)


def problem_with(parts: dict[str, torch.Tensor]) -> str | None:
    """What is wrong with the tensors of one layer."""
    missing = [name for name in PARTS if name not in parts]
    if missing:
        return f"{' and '.join(missing)} missing"
    for name, (dtype, dimensions) in PARTS.items():
        tensor = parts[name]
        if tensor.dtype != dtype or tensor.ndim != dimensions:
            return f"{name} is {tensor.dtype} of {tensor.ndim} dimensions, not {dtype} of {dimensions}"
        if not torch.isfinite(tensor).all():
            return f"{name} is not finite everywhere"
    for kind in ("key", "value"):
        bits, levels, gain = (parts[f"{kind}_{name}"] for name in ("bits", "levels", "gain"))
        if not torch.isin(bits, torch.tensor(WIDTHS, dtype=torch.uint8)).all():
            return f"{kind}_bits other than {', '.join(map(str, WIDTHS))}"
        if levels.shape != (*bits.shape, 3) or gain.shape != (9,):
            return (
                f"{kind}_levels {tuple(levels.shape)} and gain {tuple(gain.shape)} do not fit {tuple(bits.shape)} bits"
            )
        loudness = parts[f"{kind}_loudness"]
        if loudness.shape != (3,) or not (loudness > 0).all():
            return f"{kind}_loudness is not three positive numbers"
        table = level_table(bits, levels)
        if (table.diff(dim=-1).nan_to_num(nan=1.0) < 0).any():
            return f"{kind}_levels that fall where the code rises"
    if parts["key_bits"].shape[0] != parts["value_bits"].shape[0]:
        return "keys and values of different numbers of heads"
    return None


def level_table(bits: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """The number that each code of each coordinate stands for (..., largest code + 1); infinite where there is none."""
    top = (1 << bits.long()).unsqueeze(-1) - 1
    codes = torch.arange(int(top.max()) + 1 if top.numel() else 1, device=bits.device)
    u = (2 * codes - top) / top.clamp(min=1)
    offset, scale, cubic = levels.float().unsqueeze(-2).unbind(-1)
    return (offset + scale * (u + cubic * u**3)).masked_fill(codes > top, math.inf)


def evened(
    x: torch.Tensor, bits: torch.Tensor, levels: torch.Tensor, loudness: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` (..., G, C) with the deviations of each token divided by its loudness, and the codes (...) of that."""
    offset, scale, _ = levels.float().unbind(-1)
    beside = x.detach().float() - offset
    counts = (bits > 0) / scale.square()
    power = (beside.square() * counts).sum((-2, -1)) / (bits > 0).sum().clamp(min=1)
    low, step, factor = loudness.float()
    codes = (((factor * power.sqrt()).sqrt() - low) / step).round().clamp(0, (1 << LOUD_BITS) - 1)
    return offset + beside / (low + step * codes).square()[..., None, None], codes


def encode(x: torch.Tensor, bits: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Codes (uint8) of the levels nearest to ``x`` (..., G, C), for bits (G, C) and levels (G, C, 3)."""
    return nearest_codes(x, bits, levels).to(torch.uint8)


def nearest_codes(x: torch.Tensor, bits: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """`encode` in float32, by bisection: for many numbers faster than searching `borders`."""
    offset, scale, cubic = levels.float().unbind(-1)
    y = (x.detach().float() - offset) / scale
    count = 2.0 ** bits.float()
    half = 1 / (count - 1).clamp(min=1)  # of the distance of two u
    linear, first = 1 + 3 * cubic * half**2, 1 + half
    codes = torch.zeros_like(y)
    for _ in range(int(bits.max()) if bits.numel() else 0):
        count = count / 2
        step = count.floor()  # nothing once all bits of a coordinate are known
        middle = (codes + step) * (2 * half) - first  # u between two codes, and below the level between theirs
        codes = codes + step * (y > middle * (linear + cubic * middle**2))
    return codes


def borders(bits: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Midpoints between neighbouring levels (N, largest code) of coordinates with bits (N,) and levels (N, 3)."""
    table = level_table(bits, levels)
    return ((table[:, 1:] + table[:, :-1]) / 2).contiguous()


def decode(codes: torch.Tensor, bits: torch.Tensor, levels: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Numbers (float32) that ``codes`` (..., G, C) stand for."""
    offset, scale, cubic, step = reading(bits, levels, gain)
    u = codes.float() * step - 1
    return offset + scale * (u + cubic * u**3)


def reading(bits: torch.Tensor, levels: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Offset, scale (with the gain), cubic part and distance of two u, for each coordinate."""
    offset, scale, cubic = levels.float().unbind(-1)
    scale = scale * gain.float()[bits.long()] * (bits > 0)
    return offset, scale, cubic, 2 / ((1 << bits.long()) - 1).clamp(min=1)


def round_trip(
    x: torch.Tensor, bits: torch.Tensor, levels: torch.Tensor, gain: torch.Tensor, loudness: torch.Tensor
) -> torch.Tensor:
    """``x`` (..., G, C) as it comes back from its codes; gradients pass as if nothing had happened."""
    with torch.no_grad():
        even, codes = evened(x, bits, levels, loudness)
        low, step, _ = loudness.float()
        offset = levels[..., 0].float()
        beside = decode(nearest_codes(even, bits, levels), bits, levels, gain) - offset
        change = (offset + beside * (low + step * codes).square()[..., None, None]).to(x.dtype) - x
    return x + change


def field_rows(bits: torch.Tensor) -> tuple[list[tuple[int, int, int, int, int]], int]:
    """All fields of coordinates with ``bits``: (coordinate, size, shift in the code, byte, shift in it); the bytes."""
    fields, base, widths = [], 0, bits.tolist()
    for size in FIELDS:
        members = [n for n, width in enumerate(widths) if (width == BYTE) == (size == BYTE) and width & size]
        per_byte = BYTE // size
        for place, n in enumerate(members):
            low = 0 if size == BYTE else widths[n] & (size - 1)  # a smaller field below holds the lower bits
            shift = low.bit_length()
            fields.append((n, size, shift, base + place // per_byte, place % per_byte * size))
        base += -(-len(members) // per_byte)
    return fields, base


class Layout:
    """Where the codes of a layer's coordinates lie in its bytes."""

    def __init__(self, bits: torch.Tensor, device: torch.device | str = "cpu") -> None:
        fields, self.rows = field_rows(bits)
        size, stored = len(bits), max(self.rows, 1)  # never nothing to index
        # For writing: up to eight fields of each byte as coordinate, shift and mask in its code, shift in the byte.
        source = torch.zeros(stored, BYTE, dtype=torch.long)
        shifts, limits, ups = torch.zeros(3, stored, BYTE, 1, dtype=torch.uint8)
        # For reading: up to two fields of each coordinate as byte, bits of it, and what they count in the code.
        rows = torch.zeros(2, size, dtype=torch.long)
        masks, worth = torch.zeros(2, size, dtype=torch.uint8), torch.zeros(2, size)
        seen = set()
        for n, width, low, row, place in fields:
            source[row, place], shifts[row, place], limits[row, place], ups[row, place] = (
                n,
                low,
                (1 << width) - 1,
                place,
            )
            second = int(n in seen)
            seen.add(n)
            rows[second, n], masks[second, n] = row, ((1 << width) - 1) << place
            worth[second, n] = 2.0 ** (low - place)
        self.source, self.shifts, self.limits, self.ups = (t.to(device) for t in (source, shifts, limits, ups))
        self.fields = tuple(t.to(device) for t in (rows, masks, worth))

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Bytes (B, R, T) of codes (B, N, T)."""
        fields = ((codes[:, self.source] >> self.shifts) & self.limits) << self.ups
        return fields.sum(2, dtype=torch.uint8)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Codes (B, N, T) of bytes (B, R, T)."""
        first, second = ((packed[:, row] & mask[:, None]) * worth[:, None] for row, mask, worth in zip(*self.fields))
        return (first + second).to(torch.uint8)


def pack(codes: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Bytes (B, R, T) of codes (B, N, T) of coordinates with ``bits`` (N,)."""
    return Layout(bits, codes.device).pack(codes)


def unpack(packed: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Codes (B, N, T) of bytes (B, R, T)."""
    return Layout(bits, packed.device).unpack(packed)
