"""What a smaller KV cache does to skills: a dense model beside models that were made of it.

    python benchmarks/skills.py MODEL REDUCED ... [--text FILE ...] [--tokens 4096] [--context 512] [--seed 0]
                                [-o results/skills.json]

MODEL is a folder, or "smollm2" for the model of the demo. Loss, KL and their errors on the text (by default headwise's
evaluation text), loss by position, and all skills of ``headwise evaluate --skills`` with the intervals of their
differences from MODEL. The result is a scores file: models
are called after their folders.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import headwise as hw
from headwise.steps.demo import demo_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--text", action="append", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/skills.json"))
    options = parser.parse_args()
    folders = [demo_model() if model == "smollm2" else Path(model) for model in options.models]
    config = hw.EvaluateConfig(
        tokens=options.tokens, context=options.context, speed=False, skills=True, seed=options.seed
    )
    scores = hw.evaluate({folder.name: folder for folder in folders}, text=options.text, config=config)
    if options.text:
        named = ", ".join(path.name for path in options.text)
        scores = replace(scores, text={**scores.text, "name": named})
    scores.save(options.output)
    print(scores)


if __name__ == "__main__":
    main()
