"""A small input that any model of the known families accepts, for checks that need some input, not a meaningful one."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def example_inputs(model: PreTrainedModel, tokens: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Two rows of random tokens, images or sound features."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    if model.main_input_name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.rand(2, config.num_channels, height, width, generator=generator)
        return {"pixel_values": pixels.to(model.device, model.dtype)}
    tokens = min(tokens, getattr(config, "max_position_embeddings", tokens))
    ids = torch.randint(config.vocab_size // 2, config.vocab_size, (2, tokens), generator=generator).to(model.device)
    if model.main_input_name == "input_features":
        sound = torch.rand(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        return {"input_features": sound.to(model.device, model.dtype), "decoder_input_ids": ids}
    return {"input_ids": ids}
