"""What is planned for SmolLM2-135M at several budgets: widths by layer, early against late layers, removed heads.

    python benchmarks/plans.py --calibration FILE [--tokens 8192] [-o results/plans.json]

The same statistics as benchmarks/compress.py. Plans at 75 % and 50 % are kept beside the results, for student_speed.py.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import transformers

from headwise.pipelines.profile import inspect_folder
from headwise.records.budget import Budget
from headwise.records.settings import InspectConfig
from headwise.reduction.plans import plan_for
from headwise.steps.demo import demo_model

SHARES = (0.875, 0.75, 0.5, 0.3)
KEPT = (0.75, 0.5)


def share_kept(plan, shape, layers, width):
    """Part of a width that stays in ``layers``, removed heads counted as lost."""
    kept = plan.after(shape)
    after = sum(kept[i].kv_heads * getattr(kept[i], width) for i in layers)
    return after / sum(shape.layers[i].kv_heads * getattr(shape.layers[i], width) for i in layers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/plans.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        texts = [str(args.calibration)]
        config = InspectConfig(tokens=args.tokens, maps=False)
        profile = inspect_folder(str(demo_model()), Path(name) / "run", texts=texts, config=config)
    shape = profile.shape
    third = len(shape.layers) // 3
    early, late = range(third), range(len(shape.layers) - third, len(shape.layers))
    rows = []
    for share in SHARES:
        start = time.perf_counter()
        plan = plan_for(profile, Budget("keep_kv", share))
        seconds = time.perf_counter() - start
        if share in KEPT:
            plan.save(args.output.with_name(f"plan_smollm2_{round(100 * share)}.json"))
        stock = plan_for(profile, Budget("keep_kv", share), uniform=True)
        rows.append(
            {
                "kv_share": share,
                "predicted_nats": round(plan.predicted["loss_increase"], 4),
                "predicted_nats_stock": round(stock.predicted["loss_increase"], 4),
                "seconds": round(seconds, 3),
                "kv_heads_removed": sum(
                    s.kv_heads - c.kv_heads for s, c in zip(shape.layers, plan.after(shape), strict=True)
                ),
                "attentions_removed": sum(not layer.heads for layer in plan.after(shape)),
                "kept": {
                    width: {"early third": round(share_kept(plan, shape, early, width), 3)}
                    | {"late third": round(share_kept(plan, shape, late, width), 3)}
                    for width in ("qk_dim", "v_dim")
                },
                "layers": [list(layer.dims[1:]) for layer in plan.after(shape)],
            }
        )
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "layers"}), flush=True)
    facts = {"model": "SmolLM2-135M-Instruct, float32", "calibration": args.calibration.name, "tokens": args.tokens}
    facts |= {"seed": 0, "machine": platform.machine()}
    args.output.write_text(json.dumps({**facts, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
