"""The verbs on objects against the command line: the same losses, to the last digit.

headwise run MODEL --keep-kv 0.75 --tokens N --eval-tokens N --heal-tokens N --no-speed ... -o RUN
python benchmarks/objects.py MODEL RUN --tokens N --eval-tokens N [--heal-tokens N] [--text FILE] [--eval-text FILE]
                             [-o results/objects.json]
"""

import argparse
import json
from pathlib import Path

import transformers

import headwise as hw
from headwise.data.processors import open_tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("run", type=Path, help="folder that headwise run wrote with the same settings")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--eval-text", type=Path)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--eval-tokens", type=int, required=True)
    parser.add_argument("--heal-tokens", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, default=Path("results/objects.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    model, tokenizer = hw.open(args.model), open_tokenizer(args.model)
    profile = hw.inspect(model, tokenizer, text=args.text, config=hw.InspectConfig(tokens=args.tokens))
    plan = hw.plan(profile, keep_kv=0.75)
    models = {"dense": model, "reduced": hw.compress(model, plan, profile)}
    if args.heal_tokens:
        healing = hw.HealConfig(tokens=args.heal_tokens)
        models["healed"] = hw.heal(
            models["reduced"], teacher=model, tokenizer=tokenizer, text=args.text, config=healing
        )
    evaluation = hw.EvaluateConfig(tokens=args.eval_tokens, speed=False)
    scores = hw.evaluate(models, tokenizer, text=args.eval_text, config=evaluation)

    by_command = [each["loss"] for each in json.loads((args.run / "scores.json").read_text())["models"]]
    losses = {each.source: each.loss for each in scores.models}
    content = json.loads(args.output.read_text()) if args.output.exists() else {}
    content[Path(args.model).name] = {
        "settings": {"tokens": args.tokens, "eval_tokens": args.eval_tokens, "heal_tokens": args.heal_tokens},
        "objects": losses,
        "command line": by_command,
        "the same": list(losses.values()) == by_command,
    }
    args.output.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
