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
    stretches = ["tokens 1 to 64", "tokens 65 to 256", "tokens 257 to 512", "tokens 513 to 1,024"]
    assert list(table) == ["prose", "chat", *stretches]
    assert parts.mean("prose") == pytest.approx(prose.mean().item())
    assert parts.mean() == pytest.approx((prose.sum() + chat.sum()).item() / (prose.numel() + chat.numel()))
    later = torch.cat((prose[:, 512:].flatten(), chat[:, 512:].flatten()))
    assert table["tokens 513 to 1,024"] == (pytest.approx(later.mean().item()), later.numel())


def test_one_kind_and_one_stretch_are_no_parts():
    parts = Parts()
    parts.add("prose", torch.ones(1, 40), torch.tensor([[1] * 10 + [0] * 30]))
    assert parts.table() == {} and parts.mean() == 1 and Parts().mean() is None


def test_the_error_is_over_windows_not_over_tokens():
    """Windows that are alike inside and differ from one another: as many tokens more would not help."""
    parts, level = Parts(), torch.tensor([[1.0], [2.0], [4.0]])
    parts.add("prose", level.expand(3, 40))
    mean = parts.of("prose")
    assert mean.value == pytest.approx(7 / 3) and mean.tokens == 120
    assert mean.error == pytest.approx(level.std().item() / 3**0.5)
    short = Parts()
    short.add("prose", level.expand(3, 40), torch.tensor([[1] * 40, [1] * 40, [1] * 20 + [0] * 20]))
    value = (40 + 80 + 80) / 100
    squares = (40 - 40 * value) ** 2 + (80 - 40 * value) ** 2 + (80 - 20 * value) ** 2
    assert short.of().value == pytest.approx(value)
    assert short.of().error == pytest.approx((squares * 3 / 2) ** 0.5 / 100)
    one = Parts()
    one.add("prose", torch.ones(1, 8))
    assert one.of().error is None
