"""Numbers of a KV cache as codes of few bits: the file that says how, the quantiser, the packing into bytes.

Self-contained: it travels with a model. A coordinate of b bits holds codes c of 0 .. 2^b - 1, read as

    offset + loudness * gain[b] * scale * (u + cubic * u^3),    u = (2c - (2^b - 1)) / (2^b - 1)

Tokens differ in how far all their numbers are from the mean, so each has a loudness for its keys and one for its
values, in 4 bits each: (low + step * code)^2. Values of a group of heads, side by side, are a linear map of such
coordinates: heads repeat one another. In a joint latent keys have no coordinates of their own: those of a group stand
for its keys and its values, keys first, and the map makes both.

A code is one or two fields of 8, 4, 2 or 1 bits (6 = 4 + 2, 16 = 8 + 8, the first field holds the upper bits). All
fields of one size of a layer lie side by side, so that every coordinate is described by data: which byte, which bits.

Letters: B batch, T tokens, G key/value heads, K key width, V value width, S groups of heads whose values are W wide
together (S * W = G * V, in a joint latent G * (K + V)), N coordinates of a layer (keys first), R bytes a token takes.
"""

import hashlib
import json
import os
import struct
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

FORMAT, VERSION = "headwise-cache", "3"
WIDTHS = (0, 1, 2, 3, 4, 5, 6, 8)
BYTE, WHOLE_BITS = 8, 16
WHOLE_MARK = 15  # stands for 16 bits where a file has four bits for a width
FIELDS = (BYTE, 4, 2, 1)
LOUD_BITS = 4
HEX_DIGITS = 64  # of a SHA-256
# In a file a coordinate takes four bytes: bits and which of these cubic parts it has, scale, offset.
CUBICS = (-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.9, 1.2, 1.6, 2.2, 3.0, 5.0)
OCTAVE = 12  # scales between one and its double
MIDDLE = 128  # the code of a scale of 1
TYPICAL = 0.3  # of u^2: where a scale is kept as it is when its cubic part is rounded
PARTS = {  # name of a tensor in a file: its dtype and dimensions
    "key_bits": (torch.uint8, 2),
    "value_bits": (torch.uint8, 2),
    "key_scales": (torch.uint8, 2),
    "value_scales": (torch.uint8, 2),
    "key_offsets": (torch.float16, 2),
    "value_offsets": (torch.float16, 2),
    "key_gain": (torch.float16, 1),
    "value_gain": (torch.float16, 1),
    "key_loudness": (torch.float16, 1),
    "value_loudness": (torch.float16, 1),
    "value_map": (torch.float16, 3),
}


@dataclass
class LayerCodes:
    """How the keys and values of one layer are coded.

    Of keys (G, K) and value coordinates (S, W) each: bits, levels (..., 3), gains (9,) and loudness: low, step, and
    what it is of the root mean square of all deviations in units of their scale. ``value_map`` (S, W, W) makes values
    of coordinates, of a joint latent (keys (G, 0)) keys and values. Levels must be such as `storable` returns, all else
    in half precision.
    """

    key_bits: torch.Tensor
    value_bits: torch.Tensor
    key_levels: torch.Tensor
    value_levels: torch.Tensor
    key_gain: torch.Tensor
    value_gain: torch.Tensor
    key_loudness: torch.Tensor
    value_loudness: torch.Tensor
    value_map: torch.Tensor

    @property
    def joint(self) -> bool:
        """Whether coordinates of groups stand for keys too."""
        return not self.key_bits.shape[1]

    @property
    def parts(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """What has a loudness of its own: keys and values, or both together."""
        return (self.values,) if self.joint else (self.keys, self.values)

    @property
    def keys(self) -> tuple[torch.Tensor, ...]:
        """Bits, levels, gain and loudness of keys."""
        return self.key_bits, self.key_levels, self.key_gain, self.key_loudness

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        """Bits, levels, gain and loudness of value coordinates."""
        return self.value_bits, self.value_levels, self.value_gain, self.value_loudness

    @property
    def bits(self) -> torch.Tensor:
        """Bits of all coordinates (N,), keys first."""
        return torch.cat((self.key_bits.flatten(), self.value_bits.flatten())).long()

    @property
    def stored_bits(self) -> torch.Tensor:
        """Bits of everything that is stored of a token: all coordinates, and the loudness of each part."""
        return torch.cat((self.bits, self.bits.new_full((len(self.parts),), LOUD_BITS)))

    @property
    def levels(self) -> torch.Tensor:
        """Levels of all coordinates (N, 3), keys first."""
        return torch.cat((self.key_levels.flatten(0, 1), self.value_levels.flatten(0, 1)))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes."""
        return field_rows(self.stored_bits)[1]

    @property
    def level_bytes(self) -> int:
        """Bytes of bits, levels, gains and loudness in a file: of all but the map, which counts as weights."""
        return sum(t.nbytes for name, t in parts_of(self).items() if name != "value_map")

    @cached_property
    def to_coordinates(self) -> torch.Tensor:
        """What values of groups (..., W) are multiplied with, (S, W, W)."""
        return torch.linalg.inv(self.value_map.double()).mT.float().contiguous()

    @cached_property
    def to_values(self) -> torch.Tensor:
        """What coordinates (..., W) are multiplied with, (S, W, W)."""
        return self.value_map.float().mT.contiguous()

    def round(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys before RoPE (..., G, K) and values (..., G, V) as a cache gives them back.

        Gradients pass as if nothing had happened.
        """
        if not self.joint:
            return self.round_keys(keys), self.round_values(values)
        both = together(keys, values, len(self.value_bits))
        return apart(self._round_mapped(both.flatten(-2)).view(both.shape), *keys.shape[-2:])

    def round_keys(self, keys: torch.Tensor) -> torch.Tensor:
        """The keys alone, where they have coordinates of their own."""
        return round_trip(keys, *self.keys)

    def round_values(self, values: torch.Tensor) -> torch.Tensor:
        """The values alone, where keys have coordinates of their own."""
        return self._round_mapped(values.flatten(-2)).reshape(values.shape)

    def _round_mapped(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers of all groups side by side (..., S * W) as their coordinates give them back."""
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            grouped = x.detach().float().unflatten(-1, self.value_bits.shape).unsqueeze(-2)
            rounded = round_trip((grouped @ self.to_coordinates).squeeze(-2), *self.values).unsqueeze(-2)
            change = (rounded @ self.to_values).reshape(x.shape).to(x.dtype) - x
        return x + change

    def to(self, device: torch.device | str) -> "LayerCodes":
        """The same on another device."""
        return LayerCodes(*(getattr(self, field.name).to(device) for field in fields(self)))


def together(keys: torch.Tensor, values: torch.Tensor, groups: int) -> torch.Tensor:
    """Keys and values (..., G, C) side by side, those of a group of heads together: (..., S, W)."""
    return torch.cat([x.unflatten(-2, (groups, -1)).flatten(-2) for x in (keys, values)], dim=-1)


def apart(both: torch.Tensor, heads: int, key_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values (..., G, C) that `together` made ``both`` of."""
    size = heads // both.shape[-2]
    sizes = size * key_width, both.shape[-1] - size * key_width
    keys, values = (x.unflatten(-1, (size, -1)).flatten(-3, -2) for x in both.split(sizes, dim=-1))
    return keys, values


def level_codes(levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of the cubic parts and of the scales (uint8), and offsets (float16), nearest to ``levels`` (..., 3)."""
    offset, scale, cubic = levels.float().unbind(-1)
    table = torch.tensor(CUBICS, device=levels.device)
    number = torch.bucketize(cubic.contiguous(), (table[1:] + table[:-1]) / 2)
    kept = scale * (1 + TYPICAL * cubic) / (1 + TYPICAL * table[number])
    scales = (OCTAVE * kept.log2()).round().add(MIDDLE).clamp(0, 255)
    return number.to(torch.uint8), scales.to(torch.uint8), offset.half()


def levels_from(cubics: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Levels (..., 3) of such codes."""
    scale = torch.exp2((scales.float() - MIDDLE) / OCTAVE)
    return torch.stack((offsets.float(), scale, torch.tensor(CUBICS, device=scale.device)[cubics.long()]), dim=-1)


def storable(levels: torch.Tensor) -> torch.Tensor:
    """The nearest levels that a file can hold."""
    return levels_from(*level_codes(levels))


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
            digest.update(name.encode() + tensor.flatten().view(torch.uint8).numpy().tobytes())
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
    layers = ((number, parts_of(codes)) for number, codes in sorted(spec.layers.items()))
    return metadata, {f"{number}.{name}": tensor for number, parts in layers for name, tensor in parts.items()}


def parts_of(codes: LayerCodes) -> dict[str, torch.Tensor]:
    """The tensors by which a file holds ``codes``."""
    parts = {}
    for kind in ("key", "value"):
        bits, levels, gain, loudness = getattr(codes, f"{kind}s")
        cubics, scales, offsets = level_codes(levels)
        marks = torch.where(bits == WHOLE_BITS, WHOLE_MARK, bits).to(torch.uint8)
        parts |= {f"{kind}_bits": marks | cubics << LOUD_BITS, f"{kind}_scales": scales}
        parts |= {f"{kind}_offsets": offsets, f"{kind}_gain": gain, f"{kind}_loudness": loudness}
    parts["value_map"] = codes.value_map
    return {name: parts[name].detach().to("cpu", dtype).contiguous() for name, (dtype, _) in PARTS.items()}


def codes_from(parts: dict[str, torch.Tensor]) -> LayerCodes:
    """The codes that a file holds by these tensors."""
    both = {}
    for kind in ("key", "value"):
        packed = parts[f"{kind}_bits"]
        marks = packed & (1 << LOUD_BITS) - 1
        both[f"{kind}_bits"] = torch.where(marks == WHOLE_MARK, WHOLE_BITS, marks)
        both[f"{kind}_levels"] = levels_from(packed >> LOUD_BITS, parts[f"{kind}_scales"], parts[f"{kind}_offsets"])
        both |= {f"{kind}_{name}": parts[f"{kind}_{name}"] for name in ("gain", "loudness")}
    return LayerCodes(**both, value_map=parts["value_map"])


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
    codes = {number: codes_from(parts) for number, parts in sorted(layers.items())}
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
        packed, scales, offsets, gain, loudness = (
            parts[f"{kind}_{name}"] for name in ("bits", "scales", "offsets", "gain", "loudness")
        )
        marks = torch.tensor((*WIDTHS, WHOLE_MARK), dtype=torch.uint8)
        if not torch.isin(packed & (1 << LOUD_BITS) - 1, marks).all():
            return f"{kind}_bits other than {', '.join(map(str, WIDTHS))} and {WHOLE_MARK}"
        if not packed.shape == scales.shape == offsets.shape or gain.shape != (9,):
            return (
                f"{kind}_scales {tuple(scales.shape)}, offsets {tuple(offsets.shape)} and gain {tuple(gain.shape)} "
                f"do not fit {tuple(packed.shape)} bits"
            )
        if loudness.shape != (3,) or not (loudness > 0).all():
            return f"{kind}_loudness is not three positive numbers"
    (groups, width), heads = parts["value_bits"].shape, len(parts["key_bits"])
    if parts["value_map"].shape != (groups, width, width):
        return f"value_map {tuple(parts['value_map'].shape)} does not fit {groups} groups of {width} coordinates"
    joint = not parts["key_bits"].shape[1]
    if not groups or heads % groups or width % (heads // groups) or (joint and width <= heads // groups):
        return f"{groups} groups of {width} value coordinates do not fit {heads} heads"
    if not torch.isfinite(torch.linalg.inv_ex(parts["value_map"].double()).inverse).all():
        return "value_map cannot be inverted"
    return None


class Evening:
    """How deviations of tokens from the mean are divided by how loud they are.

    For coordinates (N,) in parts (M of them, keys and values), of each its bits (G, C), levels (G, C, 3), gain and
    loudness.
    """

    def __init__(self, *parts: tuple[torch.Tensor, ...]) -> None:
        flat = [(bits.flatten(), levels.float().flatten(0, 1), loudness.float()) for bits, levels, _, loudness in parts]
        self.offset = torch.cat([levels[:, 0] for _, levels, _ in flat])
        of_each = [
            (bits > 0) / levels[:, 1].square() * loudness[2] ** 2 / (bits > 0).sum().clamp(min=1)
            for bits, levels, loudness in flat
        ]
        self.weights = torch.block_diag(*(each[:, None] for each in of_each))  # (N, M)
        self.low, self.step, _ = torch.stack([loudness for *_, loudness in flat], dim=1)
        sizes = torch.tensor([len(bits) for bits, *_ in flat], device=self.offset.device)
        self.part = torch.arange(len(flat), device=self.offset.device).repeat_interleave(sizes)

    def codes(self, beside: torch.Tensor) -> torch.Tensor:
        """The codes (..., M) of how loud tokens with deviations (..., N) are."""
        root = (beside.square() @ self.weights).sqrt().sqrt()
        return ((root - self.low) / self.step).round().clamp(0, (1 << LOUD_BITS) - 1)

    def loudness(self, codes: torch.Tensor) -> torch.Tensor:
        """What ``codes`` (..., M) stand for, of each coordinate (..., N)."""
        return (self.low + self.step * codes).square()[..., self.part]


def encode(x: torch.Tensor, bits: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Codes (int32) of the levels nearest to ``x`` (..., G, C), for bits (G, C) and levels (G, C, 3)."""
    return nearest_codes(x.detach().float() - levels[..., 0].float(), bits, levels).int()


def nearest_codes(beside: torch.Tensor, bits: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Codes in float32 of deviations from the offset, by bisection."""
    _, scale, cubic = levels.float().unbind(-1)
    y = beside / scale
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


def decode(codes: torch.Tensor, bits: torch.Tensor, levels: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Numbers (float32) that ``codes`` (..., G, C) stand for."""
    offset, scale, bent, step = reading(bits, levels, gain)
    u = codes.float() * step - 1
    return offset + u * (scale + bent * u**2)


def reading(bits: torch.Tensor, levels: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For each coordinate its offset, the factors of u and of u^3 (with the gain), and the distance of two u."""
    offset, scale, cubic = levels.float().unbind(-1)
    scale = scale * gain.float()[bits.long().clamp(max=BYTE)] * (bits > 0)
    return offset, scale, scale * cubic, 2 / ((1 << bits.long()) - 1).clamp(min=1)


def round_trip(
    x: torch.Tensor, bits: torch.Tensor, levels: torch.Tensor, gain: torch.Tensor, loudness: torch.Tensor
) -> torch.Tensor:
    """``x`` (..., G, C) as it comes back from its codes; gradients pass as if nothing had happened."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        evening = Evening((bits, levels, gain, loudness))
        beside = x.detach().float().flatten(-2) - evening.offset
        loud = evening.loudness(evening.codes(beside))
        flat = bits.flatten(), levels.flatten(0, 1)
        read = decode(nearest_codes(beside / loud, *flat), *flat, gain) - evening.offset
        change = (evening.offset + read * loud).unflatten(-1, bits.shape).to(x.dtype) - x
    return x + change


def field_rows(bits: torch.Tensor) -> tuple[list[tuple[int, int, int, int, int]], int]:
    """All fields of coordinates with ``bits``: (coordinate, size, shift in the code, byte, shift in it); the bytes."""
    found, base, widths = [], 0, bits.tolist()
    for size in FIELDS:
        members = [(n, (width & (size - 1)).bit_length()) for n, width in enumerate(widths) if width & size]
        if size == BYTE:
            members += [(n, low) for n, width in enumerate(widths) if width == WHOLE_BITS for low in (BYTE, 0)]
        per_byte = BYTE // size
        for place, (n, shift) in enumerate(members):
            found.append((n, size, shift, base + place // per_byte, place % per_byte * size))
        base += -(-len(members) // per_byte)
    return found, base


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
        self.code_dtype = torch.int32 if (bits > BYTE).any() else torch.uint8

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Bytes (B, R, T) of codes (B, N, T)."""
        fields = ((codes.to(self.code_dtype)[:, self.source] >> self.shifts) & self.limits) << self.ups
        return fields.sum(2, dtype=torch.uint8)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Codes (B, N, T) of bytes (B, R, T)."""
        first, second = ((packed[:, row] & mask[:, None]) * worth[:, None] for row, mask, worth in zip(*self.fields))
        return (first + second).to(self.code_dtype)


def pack(codes: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Bytes (B, R, T) of codes (B, N, T) of coordinates with ``bits`` (N,)."""
    return Layout(bits, codes.device).pack(codes)


def unpack(packed: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Codes (B, N, T) of bytes (B, R, T)."""
    return Layout(bits, packed.device).unpack(packed)
