"""A byte-level BPE tokenizer learnt from text, saved so that transformers opens it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headwise.files.errors import InputError
from headwise.files.writing import new_folder

END = "<|endoftext|>"


def learn_tokenizer(pieces: Iterable[str], size: int, folder: Path) -> None:
    """Write a tokenizer of at most ``size`` tokens to the new ``folder``: every byte, `END`, and merges of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    least = len(alphabet) + 1
    if size < least:
        raise InputError(f"A vocabulary of {size} cannot hold every byte and an end of text; the least is {least}.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(pieces, trainer)
    with new_folder(folder) as temporary:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END).save_pretrained(temporary)
