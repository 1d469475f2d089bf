"""Scores taken apart by kind of text and by position."""

import pytest
import torch

from headwise.tracing.parts import Parts


def test_parts_add_up_to_the_whole():
    parts = Parts()
    prose, chat = torch.rand(2, 1024), torch.rand(1, 600)
    parts.add("prose", prose)
    parts.add("chat", chat, torch.ones_like(chat))
    table = parts.table()
    assert list(table) == ["prose", "chat", "tokens 1 to 512", "tokens 513 to 1,024"]
    assert parts.mean("prose") == pytest.approx(prose.mean().item())
    assert parts.mean() == pytest.approx((prose.sum() + chat.sum()).item() / (prose.numel() + chat.numel()))
    later = torch.cat((prose[:, 512:].flatten(), chat[:, 512:].flatten()))
    assert table["tokens 513 to 1,024"] == (pytest.approx(later.mean().item()), later.numel())


def test_one_kind_and_one_stretch_are_no_parts():
    parts = Parts()
    parts.add("prose", torch.ones(1, 40), torch.tensor([[1] * 10 + [0] * 30]))
    assert parts.table() == {} and parts.mean() == 1 and Parts().mean() is None
