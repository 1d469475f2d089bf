import math

import numpy as np
import pytest

from headwise.theory.conditioning import (
    attention_jacobian_bound,
    gaussian_condition,
    heads_jacobian_condition,
    worst_head_count,
)


@pytest.mark.parametrize(("tokens", "width"), [(197, 768), (197, 1024), (1024, 576), (64, 576)])
def test_gaussian_matrices_are_conditioned_as_predicted(tokens, width):
    random = np.random.default_rng(0)
    measured = np.median([np.linalg.cond(random.standard_normal((tokens, width))) for _ in range(5)])
    assert gaussian_condition(tokens, width) == pytest.approx(measured, rel=0.1)


def test_the_pole_is_that_of_a_square_matrix():
    random = np.random.default_rng(0)
    measured = np.exp(np.mean([np.log(np.linalg.cond(random.standard_normal((64, 64)))) for _ in range(300)]))
    assert gaussian_condition(64, 64) == pytest.approx(measured, rel=0.25)
    assert gaussian_condition(577, 576) == gaussian_condition(576, 577) <= 4.65 * 576


@pytest.mark.parametrize(
    ("tokens", "head_dim", "measured"),
    [
        (197, 64, {12: 3.04, 16: 2.51, 24: 2.05, 32: 1.88, 64: 1.55, 256: 1.24}),
        (2048, 32, {1: 1.28, 2: 1.40, 4: 1.64, 8: 2.04, 32: 5.8, 96: 9.9, 256: 3.0}),
    ],
)
def test_values_of_the_notes(tokens, head_dim, measured):
    for heads, condition in measured.items():
        assert gaussian_condition(tokens, heads * head_dim) == pytest.approx(condition, rel=0.05)


def test_more_heads_condition_worse_up_to_the_pole():
    numbers = [gaussian_condition(2048, heads * 32) for heads in range(1, 200)]
    assert 1 + int(np.argmax(numbers)) == worst_head_count(2048, 32) == 64
    assert numbers[:64] == sorted(numbers[:64])
    assert numbers[63:] == sorted(numbers[63:], reverse=True)


@pytest.mark.parametrize(("heads", "columns"), [(100, 6), (400, 2), (1000, 1)])
def test_independent_heads_condition_their_jacobian(heads, columns):
    random = np.random.default_rng(0)
    frames, _ = np.linalg.qr(random.standard_normal((20, heads, 6, columns)))
    jacobians = frames.transpose(0, 2, 1, 3).reshape(20, 6, heads * columns)
    bound = heads_jacobian_condition(heads, 6, spread=6 / columns)
    assert np.linalg.cond(jacobians).max() <= bound < 2


def test_few_heads_promise_nothing():
    assert heads_jacobian_condition(8, 64, spread=1) == math.inf
    assert heads_jacobian_condition(10**6, 64, spread=1) == pytest.approx(1, abs=0.01)


def test_bound_from_the_parts_of_attention():
    parts = {"inputs": 2, "queries": 3, "keys": 5, "values": 7, "softmax": 11, "softmax_slope": 13}
    assert attention_jacobian_bound(**parts) == 8 * 13 * 7 * (3 + 5) + 2 * 11
