"""Whether a change of the code moves a number: hashes of all that `headwise run` wrote, to compare across versions.

    headwise run MODEL ... -o FOLDER          (with the code before, with the code after)
    python benchmarks/unmoved.py LABEL NAME=FOLDER ... [-o results/unmoved.json]

Hashed are the numbers, not the files: quantities and checks of the profile, every tensor beside it, what each layer of
the plan keeps and what was predicted, every weight of the reduced and the healed model, all scores but speeds. The
formats of profile.json and plan.json may differ. Labels that are in the file already are kept.
"""

import argparse
import hashlib
import json
from pathlib import Path

from safetensors.numpy import load_file

DIMS = ("heads", "kv_heads", "qk_dim", "v_dim")


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def tensors(folder, pattern):
    parts = [load_file(path) for path in sorted(folder.glob(pattern))]
    named = {name: tensor for part in parts for name, tensor in part.items()}
    return digest(
        [[name, str(array.dtype), list(array.shape), array.tobytes().hex()] for name, array in sorted(named.items())]
    )


def kept(plan):
    """What each layer keeps, whichever version of the format says so."""
    layers = []
    for before, row in zip(plan["before"], plan["layers"], strict=True):
        if "changes" not in row:
            layers.append([*(row[name] for name in DIMS), row.get("rope_pairs"), row.get("kept_heads")])
            continue
        layer = [*before, None, None]
        for change in row["changes"]:
            if change["kind"] == "removal":
                layer = [0, 0, 0, 0, None, None]
            elif change["kind"] == "widths":
                layer = [*(change[name] for name in DIMS), change.get("rope_pairs"), change.get("kept_heads")]
        layers.append(layer)
    return layers


def numbers(folder):
    profile, plan, scores = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("profile", "plan", "scores")
    )
    predicted = plan["predicted"]
    quality = [
        {name: value for name, value in model.items() if name not in ("speed", "source")} for model in scores["models"]
    ]
    found = {
        "profile": digest([[layer["values"] for layer in profile["layers"]], profile["checks"]]),
        "profile tensors": tensors(folder, "profile.safetensors"),
        "plan": digest([kept(plan), predicted.get("damage", predicted.get("loss_increase")), predicted["expected"]]),
        "reduced weights": tensors(folder, "model/*.safetensors"),
        "scores": digest(quality),
    }
    if (folder / "healed").exists():
        found["healed weights"] = tensors(folder, "healed/*.safetensors")
    shown = {"predicted": predicted["expected"], "losses": [model.get("loss") for model in scores["models"]]}
    return {"hashes": found, **shown}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("label", help="of the code that made the folders")
    parser.add_argument("runs", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/unmoved.json"))
    args = parser.parse_args()
    content = json.loads(args.output.read_text()) if args.output.exists() else {}
    content[args.label] = {name: numbers(Path(folder)) for name, _, folder in (run.partition("=") for run in args.runs)}
    args.output.write_text(json.dumps(content, indent=1) + "\n")
    first = next(iter(content.values()))
    for label, models in content.items():
        for name, each in models.items():
            moved = [what for what, value in each["hashes"].items() if first[name]["hashes"][what] != value]
            print(f"{label}, {name}: {', '.join(moved) + ' moved' if moved else 'no number moved'}")


if __name__ == "__main__":
    main()
