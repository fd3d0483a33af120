"""Paired differences against what is known of them."""

import numpy as np
import pytest

from fedjax_tp.analysis.comparison import paired_difference
from fedjax_tp.types import InputError


def test_an_algorithm_does_not_differ_from_itself():
    correct = np.array([[3.0, 5.0], [2.0, 9.0]])
    assert paired_difference(correct, correct, correct + 1) == (0, 0, 0)


def test_a_constant_difference_has_no_width():
    examples = np.full((3, 20), 10.0)
    correct = np.random.default_rng(0).integers(2, 8, (3, 20)).astype(float)
    found = paired_difference(correct + 1, correct, examples)
    np.testing.assert_allclose(found, [0.1, 0.1, 0.1], atol=1e-12)


def test_pooled_accuracies_weigh_clients_by_their_examples():
    examples = np.array([[90.0, 10.0]])
    found = paired_difference(np.array([[9.0, 10.0]]), np.zeros((1, 2)), examples)
    assert found.mean == pytest.approx(0.19)
    # One client twice, in one draw or the other.
    assert (found.low, found.high) == pytest.approx((0.1, 1.0))


def test_the_interval_is_that_of_the_mean_of_independent_clients():
    rng = np.random.default_rng(1)
    examples = np.ones((1, 4000))
    gains = rng.normal(0.03, 0.5, (1, 4000))
    found = paired_difference(gains, np.zeros_like(gains), examples)
    half = 1.96 * gains.std() / np.sqrt(4000)
    np.testing.assert_allclose(
        (found.low, found.high), (gains.mean() - half, gains.mean() + half), atol=0.002
    )


def test_it_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    hits = 0
    for trial in range(200):
        gains = rng.normal(0.0, 1.0, (1, 60))
        found = paired_difference(
            gains, np.zeros_like(gains), np.ones_like(gains), resamples=300, seed=trial
        )
        hits += found.low <= 0 <= found.high
    assert 0.88 < hits / 200 < 0.99


def test_a_seed_without_test_examples_is_refused():
    with pytest.raises(InputError, match="no test examples"):
        paired_difference(np.zeros((2, 2)), np.zeros((2, 2)), np.zeros((2, 2)))
