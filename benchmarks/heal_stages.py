"""What single layers win back, and in what share of the time that all layers together take.

    python benchmarks/heal_stages.py --text FILE -o FILE [--calibration FILE] [--shares 0.75,0.5]
        [--local-tokens 16384] [--against results/heal_smollm2.json]

SmolLM2-135M is cut as in heal.py. Its layers are healed one by one and timed; right after, 32 steps of healing them
together say how long 200,000 tokens take (measuring in between left out). What all of healing wins back is the row of
200,000 tokens in ``--against``.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import torch
import transformers

from headwise.pipelines.profile import inspect_folder
from headwise.records.budget import Budget
from headwise.records.healing import HealConfig
from headwise.records.settings import InspectConfig
from headwise.steps.compress import compress
from headwise.steps.demo import demo_model
from headwise.steps.heal import CURVE, heal
from headwise.steps.heal.local import ROUNDS
from headwise.steps.plan import make_plan

CALIBRATION_TOKENS = 8192
TOKENS = 200_000
STEPS = 32


def local(student, source, text, tokens, folder):
    """Seconds of healing layer by layer, and the held-out KL before and after."""
    seen = []
    told = heal(
        str(student),
        source,
        folder,
        texts=[text],
        config=HealConfig(tokens=TOKENS, stage="local", local_tokens=tokens),
        progress=lambda done, total, what: seen.append((time.perf_counter(), what)),
    )
    begin = next(i for i, (_, what) in enumerate(seen) if "layer by layer" in what)
    end = next(when for when, what in seen[begin:] if "layer by layer" not in what)
    return end - seen[begin][0], told["before"], told["after"]


def rate(student, source, text, folder):
    """Tokens a second of healing all together."""
    config = HealConfig(tokens=STEPS * HealConfig().context * HealConfig().batch, stage="global", evaluations=1)
    heal(str(student), source, folder, texts=[text], config=config)
    lines = [json.loads(line) for line in (folder / CURVE).read_text().splitlines()]
    return [line for line in lines if "tokens_per_second" in line][-1]["tokens_per_second"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", required=True)
    parser.add_argument("--calibration")
    parser.add_argument("--shares", default="0.75,0.5")
    parser.add_argument("--local-tokens", type=int, default=16_384)
    parser.add_argument("--against", type=Path, default=Path("results/heal_smollm2.json"))
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = str(demo_model())
    healed = {row["share"]: row for row in json.loads(args.against.read_text())["rows"] if row["tokens"] == TOKENS}
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [args.calibration or args.text]
        config = InspectConfig(tokens=CALIBRATION_TOKENS, maps=False)
        inspect_folder(source, folder / "run", texts=texts, config=config)
        for share in map(float, args.shares.split(",")):
            plan, student = folder / f"{share}.json", folder / f"student-{share}"
            make_plan(folder / "run", plan, Budget("keep_kv", share))
            compress(source, plan, student)
            seconds, before, after = local(student, source, args.text, args.local_tokens, folder / f"local-{share}")
            speed = rate(student, source, args.text, folder / f"global-{share}")
            start, end = healed[share]["held_out_kl"]
            rows.append(
                {
                    "share": share,
                    "held_out_kl": [round(before, 4), round(after, 4)],
                    "of_all_recovery": round((before - after) / (start - end), 3),
                    "seconds": round(seconds, 1),
                    "tokens_per_second_together": speed,
                    "of_time_together": round(seconds / (TOKENS / speed), 3),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    found = {
        "model": Path(source).name,
        "text": Path(args.text).name,
        "calibration": Path(args.calibration or args.text).name,
        "local_tokens": args.local_tokens,
        "rounds": ROUNDS,
        "tokens_together": TOKENS,
        "seed": 0,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "rows": rows,
    }
    args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
