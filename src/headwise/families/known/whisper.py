"""Whisper: an encoder-decoder with cross attention; no bias on the keys."""

from headwise.families.family import Family, Mlp, Stack

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
            mlp=Mlp("fc1", "fc2", norms=("final_layer_norm",), width="encoder_ffn_dim"),
        ),
        Stack(
            "decoder.layers",
            attention="self_attn",
            out="self_attn.out_proj",
            norms=("self_attn_layer_norm",),
            mlp=Mlp("fc1", "fc2", norms=("final_layer_norm",), width="decoder_ffn_dim"),
        ),
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
