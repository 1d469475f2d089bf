"""A small GPT-2 (learned positions, biases) trained in minutes, for the tables of benchmarks/compress.py.

    python benchmarks/small_gpt2.py TEXT FOLDER [--steps 600]

4 layers of width 192, 6 heads of 32, context 128, a byte-level BPE of 2,000 tokens trained on the same text. Seed 0.
"""

import argparse
import math
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

CONTEXT, BATCH, RATE = 128, 16, 2e-3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    torch.manual_seed(0)
    text = args.text.read_text(encoding="utf-8")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([text], vocab_size=2000, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    config = GPT2Config(
        vocab_size=2000,
        n_positions=CONTEXT,
        n_embd=192,
        n_layer=4,
        n_head=6,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
    )
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(args.steps):
        rate = RATE * min(1.0, (step + 1) / 100) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(ids) - CONTEXT, (BATCH,)).tolist()
        rows = torch.stack([ids[start : start + CONTEXT] for start in starts])
        loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(step, round(loss.item(), 3), flush=True)
    model.eval().save_pretrained(args.folder)
    tokenizer.save_pretrained(args.folder)


if __name__ == "__main__":
    main()
