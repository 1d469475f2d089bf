"""Transformers whose attention layers differ in heads and widths, or have none.

This file needs only those beside it: headwise copies them beside the weights of a reduced model, and ``auto_map`` in
config.json points here, so the model opens with ``trust_remote_code=True`` where headwise is not installed.

A reduced model is the stock class of its family with the attention modules exchanged; nothing else of the family's
code is copied. ``config.headwise`` says where each attention module sits and what shape it has; every name
``Headwise<StockClass>`` of this module is that stock class, reduced.

Letters: B batch, T tokens, D width, H query heads, G key/value heads, K key width, V value width, P rotary pairs.
"""

import copy
import functools
from contextlib import contextmanager

import torch
import torch.nn.functional as F
import transformers
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .absorbed_attention import AbsorbedAttention, NoPairs, attention_weights
from .cache import TakesPackedCache

PREFIX = "Headwise"
PADS = ("vllm",)  # backends that pad values to the width of queries by themselves
AUTO_CLASSES = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "AutoModelForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "AutoModelForNextSentencePrediction": "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES",
    "AutoModelForMaskedImageModeling": "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES",
    "AutoModelForPreTraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
}


def grouped_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None, **kwargs):
    """Attention in plain matrix products for any widths; keys and values are shared by a group without being copied."""
    B, H, T, K = query.shape
    G, S = key.shape[1:3]
    logits = query.reshape(B, G, H // G * T, K) @ key.transpose(-1, -2) * scaling
    logits = logits.view(B, H, T, S)
    weights = attention_weights(module, logits, attention_mask, query.dtype, dropout, softcap)
    output = (weights.view(B, G, H // G * T, S) @ value).view(B, H, T, value.shape[-1])
    return output.transpose(1, 2).contiguous(), weights


grouped_attention.any_width = True  # backends without this mark get queries, keys and values of one width


def padded_attention(backend, module, query, key, value, attention_mask, **kwargs):
    """Any backend on unequal widths: zero columns change neither logits nor sums, so padding to one width is exact."""
    K, V = query.shape[-1], value.shape[-1]
    width = -(-max(K, V) // 8) * 8
    query, key = F.pad(query, (0, width - K)), F.pad(key, (0, width - K))
    output, weights = backend(module, query, key, F.pad(value, (0, width - V)), attention_mask, **kwargs)
    return output[..., :V], weights


def rotate(x, cos, sin):
    """Turn the leading ``2P`` coordinates of ``x``; pair ``p`` is made of coordinates ``p`` and ``p + P``."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class ReducedAttention:
    """Forward pass of an attention module whose widths are its own. Mixed into the stock attention class."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_embeddings=None,
        past_key_values=None,
        layer_past=None,
        key_value_states=None,
        encoder_hidden_states=None,
        **kwargs,
    ):
        cache, cached = self._cache(past_key_values if layer_past is None else layer_past, key_value_states)
        q_BHTK = self._split(self.q, hidden_states, self.heads)
        if cached is None:
            source = hidden_states if key_value_states is None else key_value_states
            k_BGTK = self._split(self.k, source, self.cached_heads)
            v_BGTV = self._split(self.v, source, self.cached_heads)
            if self.norms:
                q_BHTK, k_BGTK = (getattr(self, name)(x) for name, x in zip(self.norms, (q_BHTK, k_BGTK)))
            if position_embeddings is not None:
                q_BHTK, k_BGTK = self._rotate(q_BHTK, k_BGTK, *position_embeddings)
            if cache is not None:
                k_BGTK, v_BGTV = self._store(cache, k_BGTK, v_BGTV)
        else:  # cross attention of families without norms and rotations on queries
            k_BGTK, v_BGTV = cached

        if self.softcap is not None:
            kwargs["softcap"] = self.softcap
        # vLLM reads this source: it wants the interface looked up here, and called once, with the scale by name.
        backend = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(backend, grouped_attention)
        attend = self.fitting(attend, backend, q_BHTK, v_BGTV, attention_mask)
        out_BTHV, weights = attend(
            self,
            q_BHTK,
            k_BGTK,
            v_BGTV,
            attention_mask,
            scaling=self.scaling,
            sliding_window=self.window,
            dropout=self.dropout_rate if self.training else 0.0,
            **kwargs,
        )
        output = out_BTHV.reshape(*hidden_states.shape[:-1], -1)
        if self.out is not None:
            output = getattr(self, self.out)(output)
        if hasattr(self, "resid_dropout"):
            output = self.resid_dropout(output)
        return output, weights

    def __reduce_ex__(self, protocol):
        """Pickle and copy by the stock class: this one is made at run time."""
        classes = type(self).__mro__
        stock = classes[classes.index(ReducedAttention) + 1]
        return restore_attention, (stock, isinstance(self, AbsorbedAttention)), self.__dict__

    def _split(self, name, x_BTD, heads):
        return getattr(self, name)(x_BTD).unflatten(-1, (heads, -1)).transpose(1, 2)

    def _store(self, cache, k_BGTK, v_BGTV):
        return cache.update(k_BGTK, v_BGTV, self.layer_idx)

    def _rotate(self, q_BHTK, k_BGTK, cos, sin):
        if self.rope_pairs is None:
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
            return rotate(q_BHTK, cos, sin), rotate(k_BGTK, cos, sin)
        # Each key/value head keeps its own pairs, and so do the query heads that read it.
        cos, sin = (t[..., self.rope_pairs].transpose(1, 2) for t in (cos, sin))
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
        grouped = q_BHTK.unflatten(1, (self.kv_heads, -1))
        return rotate(grouped, cos.unsqueeze(2), sin.unsqueeze(2)).flatten(1, 2), rotate(k_BGTK, cos, sin)

    def _cache(self, cache, key_value_states):
        """The cache to write to, and the keys and values it already holds of a source that does not change."""
        if not isinstance(cache, EncoderDecoderCache):
            return cache, None
        if key_value_states is None:
            return cache.self_attention_cache, None
        if cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            return None, (layer.keys, layer.values)
        cache.is_updated[self.layer_idx] = True
        return cache.cross_attention_cache, None

    def attend_by(self, backend, query, key, value, attention_mask, **kwargs):
        """What ``backend`` makes of queries, keys and values of any widths."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(backend, grouped_attention)
        attend = self.fitting(attend, backend, query, value, attention_mask)
        return attend(self, query, key, value, attention_mask, **kwargs)

    def fitting(self, attend, backend, query, value, attention_mask):
        """``attend``, the function of ``backend``, as it can take queries and values of these widths."""
        if query.shape[-1] == value.shape[-1] or backend in PADS or getattr(attend, "any_width", False):
            return attend
        if query.shape[2] == 1 and backend == "sdpa":
            # One query: padding would copy the whole cache, and the fused kernel has nothing to win.
            return grouped_attention
        return functools.partial(padded_attention, attend)


class NoAttention(nn.Module):
    """What stands where attention was removed: adds nothing to the residual stream."""

    def forward(self, hidden_states, *args, **kwargs):
        return torch.zeros_like(hidden_states), None


class NoMlp(nn.Module):
    """What stands where an MLP, or its last projection, was removed."""

    def forward(self, hidden_states, *args, **kwargs):
        return torch.zeros_like(hidden_states)


def install(model, config):
    """Exchange the attention modules and MLPs of a stock ``model`` for those ``config.headwise`` describes."""
    spec = config.headwise
    base = model.base_model
    for layer in spec["layers"]:
        if "mlp" in layer:
            resize_mlp(base, layer["mlp"])
        if isinstance(base.get_submodule(layer["attention"]), (ReducedAttention, NoAttention)):
            continue  # task heads shared by many families build their base from the config: it is reduced already
        if layer["heads"]:
            reduce_attention(base, layer, spec["names"])
        else:
            remove_attention(base, layer)


def remove_attention(base, layer):
    """Take away the attention of a layer, and with it the norms that nothing else reads."""
    base.set_submodule(layer["attention"], NoAttention())
    for path in layer["norms"]:
        base.set_submodule(path, nn.Identity())
    if not layer["out"].startswith(layer["attention"] + "."):
        base.set_submodule(layer["out"], nn.Identity())


def reduce_attention(base, layer, names):
    """Turn one stock attention module into a `ReducedAttention` of the shape that ``layer`` gives."""
    module = base.get_submodule(layer["attention"])
    heads, kv_heads, qk_dim, v_dim = (layer[name] for name in ("heads", "kv_heads", "qk_dim", "v_dim"))
    out = base.get_submodule(layer["out"])
    width = out.nf if hasattr(out, "nf") else out.out_features
    sizes = {"q": heads * qk_dim, "k": kv_heads * qk_dim, "v": kv_heads * v_dim}
    absorbed = layer.get("absorbed")
    if absorbed is not None:
        blocks = kv_heads // absorbed["joined"]
        sizes |= {"k": 2 * blocks * absorbed["pairs"], "v": blocks * absorbed["rank"]}
    fused = names.get("fused")
    for name, size in sizes.items():
        stock = getattr(module, fused or names[name])
        setattr(module, names[name], nn.Linear(width, size, bias=stock.bias is not None) if size else NoPairs())
    if fused:
        delattr(module, fused)
    base.set_submodule(layer["out"], nn.Linear(heads * v_dim, width, bias=out.bias is not None))

    norms = tuple(name for name in names.get("norms", ()) if hasattr(module, name))
    for name, count in zip(norms, (heads, kv_heads)):
        norm = getattr(module, name)
        if layer["norm"] == "per-head":  # heads that keep different coordinates weigh them differently
            norm.weight = nn.Parameter(norm.weight.new_ones(count, 1, qk_dim))
        elif norm.weight.shape[-1] != qk_dim:
            norm.weight = nn.Parameter(norm.weight.new_ones(qk_dim))

    dropout = next(getattr(module, n) for n in ("attention_dropout", "attn_dropout", "dropout") if hasattr(module, n))
    module.__class__ = reduced_attention(type(module), absorbed is not None)
    module.q, module.k, module.v = (names[name] for name in "qkv")
    inside = layer["attention"] + "."
    module.out = layer["out"].removeprefix(inside) if layer["out"].startswith(inside) else None
    module.heads, module.kv_heads, module.num_key_value_groups = heads, kv_heads, heads // kv_heads
    module.cached_heads = kv_heads
    module.head_dim, module.norms = qk_dim, norms
    module.dropout_rate = dropout.p if isinstance(dropout, nn.Module) else dropout
    module.softcap = getattr(module, "attn_logit_softcapping", None)
    module.window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
    module.scaling = layer["scale"]
    module.layer_idx = layer["slot"]
    pairs = layer["pairs"]
    module.register_buffer("rope_pairs", None if pairs is None else torch.zeros(kv_heads, pairs, dtype=torch.long))
    if absorbed is not None:
        module.absorb(absorbed, v_dim, pairs or 0)


def resize_mlp(base, mlp):
    """Give an MLP the number of channels that ``mlp`` says; without any, take it away with the norms only it reads."""
    channels, up, down = mlp["channels"], mlp["up"], mlp["down"]
    if not channels:
        if mlp["module"] is None:
            for path in up:
                base.set_submodule(path, nn.Identity())
        base.set_submodule(mlp["module"] or down, NoMlp())
        for path in mlp["norms"]:
            base.set_submodule(path, nn.Identity())
        return
    for path in up:
        old = base.get_submodule(path)
        width = old.nx if hasattr(old, "nx") else old.in_features
        base.set_submodule(path, nn.Linear(width, channels * (2 if mlp["fused"] else 1), bias=old.bias is not None))
    old = base.get_submodule(down)
    width = old.nf if hasattr(old, "nf") else old.out_features
    base.set_submodule(down, nn.Linear(channels, width, bias=old.bias is not None))


@functools.cache
def reduced_attention(stock, absorbed=False):
    """The class of a reduced attention module; still an instance of ``stock``, so that hooks on that class find it."""
    if absorbed:
        return type(f"Absorbed{stock.__name__}", (AbsorbedAttention, ReducedAttention, stock), {})
    return type(f"Reduced{stock.__name__}", (ReducedAttention, stock), {})


def restore_attention(stock, absorbed=False):
    """An empty reduced attention module, to be filled by pickle."""
    kind = reduced_attention(stock, absorbed)
    return kind.__new__(kind)


@contextmanager
def dense_view(config):
    """Let stock code read ``config`` as if all layers were alike."""
    spec = config.__dict__.pop("_heterogeneity_spec", None)
    try:
        yield
    finally:
        if spec is not None:
            config.__dict__["_heterogeneity_spec"] = spec


class ReducedModel(TakesPackedCache):
    """Mixed into a stock model class: builds the stock model, then exchanges its attention."""

    def __init__(self, config, *args, **kwargs):
        with dense_view(config):
            super().__init__(config, *args, **kwargs)
            dense = copy.copy(config)
        install(self, config)
        for module in self.modules():
            if hasattr(module, "compute_default_rope_parameters"):
                module.config = dense  # frequencies are those of the full head; each layer picks its pairs
        self.init_weights()


class ReducedConfig:
    """Mixed into a stock config class."""

    def to_dict(self):
        """The config with sizes under their common names too, for readers that do not know the family's own."""
        content = super().to_dict()
        common = {name: own for name, own in self.attribute_map.items() if own in content}
        return {**content, **{name: content[own] for name, own in common.items()}}

    def validate_architecture(self):
        """Stock models want heads to divide the width; reduced ones do not."""


class HeadwiseConfig(PreTrainedConfig):
    """Reads the config.json of any reduced model and gives the config class of its family."""

    model_type = "headwise"

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """The config of the family named in ``config_dict``; registers that family's classes with the auto classes."""
        family_config = reduced_config(config_dict["headwise"]["base"])
        return family_config.from_dict(config_dict, **kwargs)


def reduced_config(base):
    """The config class of reduced models of the family whose stock ``model_type`` is ``base``."""
    stock = CONFIG_MAPPING[base]
    name = PREFIX + stock.__name__
    if name not in globals():
        members = {"__module__": __name__, "model_type": HeadwiseConfig.model_type, "_auto_class": "AutoConfig"}
        checks = [check for check in dir(stock) if check.startswith("validate_") and not hasattr(ReducedConfig, check)]
        members |= {check: seen_dense(getattr(stock, check)) for check in checks}
        globals()[name] = strict(type(stock)(name, (ReducedConfig, stock), members))
        for auto_class, names in AUTO_CLASSES.items():
            stock_models = as_tuple(getattr(modeling_auto, names).get(base))
            models = tuple(reduced_model(each, globals()[name], auto_class) for each in stock_models)
            if models:
                # Several classes stand for one task in some families; the config's architecture then decides.
                choice = models[0] if len(models) == 1 else models
                getattr(transformers, auto_class).register(globals()[name], choice, exist_ok=True)
    return globals()[name]


def seen_dense(check):
    """A config check of a stock class, run as if all layers were alike."""

    def run(self):
        with dense_view(self):
            check(self)

    return run


def reduced_model(stock_name, config_class, auto_class):
    """The reduced form of the stock model class ``stock_name``."""
    name = PREFIX + stock_name
    if name not in globals():
        stock = getattr(transformers, stock_name)
        members = {"__module__": __name__, "config_class": config_class, "_auto_class": auto_class}
        globals()[name] = type(stock)(name, (ReducedModel, stock), members)
    return globals()[name]


def as_tuple(names):
    """Auto mappings hold a name, several names, or nothing."""
    return (names,) if isinstance(names, str) else tuple(names or ())


def __getattr__(name):
    """Make ``Headwise<StockClass>`` when it is asked for."""
    if name.startswith(PREFIX):
        stock = getattr(transformers, name.removeprefix(PREFIX), None)
        config_class = getattr(stock, "config_class", None) or stock
        base = getattr(config_class, "model_type", None)
        if base in CONFIG_MAPPING:
            reduced_config(base)
            if name in globals():
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
