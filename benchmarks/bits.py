"""Loss, KL and bytes of a model that reads its keys and values from caches of fewer bits, all on the same text.

    python benchmarks/bits.py MODEL --text FILE [--calibration FILE] [--healing FILE] [--contexts 512,4096]
                              [--tokens 20480] [--methods int8,kivi-4,...] [-o results/bits.json]

MODEL is a folder, or "smollm2" for the one of the demo. Every method reads the same windows, teacher-forced: each query
attends to rounded keys and values only, its own among them. Everything runs in float32; share counts all bytes that a
cache of one such window takes, against bfloat16. Excess: nats per token over the dense model with an unrounded cache;
its standard error is that of the paired difference over windows. KL: from the dense model, nats per token. Rows that
are there already are kept, so a killed run goes on.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from alternatives import ALTERNATIVES, SEED, Alternative
from coordinates import OURS
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from headwise.checkpoints.load import open_model
from headwise.data.processors import open_tokenizer
from headwise.files.errors import InputError
from headwise.files.writing import replacing
from headwise.linalg.divergence import divergences
from headwise.runtime.modeling_headwise import padded_attention
from headwise.steps.demo import demo_model
from headwise.tracing.interface import attending

TOKENS_AT_ONCE = 1024  # of a forward pass, one window at least
ROWS_AT_ONCE = 256  # hidden states whose logits are in memory together: a vocabulary is wide


class Quantiser(Protocol):
    """A way to store keys and values."""

    @property
    def model(self) -> PreTrainedModel:
        """The model that reads: the dense one, unless the method changes weights."""
        ...

    @property
    def bits(self) -> float:
        """Of a number, scales apart; the mean where they differ."""
        ...

    def read(self, layer: int, k_BGTK: Tensor, v_BGTV: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads in place of the keys (after RoPE) and values of whole windows."""
        ...

    def share(self, tokens: int) -> float:
        """Bytes of a cache of so many tokens against those of the dense model's in bfloat16."""
        ...


@dataclass(frozen=True)
class Calibration:
    """What a method may look at before it is measured: a text that is never evaluated on."""

    source: str
    text: Path | None
    healing: Path | None
    context: int
    work: Path | None = None  # where measurements are kept for other runs


Factory = Callable[[PreTrainedModel, Calibration], Quantiser]


def uncalibrated(alternative: Callable[[PreTrainedModel], Alternative]) -> Factory:
    """A factory that looks at no text."""
    return lambda model, calibration: alternative(model)


# A method is one more entry: from the dense model and what it may be calibrated on to its quantiser.
METHODS: dict[str, Factory] = {**{name: uncalibrated(each) for name, each in ALTERNATIVES.items()}, **OURS}


@contextmanager
def reading(model: PreTrainedModel, quantiser: Quantiser | None) -> Generator[None, None, None]:
    """Let every attention of ``model`` read what ``quantiser`` leaves of keys and values; None leaves all."""

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        if quantiser is not None:
            k, v = quantiser.read(module.layer_idx, k, v)
        return padded_attention(sdpa_attention_forward, module, q, k, v, mask, **kwargs)

    with attending(model, attend, sdpa_mask):
        yield


def hidden_states(model: PreTrainedModel, windows_WT: Tensor, quantiser: Quantiser | None) -> Iterable[Tensor]:
    """Of each window what the head is given to predict all tokens but the first, (T - 1, D)."""
    with reading(model, quantiser):
        for some in windows_WT.split(max(1, TOKENS_AT_ONCE // windows_WT.shape[1])):
            yield from model.base_model(some, use_cache=False).last_hidden_state[:, :-1]


class Baseline:
    """The dense model on some windows, and what others lose against it."""

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, windows_WT: Tensor) -> None:
        self.windows_WT = windows_WT
        self.head = model.get_output_embeddings()
        self.hidden = list(hidden_states(model, windows_WT, None))
        self.losses_W, _ = self._measure(self.head, self.hidden)

    @torch.inference_mode()
    def compare(self, quantiser: Quantiser) -> dict[str, float | None]:
        """Loss, excess and its standard error, and KL of a model that reads from such a cache."""
        hidden = hidden_states(quantiser.model, self.windows_WT, quantiser)
        losses_W, divergences_W = self._measure(quantiser.model.get_output_embeddings(), hidden)
        excess_W = losses_W - self.losses_W
        error = excess_W.std().item() / len(excess_W) ** 0.5 if len(excess_W) > 1 else None
        return {
            "loss": round(losses_W.mean().item(), 5),
            "excess": round(excess_W.mean().item(), 5),
            "standard_error": None if error is None else round(error, 5),
            "kl": round(divergences_W.mean().item(), 5),
        }

    def _measure(self, head: torch.nn.Module, hidden: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        """Mean loss of each window and its mean KL from the dense model, a few rows of logits at a time."""
        means = []
        for window in zip(hidden, self.hidden, self.windows_WT[:, 1:], strict=True):
            sums = torch.zeros(2, dtype=torch.float64)
            for read, dense, labels in zip(*(rows.split(ROWS_AT_ONCE) for rows in window), strict=True):
                logits = head(read)
                sums[0] += cross_entropy(logits, labels, reduction="sum").double()
                sums[1] += divergences(self.head(dense), logits).double().sum()
            means.append(sums / len(window[2]))
        losses_W, divergences_W = torch.stack(means).unbind(1)
        return losses_W, divergences_W


class Table:
    """Rows in a file, written as they come; a file that is there goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _content(self) -> dict[str, Any]:
        return json.loads(self.path.read_text()) if self.path.exists() else {"rows": []}

    def row(self, **identity: Any) -> dict[str, Any] | None:
        return next((row for row in self._content()["rows"] if identity.items() <= row.items()), None)

    def has(self, **identity: Any) -> bool:
        return self.row(**identity) is not None

    def add(self, row: dict[str, Any]) -> None:
        """Append to what is in the file by now: several runs may write to it in turns."""
        facts = {
            "seed": SEED,
            "machine": platform.machine(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        content = {**facts, "rows": [*self._content()["rows"], row]}
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")
        print(json.dumps(row), flush=True)


def commit() -> str:
    """Of this code, with a mark where source or benchmarks have changed since."""
    here = Path(__file__).resolve().parents[1]

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, check=False)

    changed = git("diff", "--quiet", "HEAD", "--", "src", "benchmarks").returncode
    return git("rev-parse", "--short=9", "HEAD").stdout.strip() + ("-changed" if changed else "")


def arguments(methods: Iterable[str]) -> argparse.ArgumentParser:
    """What a measurement of losses is told; for other parsers to take over."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("model", help='a folder, or "smollm2" for the model of the demo')
    parser.add_argument("--text", type=Path, required=True, help="to evaluate on")
    parser.add_argument("--calibration", type=Path, help="text for methods that look at some")
    parser.add_argument("--healing", type=Path, help="text for methods that learn from some")
    parser.add_argument("--work", type=Path, help="folder that keeps what was measured of a model for other runs")
    parser.add_argument("--contexts", default="512,4096", help="tokens of a window, one or several")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--methods", default=",".join(methods), help="default: %(default)s")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/bits.json"))
    return parser


def measure(args: argparse.Namespace, methods: Mapping[str, Factory]) -> None:
    """All rows that ``args`` ask for and the table does not have."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    names = args.methods.split(",")
    unknown = [name for name in names if name not in methods]
    if unknown:
        raise InputError(f"There is no method {', '.join(unknown)}; there are {', '.join(methods)}.")
    source = str(demo_model()) if args.model == "smollm2" else args.model
    ids = open_tokenizer(source)(args.text.read_text(encoding="utf-8"))["input_ids"][: args.tokens]
    model = open_model(source).float()
    table, version = Table(args.output), commit()
    for context in map(int, args.contexts.split(",")):
        windows_WT = torch.tensor(ids[: len(ids) // context * context]).view(-1, context)
        if not len(windows_WT):
            raise InputError(f"{args.text} has {len(ids)} of {args.tokens} tokens: no window of {context}.")
        run = {
            "model": Path(source).name,
            "text": args.text.name,
            "context": context,
            "tokens": windows_WT.numel(),
        }
        missing = [name for name in names if not table.has(**run, method=name)]
        baseline = Baseline(model, windows_WT) if missing else None
        for name in missing:
            start = time.perf_counter()
            quantiser = methods[name](model, Calibration(source, args.calibration, args.healing, context, args.work))
            scores = {
                "bits": quantiser.bits,
                "share": round(quantiser.share(context), 5),
                **baseline.compare(quantiser),
            }
            seconds = round(time.perf_counter() - start, 1)
            table.add({**run, "method": name, **scores, "seconds": seconds, "commit": version})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], parents=[arguments(METHODS)])
    measure(parser.parse_args(), METHODS)


if __name__ == "__main__":
    main()
