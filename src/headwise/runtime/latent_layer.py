"""One layer of a packed cache for latent attention (MLA), which caches a latent and one rotary key for all heads.

Self-contained: it travels with a model. Models hand over the latent in the place of keys and the rotary key in that of
values; a packed layer wants what RoPE turns as keys, and maps values. What is read goes back unpacked at every step:
the model makes keys and values of all latents anew for every token anyway.
"""

from typing import Any

from .packed_layer import PackedLayer


class LatentLayer(PackedLayer):
    """Packed latents and rotary keys of one layer."""

    positions: Any = None
    mask: Any = None

    def update(self, key_states, value_states, *args, **kwargs):
        """Take new latents and rotary keys; returns all there are."""
        self.pending = value_states, key_states
        if not self.store(self.positions, self.mask):
            return key_states, value_states
        shared, latents = self.unpacked()
        return latents, shared


def latent_attention(model) -> dict[int, Any]:
    """The modules of ``model`` whose cache holds latents, by slot."""
    return {module.layer_idx: module for module in model.modules() if hasattr(module, "kv_a_proj_with_mqa")}


def let_tell(attention) -> None:
    """Let ``attention`` tell a packed cache that it is given where its tokens are, whenever it runs."""
    if tell not in attention._forward_pre_hooks.values():
        attention.register_forward_pre_hook(tell, with_kwargs=True)


def tell(attention, args, kwargs) -> None:
    """Hand positions and mask to the layer that is about to be updated; layers of other caches need neither."""
    layers = getattr(kwargs.get("past_key_values"), "layers", ())
    layer = layers[attention.layer_idx] if attention.layer_idx < len(layers) else None
    if isinstance(layer, LatentLayer):
        layer.positions, layer.mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
