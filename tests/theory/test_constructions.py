"""Hand-built models: their measured errors against the errors they promise."""

import math
from dataclasses import replace

import numpy as np
import pytest

from headwise.theory.constructions import (
    MaxNetwork,
    MemorisingHead,
    OneHeadPerLookUp,
    RetrievalTask,
    lookup_error_bound,
    sharpness_needed,
)

TOKENS, DIM, TEXTS = 64, 3, 40
SLOPE = 3.5  # of the sum in `combine`: 1 + 2 + 0.5


def distance(centre):
    """Squared distance, scaled into 0..1: one non-degenerate minimum, as the paper asks."""
    return lambda x: np.square(x - centre).mean(axis=-1)


def combine(z):
    return z @ np.array([1.0, -2.0, 0.5])


@pytest.fixture(scope="module")
def task():
    random = np.random.default_rng(0)
    subsets = np.zeros((3, TOKENS), dtype=bool)
    subsets[0, :16] = subsets[1, 10:40] = subsets[2] = True
    return RetrievalTask(tuple(distance(centre) for centre in random.random((3, DIM))), subsets, combine)


@pytest.fixture(scope="module")
def texts():
    return np.random.default_rng(1).random((TEXTS, TOKENS, DIM))


def test_the_task_itself(task, texts):
    values = [[f(text)[subset].min() for f, subset in zip(task.features, task.subsets)] for text in texts]
    assert task(texts) == pytest.approx(combine(np.array(values)))


@pytest.mark.parametrize("sharpness", [1, 10, 100, 1000])
def test_heads_are_within_their_bound(task, texts, sharpness):
    soft = OneHeadPerLookUp(task, sharpness).look_ups(texts)
    exact = np.where(task.subsets, task.values(texts), np.inf).min(axis=-1)
    bounds = [lookup_error_bound(TOKENS, int(subset.sum()), sharpness) for subset in task.subsets]
    assert (np.abs(soft - exact) <= bounds).all()
    assert (soft[:, 2] >= exact[:, 2]).all(), "without tokens outside, a soft minimum is no less than the minimum"


@pytest.mark.parametrize("error", [1.0, 0.1, 0.01])
def test_one_head_per_look_up_reaches_the_error_asked_for(task, texts, error):
    sharpness = sharpness_needed(TOKENS, 3, SLOPE, error)
    assert np.abs(OneHeadPerLookUp(task, sharpness)(texts) - task(texts)).max() <= error / 2
    for subset in (TOKENS // 4, TOKENS):
        assert SLOPE * 3 * lookup_error_bound(TOKENS, subset, sharpness) <= error / 2


def test_one_head_per_look_up_with_approximate_features(task, texts):
    error = 0.1
    off = error / (4 * SLOPE * 3)
    rough = tuple(lambda x, f=f: np.round(f(x) / (2 * off)) * 2 * off for f in task.features)
    model = OneHeadPerLookUp(replace(task, features=rough), sharpness_needed(TOKENS, 3, SLOPE, error))
    assert 0 < np.abs(model(texts) - task(texts)).max() <= error


def far_subset(value_inside):
    """A quarter of the tokens to search, all with ``value_inside``; the feature is 0 on all others."""
    subsets = np.arange(TOKENS)[None] < TOKENS // 4
    task = RetrievalTask((lambda x: x[..., 0],), subsets, lambda z: z[..., 0])
    return task, np.where(subsets[0], value_inside, 0.0)[None, :, None]


@pytest.mark.parametrize("sharpness", [10, 100, 10_000])
def test_the_papers_gate_fails_and_a_gate_of_two_does_not(sharpness):
    task, text = far_subset(1.0)
    papers = OneHeadPerLookUp(task, sharpness, gate=1.0)
    assert abs(papers(text) - 1) == pytest.approx(0.75)
    assert lookup_error_bound(TOKENS, TOKENS // 4, sharpness, gate=1.0) == math.inf
    assert abs(OneHeadPerLookUp(task, sharpness)(text) - 1) <= min(
        lookup_error_bound(TOKENS, TOKENS // 4, sharpness), TOKENS * math.exp(-sharpness) + 1e-12
    )


def test_a_head_may_fall_below_its_minimum():
    """The paper's lower end is 0; tokens outside the subset pull the head down, within the bound."""
    task, text = far_subset(1.0)
    short = OneHeadPerLookUp(task, 5.0)(text) - task(text)
    assert -lookup_error_bound(TOKENS, TOKENS // 4, 5.0) <= short < -1e-3


@pytest.mark.parametrize("error", [0.3, 0.1, 0.01])
def test_max_network(error):
    random = np.random.default_rng(2)
    values = np.concatenate([random.random((200, 32)), random.random((200, 32)) * random.random((200, 1))])
    off = MaxNetwork(error)(values) - values.max(axis=-1)
    assert off.min() >= -1e-12
    assert error / 4 < off.max() <= error


def test_max_network_at_the_ends():
    network = MaxNetwork(0.1)
    assert network.hidden(32) == (320, 20)
    assert network(np.array([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])) == pytest.approx([0, 1, 1])


@pytest.mark.parametrize("error", [0.1, 0.01])
def test_memorising_head(task, texts, error):
    off = np.abs(MemorisingHead(task, error)(texts) - task(texts))
    assert 0 < off.max() <= SLOPE * error
