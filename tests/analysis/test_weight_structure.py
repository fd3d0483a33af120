"""Structured approximations of a second moment: the table, and searched minima."""

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp.analysis import weight_structure as ws
from fedjax_tp.types import InputError

C = np.array([[4, 2, 0.5, 0], [2, 3, 0, 0.5], [0.5, 0, 2, 1], [0, 0.5, 1, 5]])


def test_errors_of_the_table():
    assert ws.grouped_error(C, np.array([0, 0, 1, 1])) == pytest.approx(0.12403473)
    assert ws.grouped_error(C, np.arange(4)) == pytest.approx(0.41137668)
    assert ws.kronecker_error(C, 2) == pytest.approx(0.28145652)
    assert ws.low_rank_error(C, 1) == pytest.approx(0.68433733)
    assert ws.grouped_error(C, np.zeros(4, int)) == 0
    assert ws.low_rank_error(C, 4) == 0


def test_no_kronecker_product_is_nearer():
    def distance(x):
        a, b = x[:4].reshape(2, 2), x[4:].reshape(2, 2)
        return np.sum((C - np.kron(a, b)) ** 2)

    rng = np.random.default_rng(0)
    best = min(
        scipy.optimize.minimize(distance, rng.normal(size=8)).fun for _ in range(5)
    )
    expected = np.sqrt(best / np.sum(C**2))
    assert ws.kronecker_error(C, 2) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(InputError, match="first is 3; allowed are divisors of 4"):
        ws.kronecker_error(C, 3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_a_finer_grouping_keeps_less(seed):
    rng = np.random.default_rng(seed)
    moment = ws.second_moment(rng.normal(size=(5, 12)))
    np.testing.assert_allclose(moment, moment.T)
    coarse = rng.integers(0, 3, 12)
    fine = 2 * coarse + rng.integers(0, 2, 12)
    diagonal = ws.grouped_error(moment, np.arange(12))
    assert ws.grouped_error(moment, coarse) <= ws.grouped_error(moment, fine) + 1e-12
    assert ws.grouped_error(moment, fine) <= diagonal + 1e-12
    kept = np.where(coarse[:, None] == coarse, moment, 0)
    expected = np.linalg.norm(moment - kept) / np.linalg.norm(moment)
    assert ws.grouped_error(moment, coarse) == pytest.approx(expected)


def test_heads_that_go_together_are_found():
    rng = np.random.default_rng(0)
    common = rng.normal(size=(400, 3))
    kernels = np.stack(
        [common[:, [h]] + rng.normal(size=(400, 8)) for h in range(3)], axis=1
    )
    # `[samples, dim, heads, head_dim]`.
    kernels = kernels.reshape(400, 3, 2, 4).transpose(0, 2, 1, 3)
    groups = ws.groupings((2, 3, 4), head_axis=1)
    found = ws.squared_correlation(kernels.reshape(400, -1), groups["head"])
    # Two entries of a head share half their variance.
    assert found.inside == pytest.approx(0.25, abs=0.05)
    assert found.across == pytest.approx(1 / 400, abs=2e-3)
    alone = ws.squared_correlation(kernels.reshape(400, -1), groups["whole"])
    assert np.isnan(alone.across)


def test_groups_of_kernels():
    flat = ws.groupings((2, 3), None)
    assert flat["input"].tolist() == [0, 0, 0, 1, 1, 1]
    assert flat["output"].tolist() == [0, 1, 2, 0, 1, 2]
    assert "head" not in flat
    into = ws.groupings((2, 2, 3), head_axis=1)
    assert into["head"].tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert into["output"].tolist() == list(range(6)) * 2
    assert into["input"].tolist() == [0] * 6 + [1] * 6
    out = ws.groupings((2, 3, 2), head_axis=0)
    assert out["head"].tolist() == [0] * 6 + [1] * 6
    assert out["input"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert out["output"].tolist() == [0, 1] * 6


def test_down_sampling_keeps_places():
    kernels = np.arange(2 * 6 * 4, dtype=float).reshape(2, 6, 4)
    found = ws.down_sample(kernels, 3)
    np.testing.assert_array_equal(found, kernels[:, ::2, ::2])
    np.testing.assert_array_equal(ws.down_sample(kernels, 6), kernels)
    with pytest.raises(InputError, match="most is 0"):
        ws.down_sample(kernels, 0)


def test_concentration_is_one_where_a_grouping_means_nothing():
    assert ws.concentration(np.ones((6, 6)), np.arange(6) // 2) == pytest.approx(1)
    # Two blocks: of 12 pairs 4 are inside, and hold all there is.
    blocks = np.kron(np.eye(2), np.ones((2, 2)))
    assert ws.concentration(blocks, np.array([0, 0, 1, 1])) == pytest.approx(3)
    assert np.isnan(ws.concentration(blocks, np.arange(4)))
    assert ws.concentration(np.eye(4), np.zeros(4, int)) == 1
