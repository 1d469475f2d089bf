"""Whisper: an encoder-decoder with cross attention; no bias on the keys."""

from headwise.families.family import Family, Stack

FAMILY = Family(
    name="whisper",
    model_types=("whisper",),
    stacks=(
        Stack(
            "encoder.layers",
            attention="self_attn",
            out="self_attn.out_proj",
            norms=("self_attn_layer_norm",),
            cache="none",
        ),
        Stack("decoder.layers", attention="self_attn", out="self_attn.out_proj", norms=("self_attn_layer_norm",)),
        Stack(
            "decoder.layers",
            attention="encoder_attn",
            out="encoder_attn.out_proj",
            norms=("encoder_attn_layer_norm",),
            cache="source",
        ),
    ),
    positions="learned",
)
