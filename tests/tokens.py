"""A tiny byte-level tokenizer, made in code."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import VOCAB

EVERY_BYTE = 256 + 3


def save_tokenizer(folder: Path, vocabulary: int = VOCAB) -> None:
    """Write a tokenizer of letters whose ids fit the tiny models; only one of `EVERY_BYTE` knows spaces."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: vocabulary - 3]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: index + 3 for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="</s>"
    )
    fast.save_pretrained(folder)
