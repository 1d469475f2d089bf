import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.linalg.joint import joint_truncate, pair_energy

SIZES = st.tuples(st.integers(1, 3), st.integers(5, 20), st.integers(5, 20), st.integers(1, 5))


@settings(max_examples=40)
@given(sizes=SIZES, seed=st.integers(0, 99), data=st.data())
def test_no_other_product_of_that_rank_is_nearer(sizes, seed, data):
    """The error equals the tail of the singular values of the full product, which is the optimum (Eckart-Young)."""
    count, rows, columns, inner = sizes
    rank = data.draw(st.integers(1, inner))
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(count, n, inner, generator=generator, dtype=torch.float64) for n in (rows, columns))
    new_left, new_right = joint_truncate(left, right, rank)
    assert new_left.shape == (count, rows, rank) and new_right.shape == (count, columns, rank)
    error = (left @ right.mT - new_left @ new_right.mT).flatten(1).norm(dim=1)
    tail = torch.linalg.svdvals(left @ right.mT)[:, rank:].norm(dim=1)
    assert torch.allclose(error, tail, atol=1e-9)


def test_degenerate_factors():
    zero = torch.zeros(1, 8, 4)
    left, right = joint_truncate(zero, zero, 2)
    assert not left.any() and not right.any()
    few = torch.randn(1, 2, 4)  # fewer rows than inner dimensions
    left, right = joint_truncate(few, torch.randn(1, 9, 4), 2)
    assert left.shape == (1, 2, 2)


def test_energy_of_a_pair_is_the_product_of_both_norms():
    q, k = torch.randn(2, 7, 6), torch.randn(2, 5, 6)
    energy = pair_energy(q, k, 3)
    for n in range(2):
        for p in range(3):
            expected = q[n][:, [p, p + 3]].norm() * k[n][:, [p, p + 3]].norm()
            assert torch.isclose(energy[n, p].float(), expected)
