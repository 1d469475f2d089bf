"""Ways to damage a file, by its kind. All are drawn from one generator, so that a seed repeats them."""

from __future__ import annotations

import json
import math
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

Damage = Callable[[Path, Random, Path], str]
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 7, 0.5, -0.0, 1e308, -1e308, math.nan, math.inf, -math.inf),
    *(2**31, 2**63, 10**30, -(10**9), 1e-320),
    *("", "x", "0", "\ud800", "a\0b", "../../etc/passwd", "\u202e", "9" * 400, "y" * 10_000),
    *([], {}, [[]], [None], [[[[]]]], {"": {}}, [1, 2, 3], ["x"], {"headwise": "plan"}),
)


def damage(path: Path, rng: Random, world: Path) -> str:
    """Damage the file ``path`` in one way that suits it, and say how. ``world`` holds files to swap it with."""
    kinds = {
        ".json": JSON,
        ".jsonl": LINES,
        ".safetensors": TENSORS,
        ".npz": ARRAYS,
        ".png": PICTURES,
        ".bin": TOKENS,
        ".txt": TEXTS,
        ".tsv": TEXTS,
    }
    own = kinds.get(path.suffix, ())
    chosen = rng.choice(own) if own and rng.random() < 0.8 else rng.choice(ANY)
    try:
        return chosen(path, rng, world)
    except (ValueError, KeyError, IndexError, OSError, RuntimeError):  # this file does not have what that damages
        return _flip(path, rng, world)


def _flip(path: Path, rng: Random, world: Path) -> str:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 4, 32)) if content else 0):
        # headers stand at the beginning
        place = rng.randrange(len(content)) if rng.random() < 0.5 else rng.randrange(min(len(content), 400))
        content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return "bits flipped"


def _cut(path: Path, rng: Random, world: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content) + 1)])
    return "cut short"


def _empty(path: Path, rng: Random, world: Path) -> str:
    path.write_bytes(b"")
    return "empty"


def _append(path: Path, rng: Random, world: Path) -> str:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice((1, 2, 100))))
    return "with more at its end"


def _noise(path: Path, rng: Random, world: Path) -> str:
    path.write_bytes(rng.randbytes(rng.choice((1, 8, 64, 4096))))
    return "random bytes"


def _swap(path: Path, rng: Random, world: Path) -> str:
    same = rng.random() < 0.7
    others = [
        other for other in sorted(world.rglob("*")) if other.is_file() and (not same or other.suffix == path.suffix)
    ]
    other = rng.choice(others)
    shutil.copyfile(other, path)
    return f"replaced by {other.relative_to(world)}"


def _link(path: Path, rng: Random, world: Path) -> str:
    kept = path.with_name(path.name + ".kept")
    target = rng.choice((kept.name, path.name, "gone", ".", "/dev/null"))
    path.rename(kept)
    path.symlink_to(target)
    return f"a link to {target}"


def _folder(path: Path, rng: Random, world: Path) -> str:
    path.unlink()
    path.mkdir()
    return "a folder"


def _gone(path: Path, rng: Random, world: Path) -> str:
    path.unlink()
    return "gone"


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every container in a JSON value with every key into it."""
    found, left = [], [content]
    while left:
        each = left.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        found += [(each, key) for key in keys]
        left += [each[key] for key in keys]
    return found


def change_json(content: Any, rng: Random) -> str:
    """Change one place of a JSON value."""
    places = _places(content)
    near = [place for place in places if isinstance(place[0], dict)]
    inside, key = rng.choice(near if near and rng.random() < 0.5 else places)  # most numbers lie in long lists
    old, way = inside[key], rng.randrange(10)
    if way == 0:
        del inside[key]
        return f"without {key!r}"
    if way == 1 and isinstance(inside, dict):
        inside[rng.choice(("extra", "", "headwise", "\ud800"))] = rng.choice(ODD)
        return "with a field more"
    if way == 2 and isinstance(old, list) and old:
        inside[key] = rng.choice((old[:-1], old + old[-1:], old * 2, old[:1], old[::-1]))
        return f"with another length of {key!r}"
    if way == 3:
        _, other = rng.choice(places)
        inside[key] = rng.choice([holder[name] for holder, name in places if name == other])
        return f"with something else in {key!r}"
    if way == 4:
        deep: Any = old
        for _ in range(rng.choice((1, 20, 500))):
            deep = [deep]
        inside[key] = deep
        return f"with {key!r} deep inside lists"
    if way == 5 and isinstance(old, (int, float)) and not isinstance(old, bool):
        inside[key] = rng.choice((-old, old + 1, old - 1, old * 1000, old / 3, str(old), [old]))
        return f"with {key!r} {old} as {inside[key]!r}"
    inside[key] = rng.choice(ODD)
    return f"with {key!r} as {str(inside[key])[:40]!r}"


def _json(path: Path, rng: Random, world: Path) -> str:
    content = json.loads(path.read_text())
    said = change_json(content, rng)
    path.write_text(json.dumps(content))
    return said


def _lines(path: Path, rng: Random, world: Path) -> str:
    lines = path.read_text().splitlines()
    place, way = rng.randrange(len(lines)), rng.randrange(6)
    if way == 0:
        lines.insert(place, rng.choice(("3", "[]", "null", "{", "\x7f", "", "{}")))
        said = f"with the line {lines[place]!r}"
    elif way == 1:
        del lines[place]
        said = "without a line"
    elif way == 2:
        lines[place:] = [lines[place][: rng.randrange(len(lines[place]))]]
        path.write_text("\n".join(lines))
        return "cut in a line"
    elif way == 3:
        lines.insert(place, lines[rng.randrange(len(lines))])
        said = "with a line twice"
    else:
        content = json.loads(lines[place])
        said = change_json(content, rng)
        lines[place] = json.dumps(content)
    path.write_text("".join(line + "\n" for line in lines))
    return f"line {place} {said}"


def _tensors(path: Path, rng: Random, world: Path) -> str:
    with safe_open(path, framework="pt") as file:
        facts = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if rng.random() < 0.5:
        facts.pop("facts", None)  # as versions wrote it that did not seal what they write
    name = rng.choice(sorted(tensors))
    old, way = tensors[name], rng.randrange(11)
    if way == 0:
        del tensors[name]
    elif way == 1:
        tensors["extra"] = torch.zeros(2)
    elif way == 2:
        tensors[name] = old.flatten()[: max(0, old.numel() - 1)].clone()
    elif way == 3:
        tensors[name] = old[..., :-1].clone() if old.ndim else torch.zeros(3)
    elif way == 4:
        tensors[name] = torch.cat([old, old]) if old.ndim else torch.zeros(1, 1)
    elif way == 5:
        tensors[name] = old.mT.contiguous() if old.ndim > 1 else old[None].clone()
    elif way == 6:
        kinds = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8)
        tensors[name] = old.to(rng.choice(kinds))
    elif way == 7:
        tensors[name] = torch.empty(0, dtype=old.dtype)
    elif way == 8 and facts:
        key = rng.choice(sorted(facts))
        facts[key] = rng.choice(("", "x", "nan", "9" * 5000, "-1", "\u202e"))
        save_file(tensors, path, facts)
        return f"with {key!r} as {facts[key][:20]!r} in its facts"
    else:
        value = rng.choice((math.nan, math.inf, -math.inf, 3e38, -3e38, 1e19, 0.0, -1.0))
        changed = old.clone()
        row = (
            changed.flatten(0, -2)[rng.randrange(max(1, changed.flatten(0, -2).shape[0]))] if old.ndim > 1 else changed
        )
        row[...] = value if old.is_floating_point() else (-1 if value < 0 else 10**6)
        tensors[name] = changed
        save_file(tensors, path, facts)
        return f"with {value} in {name}"
    save_file(tensors, path, facts)
    return f"with {name} in another way ({way})"


def _header(path: Path, rng: Random, world: Path) -> str:
    content = path.read_bytes()
    length = rng.choice((0, 1, len(content) - 8, len(content), 2**31, 2**40, 2**63, 2**64 - 1))
    path.write_bytes(struct.pack("<Q", length) + content[8:])
    return f"with a header of {length} bytes"


def _header_text(path: Path, rng: Random, world: Path) -> str:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    said = change_json(header, rng)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    return f"with a header {said}"


def _arrays(path: Path, rng: Random, world: Path) -> str:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    name = rng.choice(sorted(arrays))
    old, way = arrays[name], rng.randrange(12)
    if way == 0:
        arrays[rng.choice(("extra", "attention_mask", "labels", "input_ids", "output_attentions"))] = np.arange(3)
    elif way == 1:
        del arrays[name]
    elif way == 2:
        arrays[name] = old[: len(old) // 2]
    elif way == 3:
        arrays[name] = old[:0]
    elif way == 4:
        arrays[name] = old.reshape(-1)
    elif way == 5:
        arrays[name] = np.array(rng.choice((1.0, 3)))
    elif way == 6:
        kinds = ("float16", "float64", "int8", "uint64", "complex64", "bool", "S3", "U2", ">f4", "datetime64[s]")
        arrays[name] = old.astype(rng.choice(kinds))
    elif way == 7:
        arrays[name] = np.array([{"a": 1}, None], dtype=object)
    elif way == 8:
        arrays[name] = old[..., :-1] if old.ndim > 1 else old + 10**6
    elif way == 9:
        arrays[name] = np.zeros((0, 3, 0, 5), dtype=old.dtype)
    else:
        changed = old.astype(np.float64) if way == 10 else old.copy()
        value = rng.choice((np.nan, np.inf, 1e300, -1e30)) if changed.dtype.kind == "f" else rng.choice((-1, 10**6))
        changed.flat[rng.randrange(changed.size)] = value
        arrays[name] = changed
    np.savez(path, **arrays)
    return f"with {name} in another way ({way})"


def _picture(path: Path, rng: Random, world: Path) -> str:
    sides = rng.choice(((60000, 60000), (20000, 20000), (0, 0), (2**31 - 1, 1), (1, 10**8), (2**32 - 1, 2**32 - 1)))
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack(">II", *sides)
    content[29:33] = struct.pack(">I", zlib.crc32(bytes(content[12:29])))
    path.write_bytes(content)
    return f"of {sides[0]} x {sides[1]} pixels"


def _tokens(path: Path, rng: Random, world: Path) -> str:
    content = path.read_bytes()
    large = bytearray(content)
    place = rng.randrange(len(large) // 2) * 2
    large[place : place + 2] = b"\xff\xff"
    path.write_bytes(rng.choice((content[:-1], content[:1], bytes(large), content[: len(content) // 100 * 2], b"")))
    return "with odd tokens"


def _text(path: Path, rng: Random, world: Path) -> str:
    content = rng.choice(
        (b"\xff\xfe", b"\0" * 50, b" \n\t ", b"x", b"a" * 3000, "\u202e\u0300\U0001f9d1".encode() * 90, b"\t\n" * 40)
    )
    path.write_bytes(content)
    return f"of {content[:12]!r}"


ANY: tuple[Damage, ...] = (_flip, _flip, _cut, _empty, _append, _noise, _swap, _swap, _link, _folder, _gone)
JSON: tuple[Damage, ...] = (_json,)
LINES: tuple[Damage, ...] = (_lines,)
TENSORS: tuple[Damage, ...] = (_tensors, _tensors, _tensors, _header, _header_text)
ARRAYS: tuple[Damage, ...] = (_arrays,)
PICTURES: tuple[Damage, ...] = (_picture,)
TOKENS: tuple[Damage, ...] = (_tokens,)
TEXTS: tuple[Damage, ...] = (_text,)
