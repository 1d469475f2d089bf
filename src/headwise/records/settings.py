"""What each step can be told, its default and what it means: arguments in Python, options in a terminal."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from headwise.files.errors import InputError
from headwise.files.numbers import read_count, read_decimals, read_share, read_size, read_window, read_windows

# lines: every line is an example of its own; document: one long text; auto: lines if each is one long word (proteins).
TextFormat = Literal["auto", "lines", "document"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]
Precision = Literal["auto", "fp32", "bf16"]  # to train in
Format = Literal["auto", "stock", "per-layer"]
Method = Literal["auto", "weighted", "token-weighted", "svd"]
GgufPrecision = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
Rounding = Literal["mixed", "latent", "whole", "int8", "int4", "none"]
SLOWEST = 3e-5  # learning rate


def option(default: Any, text: str, *flags: str, **more: Any) -> Any:
    """A field of settings that a person may set. ``flags`` if its name would not do, ``read`` for its grammar."""
    return field(default=default, metadata={"help": text, "flags": flags, **more})


def required(text: str, *flags: str, **more: Any) -> Any:
    """The same without a default."""
    return field(metadata={"help": text, "flags": flags, **more})


@dataclass(frozen=True, slots=True)
class TrustConfig:
    """Whether a tokenizer may bring code."""

    trust_remote_code: bool = option(
        False, "Let a tokenizer or image processor run code that comes with it.", "--trust-remote-code"
    )


@dataclass(frozen=True, slots=True)
class OpenConfig:
    """Where and in which precision a model runs, and whether its tokenizer may bring code."""

    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: a GPU if there is one.", metavar="DEVICE")
    dtype: Dtype = option("auto", "Precision to run in; auto: the model's own on a GPU, fp32 on a CPU.")
    trust_remote_code: bool = field(default=False, metadata=fields(TrustConfig)[0].metadata)


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """How files of text are read."""

    text_format: TextFormat = option("auto", "lines: each line is an example; auto: lines if each is one long word.")
    accept_text: bool = option(
        False, "Even if a fifth of its tokens are unknown, padding or repeated.", "--accept-text"
    )


@dataclass(frozen=True, slots=True)
class InspectConfig:
    """How much text a profile is measured on. ``maps``: attention maps too, not only what planning needs."""

    tokens: int = option(8192, "Tokens to measure on.", read=read_count)
    context: int | None = option(
        None, "Tokens in a window; by default what the model was made for, up to 4096.", read=read_window
    )
    lengths: tuple[int, ...] | None = option(
        None,
        "Lengths of the attention maps; by default 64 to 1024, as far as the model goes.",
        read=read_windows,
    )
    seed: int = option(0, "Seed of the labels sampled from the model.")
    positions: bool = option(
        False, "Also measure which RoPE pairs may lose their position, for plans with --absorb.", "--positions"
    )
    maps: bool = True


@dataclass(frozen=True, slots=True)
class BudgetConfig:
    """What the reduced model may cost: one of these, or several that hold at once."""

    keep_kv: float | None = option(None, "Share of the KV cache to keep: 0.75 or 75%.", read=read_share)
    keep_params: float | None = option(
        None, "Share of the parameters of the blocks to keep: of everything but embeddings and head.", read=read_share
    )
    keep_attention_params: float | None = option(
        None, "Share of the attention parameters to keep, for models without a cache.", read=read_share
    )
    kv_bytes_per_token: int | None = option(None, "Bytes one token may take in the KV cache.", read=read_size)
    layers: int | None = option(None, "Layers to keep: others are dropped whole, or joined to a neighbour.")
    fit: str | None = option(None, 'Memory for weights and KV cache, tokens and sequences in it: "8GB at 32k x 4".')
    keep_decode_time: float | None = option(
        None,
        "Time of one new token against the dense model's, as measured on this device: 0.7, or 1.1 at most.",
        read=read_share,
    )


@dataclass(frozen=True, slots=True)
class BoundConfig:
    """How much worse the reduced model may measure, instead of what it may cost: one of these."""

    max_loss_increase: float | None = option(
        None, "The smallest model whose loss rises by at most so many nats. Builds and runs about six models."
    )
    max_ppl_increase: float | None = option(None, "The same for perplexity: 2%, or 0.02 of it.", read=read_share)

    def __post_init__(self) -> None:
        for name in ("max_loss_increase", "max_ppl_increase"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"`{name}` must be more than 0, got {value}.")

    @property
    def nats(self) -> float | None:
        """The bound as nats of loss; None where none is given."""
        return self.max_loss_increase if self.max_ppl_increase is None else math.log1p(self.max_ppl_increase)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How the bytes of a KV cache are counted."""

    cache_tokens: int | None = option(None, "Tokens in the cache, for models with sliding windows.", read=read_window)
    cache_dtype: str = option("bf16", "fp32, bf16, fp16 or fp8: what bytes are counted in.")


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """Which plans are allowed."""

    multiple_of: int = option(8, "Widths are multiples of this.")
    protect: str | None = option(None, 'Layers that stay as they are, as in "0,1,28-29".', metavar="LAYERS")
    uniform: bool = option(False, "One width and one set of RoPE pairs for all layers, for stock formats.", "--uniform")
    merge_heads: bool = option(
        False,
        "Also merge neighbouring key/value heads, without rounding (--cache none) or --uniform: a smaller cache, but "
        "more weights, and a slow refit.",
        "--merge-heads",
    )
    absorb: bool = option(
        False,
        "Also let blocks of heads cache a few RoPE pairs and one latent, which are read as they are, without rounding "
        "(--cache none); of a profile that was measured with --positions.",
        "--absorb",
    )
    cache: Rounding = option(
        "mixed",
        "How the KV cache may be rounded: mixed gives each coordinate its own bits; latent also stores one latent for "
        "keys and values together: smallest, but keys are made anew for every token; whole stores coordinates, of "
        "latents too, in 16 bits or not at all; int8 and int4 know one width or none; none leaves it in the model's "
        "precision.",
    )


@dataclass(frozen=True, slots=True)
class CompressConfig:
    """How weights are cut, fitted and saved."""

    format: Format = option("auto", "stock: no custom code; per-layer: any plan; auto: stock if possible.")
    method: Method = option(
        "auto",
        "weighted: along the directions the loss feels; token-weighted: by second moments of tokens; svd: by the "
        "weights alone, the papers' way; auto: weighted if there is a profile.",
    )
    refit: str | None = option(
        None,
        "What to fit to the dense model afterwards: queries,outputs,downs (by default, with weighted), temperature, or "
        "none.",
        metavar="PIECES",
    )


@dataclass(frozen=True, slots=True)
class EvaluateConfig:
    """How much text models are compared on, whether they are timed, and what else they are asked."""

    tokens: int = option(20480, "Tokens to evaluate on.", read=read_count)
    context: int | None = option(
        None, "Tokens in a window; by default what the models were made for, up to 4096.", read=read_window
    )
    speed_at: tuple[int, ...] | None = option(
        None, "Lengths to time at; by default 1024, or as far as the models go.", read=read_windows
    )
    speed: bool = option(True, "Time prefill and decode.", "--speed/--no-speed")
    skills: bool = option(
        False,
        "Also needles in a haystack, copying, sums, JSON and chat: generated exercises, offline; about a minute for "
        "each model of the demo's size.",
        "--skills",
    )
    skills_at: tuple[int, ...] | None = option(
        None, "Lengths of the haystacks; by default 256,1024, or as far as the models go.", read=read_windows
    )
    seed: int = option(0, "Seed of the exercises.")
    tasks: str | None = option(
        None, "Tasks of lm-evaluation-harness, names or .yaml files with commas between them.", metavar="TASKS"
    )
    task_limit: int | None = option(None, "Examples of each task; by default all.")


@dataclass(frozen=True, slots=True)
class CostConfig:
    """At what use a model is costed."""

    context: int | None = option(
        None, "Tokens in each sequence; by default what the model was made for, up to 8192.", read=read_window
    )
    batch: int = option(1, "Sequences at once.")
    cache_dtype: str = option("bf16", "fp32, bf16, fp16 or fp8: what the cache holds.")


@dataclass(frozen=True, slots=True)
class DesignConfig:
    """What a new model may have and what it reads; None: not said."""

    params: int = required("Parameters the model may have, as 30M.", metavar="N", read=read_count)
    context: int | None = option(None, "Longest text in tokens; by default 1024.", read=read_window)
    vocab: int | None = option(None, "Tokens in the vocabulary; by default 8192.", read=read_count)
    kv_bytes_per_token: int | None = option(None, "Bytes one token may take in the KV cache.", read=read_size)
    image_size: int | None = option(None, "Side of an image, for vit; by default 224.")
    patch_size: int | None = option(None, "Side of a patch, for vit; by default 16.")
    channels: int | None = option(None, "Numbers in a pixel, for vit; by default 3.")
    labels: int | None = option(None, "Classes to tell apart, for vit; by default 1000.")
    lags: tuple[float, ...] = option(
        (1.0, 0.5, 0.25),
        "How strongly early layers gather the last tokens, the one just before first: 1,0.5,0.25.",
        read=read_decimals,
    )
    intrinsic_dim: int | None = option(None, "Independent look-ups the task takes, if known.")


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Tokens, learning rate, batches. ``batch`` is the number of windows a process takes at once.

    Open until plan and data are known: ``tokens`` (once through the data), ``rate`` (`usual_rate`) and ``context``
    (the plan's). The last ``held_out`` tokens of the data are evaluated on, ``evaluations`` times.
    """

    tokens: int | None = option(
        None, "Tokens to learn from, as 20M; by default once through the data.", metavar="N", read=read_count
    )
    rate: float | None = option(None, "Learning rate; by default what suits the size.", "--lr")
    context: int | None = option(None, "Tokens in a window; by default the plan's context.", read=read_window)
    batch: int = option(8, "Windows (pictures) that one process takes at once.")
    accumulate: int = option(1, "Batches that make one step.")
    decay: float = 0.1
    held_out: int = 16_384
    evaluations: int = option(10, "Times to measure on held-out data.")
    precision: Precision = option("auto", "auto: bf16 where the machine computes in it.")
    seed: int = option(0, "For the first weights and the order of windows.")

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        for name in ("tokens", "context", "batch", "accumulate", "held_out", "evaluations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name.replace('_', ' ')} must be at least 1, got {value}.")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise InputError(f"The learning rate must be more than 0, got {self.rate}.")

    def facts(self) -> dict[str, Any]:
        """All settings, for hashes and cards."""
        return asdict(self)


def usual_rate(parameters: int) -> float:
    """A learning rate for a model of this size: Kaplan et al., Scaling Laws for Neural Language Models, eq. (D.1)."""
    return max(SLOWEST, 0.003239 - 0.0001395 * math.log(parameters))
