"""What healing buys: excess nats over the dense model after so many tokens, by stage, by what learns, by start.

    python benchmarks/heal.py MODEL --text FILE... --test FILE --other FILE -o FILE [--shares 0.75,0.5]
        [--tokens 50000,100000,200000] [--variants-at 100000] [--variants local,lora]
        [--calibration FILE] [--context 512] [--skip 0]

MODEL is a folder, or "smollm2" for the one of the demo. It is cut to a share of its KV bytes (calibrated on 8,192
tokens of the first text) and healed on the texts; ``--test`` is text of the same kind, ``--other`` of another, neither
seen in healing. "dense, continued": the dense model trained on the same tokens itself, the fair reference for what the
text alone teaches. ``--skip`` leaves out that many tokens at the start of both, by which choices were made. Rows that
the output file holds already are not measured again; ``--tokens 0`` measures variants only.
"""

import argparse
import json
import math
import platform
import tempfile
import time
from pathlib import Path

import torch
import transformers
from accelerate import Accelerator
from compress import loss

from headwise.checkpoints.load import open_model
from headwise.data.processors import open_tokenizer
from headwise.families.shapes import shape_of
from headwise.pipelines.profile import inspect_folder
from headwise.records.budget import Budget
from headwise.records.healing import RATES, HealConfig
from headwise.records.settings import CompressConfig, InspectConfig
from headwise.steps.compress import compress
from headwise.steps.demo import demo_model
from headwise.steps.heal import CURVE, heal
from headwise.steps.heal.windows import read_windows
from headwise.steps.plan import make_plan
from headwise.training.loop import Schedule, fit, put_weights
from headwise.training.processes import bf16_suits
from headwise.training.trainable import make_trainable
from headwise.training.work import Work

CALIBRATION_TOKENS = 8192
EVALUATION_TOKENS = 20480
VARIANTS = {
    "local": {"stage": "local"},
    "global": {"stage": "global"},
    "values": {"train": "values"},
    "lora": {"train": "lora"},
    "all": {"train": "all"},
    "svd": {"start": "svd"},
    "text": {"next_token": 1.0},
}


def cut_up(source, file, context, skip):
    """The first tokens of a text after ``skip``, in windows."""
    ids = open_tokenizer(source)(file.read_text(encoding="utf-8"))["input_ids"]
    ids = ids[skip : skip + EVALUATION_TOKENS]
    return torch.tensor(ids[: len(ids) // context * context]).view(-1, context)


def continued(source, texts, config, folder):
    """The dense model, its attention trained on the text itself: same tokens, the best by held-out loss."""
    model = open_model(source).float()
    windows = read_windows(model, source, texts, None, config)
    make_trainable(model, "attention", range(len(shape_of(model).layers)))

    half = bf16_suits(model.device, shape_of(model).width)

    def next_token(wrapped, part):
        rows = windows.rows["input_ids"][windows.order(part * config.batch, config.batch, config.seed)]
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return wrapped(rows, labels=rows, use_cache=False).loss

    def judge(wrapped):
        return {"loss": loss(wrapped, windows.held_out["input_ids"])}

    steps = config.tokens // (config.batch * config.context)
    schedule = Schedule(
        steps, RATES["attention"] / 5, max(1, steps // config.evaluations), config.batch * config.context
    )
    work = Work(folder, "dense")
    fit(Accelerator(cpu=True), model, schedule, next_token, judge, work)
    put_weights(model, work.best().tensors)
    return model


def main():  # noqa: PLR0915 - a table, row by row
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--other", type=Path, required=True)
    parser.add_argument("--calibration")
    parser.add_argument("--shares", default="0.75,0.5")
    parser.add_argument("--tokens", default="50000,100000,200000")
    parser.add_argument("--variants-at", type=int, default=0)
    parser.add_argument("--variants", default=",".join([*VARIANTS, "dense"]))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = str(demo_model()) if args.model == "smollm2" else args.model
    files = {"test": args.test, "other": args.other}
    tests = {name: cut_up(source, file, args.context, args.skip) for name, file in files.items()}
    found = {
        "model": Path(source).name,
        "calibration": Path(args.calibration or args.text[0]).name,
        "healed_on": [Path(text).name for text in args.text],
        "texts": {name: file.name for name, file in files.items()},
        "skipped_tokens": args.skip,
        "evaluation_tokens": {name: windows.numel() for name, windows in tests.items()},
        "context": args.context,
        "seed": 0,
        "rates": RATES,
        "tokens_a_step": args.context * HealConfig().batch,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }
    before = json.loads(args.output.read_text()) if args.output.exists() else {}
    rows = before["rows"] if all(before.get(name) == value for name, value in found.items()) else []
    dense_model = open_model(source).float()
    dense = {name: loss(dense_model, windows) for name, windows in tests.items()}
    found["dense_perplexity"] = {name: round(math.exp(value), 3) for name, value in dense.items()}
    del dense_model

    def add(key, model, **facts):
        excess = {f"excess_{name}": round(loss(model, windows) - dense[name], 4) for name, windows in tests.items()}
        rows.append({**key, **excess, **facts})
        args.output.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
        print(json.dumps({name: value for name, value in rows[-1].items() if name != "curve"}), flush=True)

    def missing(**key):
        key = {"next_token": None, **key}
        return not any(all(row.get(name) == value for name, value in key.items()) for row in rows)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = InspectConfig(tokens=CALIBRATION_TOKENS, maps=False)
        inspect_folder(source, folder / "run", texts=[args.calibration or args.text[0]], config=config)

        def cut(share, start):
            """The folder of the model cut to ``share`` of its cache."""
            student, plan = folder / f"{start}-{share}", folder / f"plan-{share}.json"
            if not student.exists():
                if not plan.exists():
                    make_plan(folder / "run", plan, Budget("keep_kv", share))
                compress(source, plan, student, config=CompressConfig(method=start))
            return student

        def go(share, tokens, stage="both", train="attention", start="weighted", **more):
            key = {"share": share, "tokens": tokens, "stage": stage, "train": train, "start": start, **more}
            if not missing(**key):
                return
            student, healed = cut(share, start), folder / "healed"
            config = HealConfig(tokens=tokens, stage=stage, train=train, context=args.context, **more)
            begun = time.perf_counter()
            told = heal(str(student), source, healed, texts=args.text, config=config)
            seconds = time.perf_counter() - begun
            curve = [json.loads(line) for line in (healed / CURVE).read_text().splitlines()]
            curve = [line for line in curve if "scores" in line]
            add(
                key,
                open_model(str(healed)).float(),
                held_out_kl=[round(told["before"], 4), round(told["after"], 4)],
                best=told["best"],
                seconds=round(seconds, 1),
                curve=curve,
            )
            for file in healed.iterdir():
                file.unlink()
            healed.rmdir()

        for share in map(float, args.shares.split(",")):
            if missing(share=share, tokens=0):
                add({"share": share, "tokens": 0}, open_model(str(cut(share, "weighted"))).float())
            for tokens in filter(None, map(int, args.tokens.split(","))):
                go(share, tokens)
        variants = args.variants.split(",")
        for variant in [name for name in variants if name in VARIANTS] if args.variants_at else ():
            for share in map(float, args.shares.split(",")):
                go(share, args.variants_at, **VARIANTS[variant])
        tokens = max(map(int, args.tokens.split(",")))
        if "dense" in variants and missing(share=1.0, tokens=tokens):
            begun = time.perf_counter()
            config = HealConfig(tokens=tokens, context=args.context)
            model = continued(source, args.text, config, folder / f"dense-{tokens}")
            key = {"share": 1.0, "tokens": tokens, "method": "dense, continued on the text itself"}
            add(key, model, seconds=round(time.perf_counter() - begun, 1))


if __name__ == "__main__":
    main()
