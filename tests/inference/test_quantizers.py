"""Pruning and codes against the known tables, and the formula in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_tp.inference import quantizers as q
from fedjax_tp.types import InputError

ROW = [0.62, 0.2, 0.1, 0.05, 0.02, 0.0075, 0.0015, 0.0006, 0.0004]
INPUTS = [5e-4, 1.0001e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 1]
GRIDS = {
    "log": lambda bits: q.log_grid(bits, 1e-3),
    "unpruned log": q.unpruned_log_grid,
    "linear": q.linear_grid,
    "pruned linear": lambda bits: q.pruned_linear_grid(bits, 1e-3),
}


def array(values):
    return jnp.asarray(values, jnp.float32)


def test_levels_and_cut_points_are_those_of_the_table():
    two, three = q.log_grid(2, 1e-3), q.log_grid(3, 1e-3)
    np.testing.assert_allclose(
        q.levels(two), [0, 0.0031622777, 0.0316227766, 0.3162277660], atol=1e-6
    )
    np.testing.assert_allclose(q.cut_points(two), [1e-3, 1e-2, 1e-1], atol=1e-6)
    np.testing.assert_allclose(
        q.levels(three),
        [
            0,
            0.0016378937,
            0.0043939706,
            0.0117876863,
            0.0316227766,
            0.0848342898,
            0.2275845926,
            0.6105402297,
        ],
        atol=1e-6,
    )
    np.testing.assert_allclose(
        q.cut_points(three),
        [
            1e-3,
            0.0026826958,
            0.0071968567,
            0.0193069773,
            0.0517947468,
            0.1389495494,
            0.3727593720,
        ],
        atol=1e-6,
    )
    four = np.concatenate([[0], 10 ** (-3 + 3 * (np.arange(15) + 0.5) / 15)])
    np.testing.assert_allclose(q.levels(q.log_grid(4, 1e-3)), four, atol=1e-6)


def test_log_quantization_of_the_table():
    wanted = [
        0,
        0.00163789,
        0.00163789,
        0.00439397,
        0.01178769,
        0.03162278,
        0.03162278,
        0.08483429,
        0.22758459,
        0.61054023,
        0.61054023,
        0.61054023,
        0.61054023,
    ]
    found = q.log_quantize(array(INPUTS), bits=3, minimum=1e-3)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_linear_quantization_of_the_table_with_one_clamped():
    found = q.linear_quantize_pruned(array(INPUTS), bits=3, minimum=1e-3)
    wanted = [0] * 8 + [0.1883125, 0.4380625, 0.6878125, 0.9375625, 0.9375625]
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    found = q.linear_quantize(array(INPUTS), bits=3)
    wanted = [0] * 8 + [0.3125, 0.5625, 0.8125, 0.9375, 0.9375]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_a_row_of_the_table():
    pruned = q.prune(array(ROW), 1e-3)
    assert float(pruned.sum()) == pytest.approx(0.999, abs=1e-6)
    assert int((pruned == 0).sum()) == 2
    coded = q.log_quantize(pruned, bits=3, minimum=1e-3)
    wanted = [0.61054, 0.22758, 0.08483, 0.03162, 0.03162, 0.01179, 0.00164, 0, 0]
    np.testing.assert_allclose(coded, wanted, atol=1e-5)
    assert float(coded.sum()) == pytest.approx(0.99963, abs=1e-5)
    assert float(q.renormalize(coded).sum()) == pytest.approx(1, abs=1e-6)


def test_unpruned_log_is_clamped_at_one():
    grid = q.unpruned_log_grid(3)
    found = q.quantize(array([1.0, 1e-10, 1e-9, 0.0]), grid)
    # Bins of width -log10(1e-10) / 8 = 1.25 decades; the lowest is zero.
    np.testing.assert_allclose(found, [10**-0.625, 0, 0, 0], rtol=1e-5)


@pytest.mark.parametrize(("bits", "factor"), [(2, 3.1623), (3, 1.6379), (4, 1.2589)])
def test_worst_relative_error_is_half_a_bin(bits, factor):
    a = np.exp(np.linspace(np.log(1.001e-3), 0, 20_001)).astype(np.float32)
    found = np.asarray(q.log_quantize(array(a), bits=bits, minimum=1e-3))
    ratio = np.maximum(found / a, a / found).max()
    assert ratio == pytest.approx(factor, rel=1e-3)


def oracle(a: np.ndarray, name: str, bits: int) -> np.ndarray:
    """The table of the facts, line by line, in float64; a is at no cut point."""
    m, n = 1e-3, 2**bits
    if name == "log":
        width = -np.log2(m) / (n - 1)
        j = np.minimum(np.floor((np.log2(a) - np.log2(m)) / width), n - 2)
        return np.where(a < m, 0, m ** (1 - (j + 0.5) / (n - 1)))
    if name == "unpruned log":
        m = 1e-10
        width = -np.log2(m) / n
        j = np.minimum(np.floor((np.log2(a) - np.log2(m)) / width), n - 1)
        return np.where(j < 1, 0, m ** (1 - (j + 0.5) / n))
    low = 0.0 if name == "linear" else m
    j = np.minimum(np.floor((a - low) / ((1 - low) / n)), n - 1)
    return np.where(j < 1, 0, low + (j + 0.5) * (1 - low) / n)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_grid_is_its_formula(name, bits):
    a = np.random.default_rng(bits).uniform(size=2000) ** 6
    grid = GRIDS[name](bits)
    cuts = np.asarray(q.cut_points(grid), np.float64)
    is_far = np.abs(a[:, None] / cuts - 1).min(axis=1) > 1e-5
    a = a[is_far]
    assert len(a) > 1500
    found = q.quantize(array(a), grid)
    np.testing.assert_allclose(found, oracle(a, name, bits), rtol=2e-5, atol=1e-9)
    codes = np.asarray(q.encode(array(a), grid))
    np.testing.assert_array_equal(codes, (a[:, None] >= cuts).sum(axis=1))
    np.testing.assert_allclose(found, q.levels(grid)[codes], rtol=1e-6)


@pytest.mark.parametrize("name", GRIDS)
def test_zero_stays_zero_and_nothing_is_lost(name):
    """A09: a value of 0, a row of zeros, very small values."""
    grid = GRIDS[name](4)
    rows = array([[1, 0.5, 0.3, 0.25, 0.2, 0.01, 1e-9, 0], [0] * 8])
    found = np.asarray(q.quantize(rows, grid))
    assert np.isfinite(found).all()
    assert found[0, -1] == 0
    assert (found[1] == 0).all()
    pruned = q.prune(rows, 0.24)
    assert (np.asarray(q.quantize(pruned, grid))[np.asarray(pruned) == 0] == 0).all()


@pytest.mark.parametrize("name", GRIDS)
def test_error_falls_with_the_bits(name):
    a = array(np.random.default_rng(0).dirichlet(np.ones(16), 200))
    errors = [
        float(jnp.abs(q.quantize(a, GRIDS[name](b)) - a).mean()) for b in (2, 4, 8)
    ]
    assert errors[0] > 1.5 * errors[1]
    assert errors[1] > 2 * errors[2]


@pytest.mark.parametrize("bad", [-0.5, float("nan")])
@pytest.mark.parametrize(
    "function",
    [
        lambda a: q.prune(a, 0.1),
        lambda a: q.prune_relative(a, 0.1),
        lambda a: q.boolean(a, 0.1),
        lambda a: q.threshold_for_share(a, 0.5),
        lambda a: q.log_quantize(a, bits=3, minimum=1e-3),
        lambda a: q.linear_quantize(a, bits=3),
        lambda a: q.encode(a, q.log_grid(3, 1e-3)),
    ],
)
def test_negative_and_nan_are_refused(function, bad):
    with pytest.raises(InputError, match=r"\[0, 1\] is (-0.5|nan); allowed"):
        function(array([[0.5, bad]]))


def test_nan_is_not_hidden_under_jit():
    a = array([0.5, jnp.nan])
    found = jax.jit(lambda a: q.log_quantize(a, bits=3, minimum=1e-3))(a)
    assert np.isnan(found[1])
    assert np.isnan(jax.jit(lambda a: q.prune(a, 0.1))(a)[1])


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_bits_out_of_range_are_refused(bits):
    with pytest.raises(InputError, match=r"bits is .*; allowed is 1 to 8"):
        q.log_quantize(array([0.5]), bits=bits, minimum=1e-3)


@pytest.mark.parametrize("minimum", [0.0, 1.0, -1e-3, float("nan")])
def test_minimum_out_of_range_is_refused(minimum):
    with pytest.raises(InputError, match=r"minimum is .*; allowed is above 0"):
        q.log_quantize(array([0.5]), bits=3, minimum=minimum)


def test_a_threshold_is_below_one_whatever_the_values():
    a = array([[1.0, 0.0], [0.6, 0.4]])
    threshold = float(q.threshold_for_share(a, 1.0))
    assert q.prune(a, threshold).tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize("threshold", [-0.1, 1.0, 1 - 1e-9, float("nan")])
def test_threshold_out_of_range_is_refused(threshold):
    with pytest.raises(InputError, match=r"threshold is .*; allowed is 0 or more"):
        q.prune(array([0.5]), threshold)


def test_pruning_is_strict_and_keeps_the_rest_as_it_is():
    a = array([[0.5, 0.25, 0.125, 0.0]])
    np.testing.assert_array_equal(q.prune(a, 0.125), [[0.5, 0.25, 0, 0]])
    np.testing.assert_array_equal(q.prune(a, 0.0), a)
    np.testing.assert_array_equal(q.prune_relative(a, 0.5), [[0.5, 0, 0, 0]])


@settings(max_examples=30, deadline=None)
# Not subnormal numbers: XLA takes them for 0 where it compares, and NumPy does not.
@given(
    st.lists(
        st.floats(0, 0.9375, width=32, allow_subnormal=False), min_size=12, max_size=12
    ),
    st.sampled_from([0.0, 0.1, 0.25, 1 / 3, 0.5, 0.8, 1.0]),
    st.integers(0, 12),
)
def test_the_threshold_of_a_share_prunes_it_and_no_more_than_needed(
    values, share, real
):
    a = array(values)
    where = jnp.arange(12) < real
    threshold = q.threshold_for_share(a, share, where)
    kept = np.asarray(a)[:real]
    wanted = int(np.ceil(np.float32(share) * np.float32(real)))
    assert (kept <= float(threshold)).sum() >= wanted or real == 0
    # The next smaller one would not.
    assert (kept < float(threshold)).sum() < max(wanted, 1)


def test_boolean_counts_in_a_row_or_in_all():
    a = array([[0.5, 0.4, 0.1], [0.9, 0.05, 0.05]])
    np.testing.assert_allclose(q.boolean(a, 0.2), [[0.5, 0.5, 0], [1, 0, 0]])
    by_all = [[1 / 3, 1 / 3, 0], [1 / 3, 0, 0]]
    np.testing.assert_allclose(q.boolean(a, 0.2, axis=None), by_all, rtol=1e-6)
    assert (np.asarray(q.boolean(jnp.zeros((2, 3)), 0.0)) == 0).all()


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("length", [0, 1, 5, 8, 13])
def test_packed_codes_come_back(bits, length):
    codes = np.random.default_rng(length).integers(0, 2**bits, (2, 3, length), np.uint8)
    packed = q.pack(jnp.asarray(codes), bits)
    assert packed.shape == (2, 3, -(-length * bits // 8))
    np.testing.assert_array_equal(q.unpack(packed, bits, length), codes)


def test_the_first_code_is_in_the_lowest_bits():
    assert q.pack(jnp.array([1, 2, 3], jnp.uint8), 2).tolist() == [0b111001]
    assert q.pack(jnp.array([5, 10, 15], jnp.uint8), 4).tolist() == [0xA5, 0x0F]


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(
        InputError, match="bits is 3; allowed for packed codes is 2 or 4"
    ):
        q.pack(jnp.zeros(4, jnp.uint8), 3)
    with pytest.raises(InputError, match="code is 4; allowed in 2 bits is 0 to 3"):
        q.pack(jnp.array([4], jnp.uint8), 2)
    with pytest.raises(InputError, match="length is 9; allowed is 0 to 8"):
        q.unpack(jnp.zeros(2, jnp.uint8), 2, 9)


def test_bits_and_minimum_are_numbers_of_a_compiled_program():
    traces = []

    @jax.jit
    def quantize(a, bits, minimum):
        traces.append(1)
        return q.log_quantize(a, bits=bits, minimum=minimum)

    a = array(INPUTS)
    for bits, minimum in ((2, 1e-3), (3, 1e-3), (4, 1e-2)):
        found = quantize(a, bits, minimum)
        wanted = q.log_quantize(a, bits=bits, minimum=minimum)
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert len(traces) == 1


def test_any_leading_axes_and_types():
    a = jnp.asarray(np.random.default_rng(0).uniform(size=(2, 3, 4, 5)), jnp.bfloat16)
    found = q.log_quantize(a, bits=3, minimum=1e-3)
    assert found.shape == a.shape
    assert found.dtype == jnp.bfloat16
    one = q.log_quantize(a[1, 2, 3], bits=3, minimum=1e-3)
    np.testing.assert_array_equal(found[1, 2, 3], one)
