"""What was measured: for each layer and head how much of its width is used, how sharp its softmax is, what could go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from headwise.files.errors import InputError
from headwise.files.reading import LARGEST, Reader, read_record
from headwise.files.writing import write_record
from headwise.records.rendering import Shown
from headwise.records.shape import LayerShape, ModelShape

KIND = "profile"
VERSION = 2
SHARES = (0.9, 0.95, 0.99)
DIGITS = 5
MLP_PARTS = 64
PARTS = ("mlp", "block")


@dataclass(frozen=True, slots=True)
class Quantity:
    """One thing a profile tells. ``axes`` name its nested lists, outermost first; ``text`` defines it."""

    axes: tuple[str, ...]
    text: str


# Axes: head (query head), group (key/value head), value (one singular value, largest first), share (0.9, 0.95, 0.99),
# length, tolerance, width, pair, unit, kind (key units, value directions, heads), dim (0 ... full width).
QUANTITIES: dict[str, Quantity] = {
    "qk_weight_spectrum": Quantity(
        ("head", "value"), "Singular values of the query-key product W_q W_k^T, from the weights alone."
    ),
    "qk_data_spectrum": Quantity(
        ("head", "value"),
        "Singular values of the logits over the text, per pair of tokens: of M_q^1/2 M_k^1/2 x scale, with M_q the "
        "second moment of the queries and M_k that of the keys about their mean (a constant added to all keys changes "
        "no softmax), after norms and rotary positions.",
    ),
    "vo_weight_spectrum": Quantity(
        ("head", "value"), "Singular values of the value-output product W_v W_o, from the weights alone."
    ),
    "vo_data_spectrum": Quantity(
        ("head", "value"),
        "Singular values of the head's output over the text, per token: of (W_o W_o^T)^1/2 Z^1/2, with Z the second "
        "moment of the attention-averaged values sum_t a_t v_t.",
    ),
    "qk_weight_dims": Quantity(("head", "share"), "Dimensions that hold 90, 95, 99 % of qk_weight_spectrum squared."),
    "qk_data_dims": Quantity(("head", "share"), "Dimensions that hold 90, 95, 99 % of qk_data_spectrum squared."),
    "vo_weight_dims": Quantity(("head", "share"), "Dimensions that hold 90, 95, 99 % of vo_weight_spectrum squared."),
    "vo_data_dims": Quantity(("head", "share"), "Dimensions that hold 90, 95, 99 % of vo_data_spectrum squared."),
    "qk_group_dims": Quantity(
        ("group", "share"), "qk_data_dims of all query heads of a key/value head together: what its cache must hold."
    ),
    "vo_group_dims": Quantity(("group", "share"), "vo_data_dims of all query heads of a key/value head together."),
    "qk_group_spectrum": Quantity(
        ("group", "value"), "qk_data_spectrum of all query heads of a key/value head together (stacked)."
    ),
    "vo_group_spectrum": Quantity(
        ("group", "value"), "vo_data_spectrum of all query heads of a key/value head together (stacked)."
    ),
    "rope_pair_dims": Quantity(
        ("group", "share"),
        "Dimensions of whole RoPE pairs, strongest first, that hold 90, 95, 99 % of rope_pair_energy squared: what a "
        "cut that keeps frequencies apart can reach, unlike qk_group_dims.",
    ),
    "rope_pair_energy": Quantity(
        ("group", "pair"),
        "Root mean square that each RoPE pair adds to the logits of a key/value head's queries, keys about their mean.",
    ),
    "hard_rank": Quantity(
        ("head", "length"),
        "Distinct argmax columns of the attention map: its rank at zero temperature. Random attention reaches 0.632 n, "
        "under a causal mask 0.5 n. Mean over windows, as all quantities by length.",
    ),
    "numerical_rank": Quantity(
        ("head", "length", "tolerance"),
        "Singular values of the attention map above 0.1, 0.01, 0.001 of the largest (on a sample of windows).",
    ),
    "effective_rank": Quantity(
        ("head", "length"), "Exponential of the entropy of the map's normalised singular values (a sample of windows)."
    ),
    "stable_rank": Quantity(
        ("head", "length"), "Squared Frobenius norm over squared spectral norm of the map (a sample of windows)."
    ),
    "jacobian_mean": Quantity(
        ("head", "length"),
        "Spectral norm of the softmax Jacobian diag(a) - a a^T, mean over rows. At length n under a causal mask the "
        "rows that see more than n/2 and at most n keys, else all rows.",
    ),
    "jacobian_p95": Quantity(("head", "length"), "The same, 95th percentile over the rows of a window."),
    "jacobian_bound": Quantity(("head", "length"), "Its upper bound max a, mean over the same rows."),
    "jacobian_exponent": Quantity(
        ("head",),
        "Slope of log jacobian_mean against log length by least squares: -1 is the papers' O(1/L), 0 no decay.",
    ),
    "logit_spread": Quantity(
        ("head", "length"), "Standard deviation of the logits a row can see, mean over the same rows."
    ),
    "entropy": Quantity(("head", "length"), "Entropy of attention rows in nats, mean over the same rows."),
    "first_token": Quantity(("head", "length"), "Share of attention on the first token, mean over the same rows."),
    "twin": Quantity(
        ("head",),
        "The nearest head: the one of the same layer whose attention is most alike (itself where it is alone).",
    ),
    "twin_overlap": Quantity(
        ("head",),
        "Share of attention both put on the same keys, sum_j min(a_j, b_j): 1 minus the total variation of their rows.",
    ),
    "cut_rows": Quantity(
        ("head", "width"),
        "Total variation between the attention rows of a head and those with its queries and keys cut to a width "
        "(whole RoPE pairs; the strongest of its key/value head by qk energy): the share of attention that moves.",
    ),
    "cut_output": Quantity(
        ("head", "width"), "Relative error of the head's output after the same cut (root mean square), values whole."
    ),
    "vo_cut_output": Quantity(
        ("head", "width"), "Relative error of the head's output with its values cut to a width, attention whole."
    ),
    "conditioning": Quantity(
        ("length",),
        "Condition number of the layer's concatenated head outputs (tokens x heads v_dim), geometric mean over the "
        "sampled windows; values near 1e8 mean singular in float32.",
    ),
    "conditioning_gaussian": Quantity(
        ("length",),
        "The same of a matrix of independent Gaussian numbers: (sqrt(hd) + sqrt(n)) / "
        "abs(sqrt(hd) - sqrt(n)), at most that of a square one, 4.65 min(n, hd).",
    ),
    "coherence": Quantity(
        ("kind",),
        "Squared mask gradients of whole windows over those of their blocks of 128 tokens, for key units, value "
        "directions and heads: what the loss increases below were multiplied with (1 where windows are not cut into "
        "blocks).",
    ),
    "head_damage": Quantity(
        ("head",),
        "Predicted loss increase of removing the head, in nats per token (half the Fisher information of its mask; "
        "labels drawn from the model; half the relative square error of the output for models without a head).",
    ),
    "qk_unit_damage": Quantity(
        ("group", "unit"), "The same for each unit of the keys: RoPE pairs, then free directions by weight."
    ),
    "v_unit_damage": Quantity(("group", "unit"), "The same for each value direction, by weight."),
    "qk_damage": Quantity(
        ("dim",),
        "The same for keeping only so many query/key dimensions in every key/value head, the least felt units cut "
        "first; null where whole pairs do not fit. Diagonal: large cuts cost more than this.",
    ),
    "qk_pairs": Quantity(("dim",), "RoPE pairs among those dimensions."),
    "v_damage": Quantity(("dim",), "The same for value dimensions."),
    "k_bit_damage": Quantity(
        ("cached head", "coordinate"),
        "The same for each coordinate of a key/value head's keys before RoPE in a packed cache (pairs turned onto "
        "their own axes), were its errors independent from token to token: half the mean square of the gradient times "
        "the variance. Rounding costs a part of it. The first token is left out: caches keep it whole. Of latent "
        "attention for the one key that all heads share.",
    ),
    "v_bit_damage": Quantity(
        ("value group", "value coordinate"),
        "The same for values, in the coordinates that a group of key/value heads shares and in which they are rounded, "
        "dearest first; of latent attention for its latent.",
    ),
    "kv_bit_damage": Quantity(
        ("value group", "joint coordinate"),
        "The same for keys before RoPE and values together, in the coordinates that both of a group share in a joint "
        "latent, dearest first.",
    ),
    "shared_k_damage": Quantity(
        ("size", "shared unit"),
        "The same as qk_unit_damage for each unit of the keys of neighbouring key/value heads merged into one: for "
        "each number of heads that may be merged, of all merged heads the RoPE pairs by frequency, then free "
        "directions by weight.",
    ),
    "shared_v_damage": Quantity(
        ("size", "shared value"), "The same for each value direction of merged heads, by weight."
    ),
    "positions_free": Quantity(
        ("candidate",), "How many of the slowest RoPE pairs were tried without a position: 0, then more and more."
    ),
    "positions_lost": Quantity(
        ("candidate",),
        "Measured loss increase where these pairs of this layer no longer turn, in nats per output: the KL divergence "
        "on 512 tokens of the text, or a window as long as it was measured on.",
    ),
    "absorbed_pair_damage": Quantity(
        ("value group", "pair coordinate"),
        "Half the mean square of the clipped gradient times the energy of each coordinate that the heads of a block "
        "share in a RoPE frequency, by frequency and in order of weight: nats per token, were errors independent.",
    ),
    "absorbed_latent_damage": Quantity(
        ("candidate", "value group", "joint coordinate"),
        "The same of each coordinate of one latent for the values of a block and its keys without a position, for "
        "each number of pairs that have none; 0 beyond those there are.",
    ),
    "mlp_damage": Quantity(
        ("sixty-fourth",),
        "Predicted loss increase of keeping 0, 1/64, ... all of the MLP's channels, the least felt cut first, in nats "
        "as above: a channel's energy times that of its gradient, as a share of the Fisher information of masks on "
        "single tokens. Large cuts cost more than this.",
    ),
    "left_out": Quantity(
        ("part",),
        "Measured loss increase with the MLP or all of the block left out, in nats per output: the KL divergence on "
        "256 tokens of the text.",
    ),
    "flattened": Quantity(
        (),
        "The same with the next block side by side with this one: both attentions read what this block reads, both "
        "MLPs what is behind them, and all is added up.",
    ),
}
PLANNED = ("head_damage", "qk_unit_damage", "v_unit_damage")
CACHED = ("k_bit_damage", "v_bit_damage", "kv_bit_damage")  # of layers whose cache can be packed
SHARED = ("shared_k_damage", "shared_v_damage")  # of layers with key/value heads that can be merged
ABSORBED = ("positions_free", "positions_lost", "absorbed_pair_damage", "absorbed_latent_damage")  # asked for
BLOCKS = ("left_out", "flattened")  # of models with one list of blocks
MLP = ("mlp_damage",)  # of layers whose block has one that can be cut
SAMPLED = ("numerical_rank", "effective_rank", "stable_rank", "conditioning")  # not on every length, or on none
HOLED = {"qk_damage": "dim", **dict.fromkeys(SAMPLED, "length")}  # the axis along which values may be missing


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What was measured of one attention layer. ``values`` holds quantities by name, as `QUANTITIES` defines them.

    ``widths`` are the widths of the ``width`` axis for queries and keys, ``v_widths`` for values. ``samples`` are the
    tokens that its queries were measured on (0: not known).
    """

    path: str
    causal: bool
    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    v_widths: tuple[int, ...]
    values: Mapping[str, Any]
    samples: int = 0

    def check(self, layer: LayerShape, maps: bool, where: str) -> None:
        """Raise where a quantity is missing, or its lists are not as long as ``layer`` says, or not finite numbers."""
        values = Reader(self.values, f"{where}, values")
        values.only(*QUANTITIES)
        needed = [name for name in (QUANTITIES if maps else PLANNED) if self.values and self._measured(name, layer)]
        for name in (*needed, *(name for name in self.values if name not in needed)):
            axes = QUANTITIES[name].axes
            holes = axes.index(HOLED[name]) if name in HOLED else None
            counted = ("damage", "spectrum", "dims", "pairs", *BLOCKS, *ABSORBED)
            least = 0.0 if name.endswith(counted) else -LARGEST
            values.child(name).nested([self._length(axis, name, layer) for axis in axes], least, holes)
        if "twin" in self.values:
            values.child("twin").integers(0, layer.heads - 1)

    def _measured(self, name: str, layer: LayerShape) -> bool:
        """Whether a whole profile has ``name`` of this layer."""
        if name == "jacobian_exponent":
            return len(self.lengths) > 1
        optional = (*SAMPLED, *CACHED, *SHARED, *ABSORBED, *MLP, *BLOCKS)
        return bool(layer.rotary) if name.startswith("rope") else name not in optional

    def _length(self, axis: str, name: str, layer: LayerShape) -> int | None:
        """How long lists along ``axis`` are; None where any length will do."""
        if name in CACHED:
            layer = layer.cached
        widths, full, units = self.widths, layer.qk_dim, layer.units
        if name.startswith("v"):
            widths, full, units = self.v_widths, layer.v_dim, layer.v_dim
        lengths = {
            "head": layer.heads,
            "group": layer.kv_heads,
            "cached head": layer.kv_heads,
            "share": len(SHARES),
            "length": len(self.lengths),
            "width": len(widths),
            "pair": layer.rotary // 2,
            "unit": units,
            "coordinate": full,
            "value group": layer.value_groups,
            "value coordinate": layer.value_group_width,
            "joint coordinate": layer.joint_group_width,
            "pair coordinate": layer.kv_heads * layer.rotary // 2 // layer.value_groups,
            "dim": full + 1,
            "size": len(layer.joinable),
            "shared unit": layer.kv_heads * layer.units,
            "shared value": layer.kv_heads * layer.v_dim,
            "sixty-fourth": MLP_PARTS + 1,
            "part": len(PARTS),
        }
        return lengths.get(axis)


@dataclass(frozen=True, slots=True)
class Check:
    """Prediction against truth: a plan's loss increase in nats per output as predicted, and as its model measured it.

    The model is refitted and measured on inputs that were not calibrated on. ``parts``: by kind of text and position.
    ``agreement`` is the mean cosine of embeddings, of models without a head. ``rounded``: the plan rounds the cache.
    """

    predicted: float
    measured: float
    parts: Mapping[str, float] = field(default_factory=dict)
    agreement: float | None = None
    rounded: bool = False

    @classmethod
    def read(cls, row: Reader) -> Check:
        """A check out of a JSON file."""
        row.only(*(item.name for item in fields(cls)))
        parts = {name: row.child("parts").number(name) for name in row.mapping("parts")}
        agreement = row.number("agreement") if row.has("agreement") else None
        rounded = row.has("rounded") and row.flag("rounded")
        return cls(row.number("predicted"), row.number("measured"), parts, agreement, rounded)


@dataclass(frozen=True, slots=True)
class Profile(Shown):
    """A measured model: its shape, its layers, and what they were measured on and with; ``checks`` of a few plans."""

    model: Mapping[str, Any]
    shape: ModelShape
    text: Mapping[str, Any]
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    layers: tuple[LayerProfile, ...]
    inputs_hash: str = ""
    notes: tuple[str, ...] = field(default=())
    checks: tuple[Check, ...] = field(default=())

    @property
    def fingerprint(self) -> str:
        """What tells the weights of the model from others; "" in files of earlier versions."""
        return str(self.model.get("fingerprint", ""))

    def save(self, path: Path) -> None:
        """Write this profile as JSON, with the definition of every quantity, whole or not at all."""
        body = asdict(self)
        body["definitions"] = {name: asdict(quantity) for name, quantity in QUANTITIES.items()}
        write_record(path, KIND, VERSION, body, indent=None)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile; a damaged or foreign file raises an `InputError` that says what was expected and found."""
        reader = read_record(path, KIND, VERSION)
        reader.only("headwise", "version", "definitions", *(item.name for item in fields(cls)))
        reader.child("model").text("source")
        reader.child("settings").integer("tokens", least=1)
        checks = reader.rows("checks") if reader.has("checks") else []
        if reader.integer("version") == 1:
            checks = []  # pairs measured on the calibration text itself promise nothing
        profile = cls(
            model=reader.mapping("model"),
            shape=ModelShape.read(reader.child("shape")),
            text=reader.mapping("text"),
            settings=reader.mapping("settings"),
            versions=reader.mapping("versions"),
            layers=tuple(_read_layer(row) for row in reader.rows("layers")),
            inputs_hash=reader.text("inputs_hash"),
            notes=reader.texts("notes"),
            checks=tuple(Check.read(row) for row in checks),
        )
        profile.check(f"{path}")
        return profile

    @property
    def maps(self) -> bool:
        """Whether attention maps were looked at, and not only what planning needs."""
        return self.settings.get("maps") is True

    def check(self, where: str) -> None:
        """Raise an `InputError` where the layers are not those of the shape, or not measured as they should be."""
        if len(self.layers) != len(self.shape.layers):
            raise InputError(
                f"{where}: {len(self.layers)} layers are measured, the model has {len(self.shape.layers)}."
            )
        for number, (measured, layer) in enumerate(zip(self.layers, self.shape.layers, strict=True)):
            measured.check(layer, self.maps, f"{where}, layers {number}")
        for number, check in enumerate(self.checks):
            Check.read(Reader(asdict(check), f"{where}, checks {number}"))


def rounded(numbers: Any) -> Any:
    """Nested lists with numbers of five digits, which is more than any of them is worth."""
    if isinstance(numbers, list):
        return [rounded(number) for number in numbers]
    return float(f"{numbers:.{DIGITS}g}") if isinstance(numbers, float) else numbers


def _read_layer(row: Reader) -> LayerProfile:
    row.only(*(item.name for item in fields(LayerProfile)))
    return LayerProfile(
        path=row.text("path"),
        causal=row.flag("causal"),
        lengths=row.child("lengths").integers(least=1),
        widths=row.child("widths").integers(least=1),
        v_widths=row.child("v_widths").integers(least=1),
        values=row.mapping("values"),
        samples=row.integer("samples", least=0) if row.has("samples") else 0,
    )
