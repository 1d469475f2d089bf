import numpy as np
import pytest

from headwise.theory.conditioning import gaussian_condition


@pytest.mark.parametrize(("tokens", "width"), [(197, 768), (197, 1024), (1024, 576), (64, 576)])
def test_gaussian_matrices_are_conditioned_as_predicted(tokens, width):
    random = np.random.default_rng(0)
    found = np.median([np.linalg.cond(random.standard_normal((tokens, width))) for _ in range(5)])
    assert gaussian_condition(tokens, width) == pytest.approx(found, rel=0.1)


def test_the_pole_is_that_of_a_square_matrix():
    random = np.random.default_rng(0)
    found = np.exp(np.mean([np.log(np.linalg.cond(random.standard_normal((64, 64)))) for _ in range(300)]))
    assert gaussian_condition(64, 64) == pytest.approx(found, rel=0.25)
    assert gaussian_condition(577, 576) == gaussian_condition(576, 577) <= 4.65 * 576
