"""Fits against the answers that plain least squares and plain differentiation give."""

import torch

from headwise.linalg.refit import PENALTIES, OutputFit, attention_hessian_and_gradient, fit_queries, fit_temperature


def same(x):
    return x


def test_hessian_and_gradient_are_the_derivatives_of_the_divergence_at_the_rows():
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 2, 7, 3, generator=generator, dtype=torch.float64)
    queries = torch.randn(2, 4, 5, 3, generator=generator, dtype=torch.float64)
    logits = queries.view(2, 2, 10, 3) @ keys.mT
    logits = logits.view(2, 4, 5, 7)
    logits[..., 0, 4:] = -torch.inf  # a row that does not see all keys
    hessian, gradient = attention_hessian_and_gradient(logits, keys)

    def divergence(q):
        other = (q.view(2, 2, 10, 3) @ keys.mT).view(2, 4, 5, 7).masked_fill(logits == -torch.inf, -torch.inf)
        rows = logits.softmax(-1)
        ratio = torch.where(rows > 0, rows.clamp(min=1e-300).log() - other.log_softmax(-1), 0.0)
        return (rows * ratio).sum()

    expected = torch.autograd.functional.hessian(divergence, queries).view(queries.numel(), queries.numel())
    torch.testing.assert_close(torch.block_diag(*hessian.flatten(0, 2)), expected)
    torch.testing.assert_close(
        gradient, (hessian @ queries[..., None])[..., 0]
    )  # nothing is missing where nothing was cut


def test_fitted_queries_solve_the_normal_equations():
    generator = torch.Generator().manual_seed(1)
    roots = torch.randn(2, 40, 4, 4, generator=generator, dtype=torch.float64)
    hessian = roots @ roots.mT
    features = torch.randn(2, 40, 3, generator=generator, dtype=torch.float64)
    truth = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    cos, sin = torch.rand(2, 40, 1, generator=generator, dtype=torch.float64).mul(6).cos(), None
    sin = (1 - cos.square()).sqrt()

    def turn(x, sign=1):
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - sign * second * sin, second * cos + sign * first * sin), dim=-1)

    gradient = (hessian @ turn(features @ truth.mT)[..., None])[..., 0]
    maps = fit_queries(hessian, gradient, features, turn, lambda x: turn(x, -1), penalty=1e-9)
    torch.testing.assert_close(maps, truth, rtol=1e-3, atol=1e-4)
    assert (
        fit_queries(hessian, gradient, features, turn, lambda x: turn(x, -1), penalty=10.0).norm() < 0.3 * truth.norm()
    )


def test_temperature_finds_the_factor_that_is_missing():
    generator = torch.Generator().manual_seed(2)
    roots = torch.randn(3, 20, 4, 4, generator=generator, dtype=torch.float64)
    queries = torch.randn(3, 20, 4, generator=generator, dtype=torch.float64)
    hessian, factors = roots @ roots.mT, torch.tensor([0.5, -0.25, 0.0], dtype=torch.float64)
    gradient = (hessian @ (queries * factors[:, None, None])[..., None])[..., 0]
    torch.testing.assert_close(fit_temperature(hessian, gradient, queries), factors)


def fitted(heads, error, weight, parts=4):
    fit = OutputFit()
    for some in torch.arange(len(heads)).chunk(parts):
        fit.add(heads[some], error[some], weight[some])
    return fit.solve()


def regression(features, strength, tokens=200):
    generator = torch.Generator().manual_seed(3)
    heads, noise = (torch.randn(tokens, n, generator=generator, dtype=torch.float64) for n in (features, 4))
    weight = torch.rand(tokens, generator=generator, dtype=torch.float64)
    maps = torch.randn(features, 4, generator=generator, dtype=torch.float64)
    return heads, strength * heads @ maps + noise, weight, strength * maps


def test_outputs_are_ridge_regression_whatever_the_scale_of_a_coordinate():
    heads, error, weight, _ = regression(6, 3.0)
    scale = torch.tensor([1e-3, 1.0, 1e3, 1.0, 1.0, 1.0], dtype=torch.float64)
    gram = heads.T @ (weight[:, None] * heads)
    expected = torch.linalg.solve(gram + PENALTIES[0] * gram.diagonal().diag(), heads.T @ (weight[:, None] * error))
    torch.testing.assert_close(fitted(heads, error, weight), expected)
    torch.testing.assert_close(fitted(heads * scale, error, weight) * scale[:, None], expected)


def test_the_less_text_there_is_the_more_outputs_are_shrunk():
    """With as many coordinates as tokens, a light penalty fits noise: the other half of the text shows it."""
    heads, error, weight, truth = regression(80, 0.05, tokens=100)
    correction = fitted(heads, error, weight)
    gram, cross = heads.T @ (weight[:, None] * heads), heads.T @ (weight[:, None] * error)
    light = torch.linalg.solve(gram + PENALTIES[0] * gram.diagonal().diag(), cross)
    assert (correction - truth).norm() < 0.7 * (light - truth).norm()


def test_what_does_not_help_on_the_other_half_is_left_alone():
    heads, error, weight, _ = regression(40, 0.0, tokens=60)
    assert fitted(heads, error, weight).norm() < 0.05 * error.norm()


def test_what_does_not_help_on_tokens_held_out_is_left_alone():
    heads, error, weight, _ = regression(6, 3.0)
    solved = []
    for held_out in (error, -error):
        fit = OutputFit()
        fit.add(heads, error, weight)
        fit.add(heads, held_out, weight, held_out=True)
        solved.append(fit.solve())
    torch.testing.assert_close(solved[0], fitted(heads, error, weight, parts=1))
    assert not solved[1].any()


def test_coordinates_that_never_occur_are_left_alone():
    fit = OutputFit()
    fit.add(torch.zeros(10, 3), torch.ones(10, 2), torch.ones(10))
    assert fit.solve().abs().max() == 0
    assert fit_queries(torch.zeros(1, 5, 2, 2), torch.zeros(1, 5, 2), torch.zeros(1, 5, 3), same, same, 0.1).norm() == 0
