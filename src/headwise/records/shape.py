"""What an attention stack looks like, as plain numbers.

Letters used across the package (capital suffixes on tensor names):
  B batch   T tokens   D model width   H query heads   G key/value heads
  K query/key width of one head        V value width of one head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, get_args

from headwise.files.errors import InputError
from headwise.files.reading import Reader
from headwise.records.packing import RECENT, Packed

Cache = Literal["tokens", "source", "none"]
Norm = Literal["none", "shared", "per-head", "affine"]
BIASES = "qkvo"
DIMS = ("heads", "kv_heads", "qk_dim", "v_dim")
Dims = tuple[int, int, int, int]
GROUP_QUERIES, GROUP_WIDTH = 12, 384  # of heads whose values share coordinates, at most


@dataclass(frozen=True, slots=True)
class Latent:
    """Widths of multi-head latent attention (MLA): what is cached instead of heads, and what queries pass through."""

    kv_rank: int
    rope_dim: int
    q_rank: int | None = None

    @classmethod
    def read(cls, row: Reader) -> Latent:
        """These widths out of a JSON file."""
        row.only(*(item.name for item in fields(cls)))
        q_rank = row.integer("q_rank", least=1) if row.has("q_rank") else None
        return cls(row.integer("kv_rank", least=1), row.integer("rope_dim", least=0), q_rank)


@dataclass(frozen=True, slots=True)
class AbsorbedShape:
    """What a layer caches that reads its cache without rebuilding keys and values.

    Each block of ``joined`` key/value heads caches ``pairs`` RoPE pairs, mixed across its heads, and one latent of
    ``rank`` numbers without a position, for its values and for everything of its keys that RoPE does not turn.
    """

    joined: int
    pairs: int
    rank: int

    @property
    def width(self) -> int:
        """Numbers that a block caches for one token."""
        return 2 * self.pairs + self.rank

    @classmethod
    def read(cls, row: Reader) -> AbsorbedShape:
        """These widths out of a JSON file."""
        row.only(*(item.name for item in fields(cls)))
        return cls(row.integer("joined", least=1), row.integer("pairs", least=0), row.integer("rank", least=1))


@dataclass(frozen=True, slots=True)
class MlpShape:
    """The MLP of a block: its ``channels``, what one of them has, and what leaves with the last one.

    ``matmul`` counts the weights of one channel, ``parameters`` also its biases; ``own`` the parameters of norms that
    serve this MLP alone and of the bias behind it.
    """

    channels: int
    matmul: int
    parameters: int
    own: int = 0

    @classmethod
    def read(cls, row: Reader) -> MlpShape:
        """These counts out of a JSON file."""
        names = [item.name for item in fields(cls)]
        row.only(*names)
        return cls(*(row.integer(name, least=0 if name == "own" else 1) for name in names))


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer and the rest of its block. ``heads == 0`` means the attention is removed.

    ``rotary`` counts the coordinates of a head that RoPE turns (0 without RoPE), ``window`` the keys a query may see,
    ``biases`` names the projections of q, k, v, o that have one. ``norm`` tells of norms on queries and keys: one
    weight per dimension for all heads ("shared"), for each head ("per-head"), or weights and biases ("affine", which
    cannot be cut). ``cache`` says what fills the KV cache: every token (decoders), the source once (cross attention),
    nothing (encoders). ``own_norm`` counts the parameters of norms that serve this attention alone and leave with it;
    ``rest_parameters`` and ``rest_matmul`` belong to the rest of the block (MLP, other norms), of which ``mlp`` tells
    the part that can be cut (None: nothing). ``packed`` tells of a cache that holds rounded numbers, ``absorbed`` of
    one that holds neither keys nor values: widths are then those of the keys and values that it stands for.
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    rotary: int = 0
    window: int | None = None
    latent: Latent | None = None
    cache: Cache = "tokens"
    biases: str = ""
    norm: Norm = "none"
    own_norm: int = 0
    rest_parameters: int = 0
    rest_matmul: int = 0
    packed: Packed | None = None
    mlp: MlpShape | None = None
    absorbed: AbsorbedShape | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "qk_dim", "v_dim", "rotary"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}: a width or count cannot be negative.")
        mlp = self.mlp
        if mlp is not None and (
            mlp.channels * mlp.parameters + mlp.own > self.rest_parameters
            or mlp.channels * mlp.matmul > self.rest_matmul
        ):
            raise InputError(f"An MLP of {mlp.channels} channels has more parameters than the block around it.")
        if not self.heads:
            return
        if not (self.kv_heads and self.qk_dim and self.v_dim):
            raise InputError(f"A layer with {self.heads} heads needs kv_heads, qk_dim and v_dim of at least 1.")
        if self.heads % self.kv_heads:
            raise InputError(f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly.")
        if self.rotary > self.qk_dim:
            raise InputError(f"{self.rotary} coordinates cannot be rotary in heads of width {self.qk_dim}.")
        if self.rotary % 2:
            raise InputError(f"{self.rotary} coordinates cannot be rotary: an odd rotary width cuts a pair in half.")
        if self.absorbed and self.kv_heads % self.absorbed.joined:
            raise InputError(f"{self.kv_heads} key/value heads make no blocks of {self.absorbed.joined}.")

    @classmethod
    def read(cls, row: Reader) -> LayerShape:
        """A layer out of a JSON file."""
        row.only(*(item.name for item in fields(cls)))
        counts = ("heads", "kv_heads", "qk_dim", "v_dim", "rotary", "own_norm", "rest_parameters", "rest_matmul")
        biases = row.text("biases")
        if not set(biases) <= set(BIASES) or len(set(biases)) < len(biases):
            raise row.child("biases").error(f"expected letters of {BIASES!r}")
        values: dict[str, Any] = {
            **{name: row.integer(name, least=0) for name in counts},
            "window": row.integer("window", least=1) if row.has("window") else None,
            "latent": Latent.read(row.child("latent")) if row.has("latent") else None,
            "packed": Packed.read(row.child("packed")) if row.has("packed") else None,
            "mlp": MlpShape.read(row.child("mlp")) if row.has("mlp") else None,
            "absorbed": AbsorbedShape.read(row.child("absorbed")) if row.has("absorbed") else None,
            "cache": row.choice("cache", get_args(Cache)),
            "biases": biases,
            "norm": row.choice("norm", get_args(Norm)),
        }
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{row.where}: {error}") from None

    @property
    def dims(self) -> Dims:
        """Heads, key/value heads, query/key width and value width."""
        return self.heads, self.kv_heads, self.qk_dim, self.v_dim

    @property
    def units(self) -> int:
        """Units of the keys of one head, which are kept or cut one by one: RoPE pairs, then free directions."""
        return self.rotary // 2 + self.qk_dim - self.rotary

    @property
    def value_groups(self) -> int:
        """Groups of key/value heads whose values share coordinates in a packed cache: as large as stays fast."""
        sizes = (size for size in range(self.kv_heads, 1, -1) if not self.kv_heads % size)
        queries = self.heads // self.kv_heads if self.kv_heads else 0
        fast = (s for s in sizes if s * queries <= GROUP_QUERIES and s * self.v_dim <= GROUP_WIDTH)
        return self.kv_heads // next(fast, 1)

    @property
    def value_group_width(self) -> int:
        """Value coordinates of such a group."""
        return self.kv_heads * self.v_dim // self.value_groups if self.heads else 0

    @property
    def joint_group_width(self) -> int:
        """Coordinates of the keys and values of such a group together."""
        return self.kv_heads * (self.qk_dim + self.v_dim) // self.value_groups if self.heads else 0

    @property
    def joinable(self) -> tuple[int, ...]:
        """How many neighbouring key/value heads may be merged into one: those of a group of values, or fewer."""
        if not self.heads or self.latent or self.absorbed or self.norm != "none" or self.cache != "tokens":
            return ()
        group = self.kv_heads // self.value_groups
        return tuple(size for size in range(2, group + 1) if not group % size)

    @property
    def cached(self) -> LayerShape:
        """The layer whose keys before RoPE and values are what this one caches.

        Latent attention caches one head: the key that all heads share, and the latent in the place of values.
        """
        if not self.latent:
            return self
        widths = {"qk_dim": self.latent.rope_dim, "v_dim": self.latent.kv_rank, "rotary": self.latent.rope_dim}
        return replace(self, heads=1, kv_heads=1, latent=None, **widths)

    @property
    def cached_per_token(self) -> int:
        """Numbers the KV cache keeps for one token of this layer."""
        if self.cache == "none" or not self.heads:
            return 0
        if self.latent:
            return self.latent.kv_rank + self.latent.rope_dim
        return self.kv_width

    @property
    def kv_width(self) -> int:
        """Numbers that come out of the projections of keys and values for one token."""
        if self.absorbed:
            return self.kv_heads // self.absorbed.joined * self.absorbed.width
        return self.kv_heads * (self.qk_dim + self.v_dim)

    @property
    def reading(self) -> int:
        """Weights by which a key/value head reads what its block caches; of queries those that are multiplied."""
        if not self.absorbed:
            return 0
        return self.absorbed.rank * (self.qk_dim - self.rotary + self.v_dim)

    def with_channels(self, channels: int) -> LayerShape:
        """This layer with an MLP of so many channels; 0: without one."""
        mlp = self.mlp
        if mlp is None:
            return self
        lost, own = mlp.channels - channels, 0 if channels else mlp.own
        return replace(
            self,
            rest_parameters=self.rest_parameters - lost * mlp.parameters - own,
            rest_matmul=self.rest_matmul - lost * mlp.matmul,
            mlp=replace(mlp, channels=channels) if channels else None,
        )

    def token_bytes(self, bytes_each: int) -> int:
        """Bytes that one more token takes in the cache, with ``bytes_each`` for a number that is not rounded."""
        return self.cached_per_token * bytes_each if self.packed is None else self.packed.bytes_per_token

    def cache_bytes(self, tokens: int, batch: int, bytes_each: int) -> int:
        """Bytes of the cache of ``batch`` sequences of so many cached ``tokens``."""
        if self.packed is None:
            return self.cached_per_token * bytes_each * tokens * batch
        recent = tokens % RECENT
        whole = (min(tokens, self.packed.whole) + recent) * self.cached_per_token * bytes_each
        return self.packed.level_bytes + batch * ((tokens - recent) * self.packed.bytes_per_token + whole)

    def cached_tokens(self, context: int, source: int = 0) -> int:
        """Tokens this layer's cache holds after ``context`` tokens; a window keeps one less than it shows."""
        if self.cache == "source":
            return source
        return context if self.window is None else min(context, self.window - 1)

    def matmul_weights(self, width: int) -> int:
        """Weights every token is multiplied with in this attention (biases and norms apart)."""
        if self.latent:
            queries = (
                width * self.heads * self.qk_dim
                if self.latent.q_rank is None
                else self.latent.q_rank * (width + self.heads * self.qk_dim)
            )
            down = width * (self.latent.kv_rank + self.latent.rope_dim)
            return queries + down + self.latent_expansion + self.heads * self.v_dim * width
        return width * (self.heads * (self.qk_dim + self.v_dim) + self.kv_width)

    @property
    def latent_expansion(self) -> int:
        """Weights of the MLA matrix that turns one cached latent into keys and values of every head."""
        if not self.latent or not self.heads:
            return 0
        return self.latent.kv_rank * self.heads * (self.qk_dim - self.latent.rope_dim + self.v_dim)

    def parameters(self, width: int) -> int:
        """All parameters of the attention: projections, biases, norms on queries, keys and latents."""
        if not self.heads:
            return 0
        if self.latent:
            q_rank = self.latent.q_rank or 0
            bias_sizes = {"q": q_rank, "k": self.latent.kv_rank + self.latent.rope_dim, "v": 0, "o": width}
            norms = q_rank + self.latent.kv_rank
        else:
            bias_sizes = {
                "q": self.heads * self.qk_dim,
                "k": self.kv_heads * self.qk_dim,
                "v": self.kv_heads * self.v_dim,
                "o": width,
            }
            if self.absorbed:
                blocks = self.kv_heads // self.absorbed.joined
                bias_sizes |= {"k": 2 * blocks * self.absorbed.pairs, "v": blocks * self.absorbed.rank}
            copies = {"none": 0, "shared": 2, "per-head": self.heads + self.kv_heads, "affine": 4}
            norms = copies[self.norm] * self.qk_dim
        maps = self.kv_heads * (self.reading + 2 * self.absorbed.pairs + self.v_dim) if self.absorbed else 0
        return self.matmul_weights(width) + sum(bias_sizes[name] for name in self.biases) + norms + maps


class Reshaping(Protocol):
    """What says of every layer of a model what becomes of it: a plan."""

    def check(self, shape: ModelShape) -> None:
        """Raise where it was made for another model."""

    def after(self, shape: ModelShape) -> Sequence[LayerShape | None]:
        """Each layer as it comes out; None: its block is dropped or joined to another."""
        ...


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole model: its attention layers in order and everything around them.

    ``outside_matmul`` weights outside the blocks meet every token that comes out (the vocabulary head),
    ``input_matmul`` ones every token that goes in (patches, sound frames). ``source_tokens`` is the fixed input length
    of an encoder-decoder, ``max_tokens`` the longest text (or image) the model was made for.
    """

    family: str
    width: int
    layers: tuple[LayerShape, ...]
    outside_parameters: int
    outside_matmul: int
    input_matmul: int = 0
    source_tokens: int = 0
    max_tokens: int = 0

    @classmethod
    def read(cls, reader: Reader) -> ModelShape:
        """A model out of a JSON file."""
        reader.only(*(item.name for item in fields(cls)))
        layers = tuple(LayerShape.read(row) for row in reader.rows("layers"))
        if not layers:
            raise reader.child("layers").error("expected at least one layer")
        counts = ("outside_parameters", "outside_matmul", "input_matmul", "source_tokens", "max_tokens")
        rest = {name: reader.integer(name, least=0) for name in counts}
        return cls(reader.text("family"), reader.integer("width", least=1), layers, **rest)

    def attention_parameters(self) -> int:
        """Parameters of all attention layers."""
        return sum(layer.parameters(self.width) for layer in self.layers)

    def total_parameters(self) -> int:
        """Parameters of the whole model, tied weights counted once."""
        blocks = sum(layer.own_norm + layer.rest_parameters for layer in self.layers)
        return self.outside_parameters + self.attention_parameters() + blocks

    def block_parameters(self) -> int:
        """Parameters of all blocks: everything but embeddings, the last norm and the head."""
        return self.total_parameters() - self.outside_parameters

    def self_attention(self) -> list[int]:
        """Numbers of the layers of which one must keep its attention: the decoder's, or else the encoder's.

        transformers reads the number of past tokens from the cache of self attention.
        """
        decoder = [i for i, layer in enumerate(self.layers) if layer.cache == "tokens"]
        return decoder or [i for i, layer in enumerate(self.layers) if layer.cache == "none"]

    def as_known_to(self, measured: ModelShape) -> ModelShape:
        """This shape without the MLPs that ``measured``, written by an earlier version, does not tell of."""
        if any(layer.mlp is not None for layer in measured.layers):
            return self
        return replace(self, layers=tuple(replace(layer, mlp=None) for layer in self.layers))

    def planned(self, plan: Reshaping) -> ModelShape:
        """The shape of this model after ``plan``; raises where the plan was made for another model."""
        plan.check(self)
        return replace(self, layers=tuple(layer for layer in plan.after(self) if layer is not None))
