"""Quantized attention: the formula in NumPy, and every implementation against it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from fedjax_tp.inference import quantizers
from fedjax_tp.inference.attention import _check_arrays, quantized_attention
from fedjax_tp.inference.kernels import quantized_attention as kernel
from fedjax_tp.types import InputError

FAST = {
    "blockwise": {"implementation": "blockwise"},
    "pallas": {"implementation": "pallas", "interpret": True},
}


def inputs(length, *, batch=2, heads=2, head_dim=16, spread=2.0, seed=0, dtype=float):
    rng = np.random.default_rng(seed)
    shape = (3, batch, length, heads, head_dim)
    q, k, v = rng.normal(size=shape) * np.array([spread, spread, 1]).reshape(
        3, 1, 1, 1, 1
    )
    return tuple(jnp.asarray(x, jnp.float32).astype(dtype) for x in (q, k, v))


def oracle(q, k, v, bits, threshold, lengths=None, mask=None, causal=False):
    """Values, whether each is near a cut point, and who is seen: NumPy, float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    _batch, length, _heads, head_dim = q.shape
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(head_dim)
    seen = np.ones(scores.shape, bool)
    if mask is not None:
        seen &= np.asarray(mask)
    if causal:
        seen &= np.tril(np.ones((length, length), bool))
    if lengths is not None:
        is_real = np.arange(length) < np.asarray(lengths)[:, None]
        seen &= is_real[:, None, :, None] & is_real[:, None, None, :]
    scores = np.where(seen, scores, -np.inf)
    largest = np.max(scores, axis=-1, keepdims=True)
    e = np.where(seen, np.exp(scores - np.where(largest == -np.inf, 0, largest)), 0)
    total = e.sum(axis=-1, keepdims=True)
    a = e / np.where(total > 0, total, 1)
    low = threshold if threshold > 0 else 1e-10 ** (1 - 0.5**bits)
    bins = 2**bits - 1
    cuts = low ** (1 - np.arange(bins) / bins)
    codes = np.where(a > 0, (a[..., None] >= cuts).sum(axis=-1), 0)
    levels = np.concatenate([[0], low ** (1 - (np.arange(bins) + 0.5) / bins)])
    near = (np.abs(a[..., None] / cuts - 1) < 2e-5).any(axis=-1)
    return levels[codes], near & seen, codes, seen


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "lengths": {"lengths": (7, 0)},
    "lengths and causal": {"lengths": (1, 20), "causal": True},
    "mask": {"mask": True},
    "mask of all": {"mask": "row", "lengths": (20, 11)},
}


def case_arguments(case, length, batch=2, heads=2):
    arguments = dict(CASES[case])
    if "lengths" in arguments:
        lengths = np.minimum(arguments["lengths"], length)
        arguments["lengths"] = jnp.asarray(lengths, jnp.int32)
    if arguments.get("mask") is True:
        drawn = np.random.default_rng(3).uniform(size=(batch, heads, length, length))
        # One query that sees nothing.
        drawn[0, 0, 0] = 1
        arguments["mask"] = jnp.asarray(drawn < 0.6)
    elif arguments.get("mask") == "row":
        drawn = np.random.default_rng(3).uniform(size=(1, 1, 1, length))
        arguments["mask"] = jnp.asarray(drawn < 0.6)
    return arguments


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["reference", *FAST])
def test_every_implementation_is_the_formula(name, case):
    if name == "pallas" and "mask" in case:
        pytest.skip("the kernel has no mask")
    how = FAST.get(name, {"implementation": name})
    for length, bits, threshold in ((1, 3, 1e-3), (21, 3, 1e-3), (21, 2, 0.0)):
        q, k, v = inputs(length)
        arguments = case_arguments(case, length)
        values, near, codes, seen = oracle(q, k, v, bits, threshold, **arguments)
        out, statistics = quantized_attention(
            q,
            k,
            v,
            bits=bits,
            threshold=threshold,
            return_statistics=True,
            **arguments,
            **how,
        )
        wanted = np.einsum("bhqk,bkhd->bqhd", values, np.asarray(v))
        is_safe = ~near.any(axis=-1)
        assert is_safe.mean() > 0.8
        rows = np.moveaxis(is_safe, 1, 2)
        np.testing.assert_allclose(np.asarray(out)[rows], wanted[rows], atol=1e-5)
        histogram = [(seen & (codes == code)).sum((-2, -1)) for code in range(2**bits)]
        histogram = np.stack(histogram, axis=-1)
        difference = np.abs(np.asarray(statistics.histogram) - histogram).sum()
        assert difference <= 2 * near.sum()
        share = np.where(seen, codes == 0, 0).sum((-2, -1)) / np.maximum(
            seen.sum((-2, -1)), 1
        )
        np.testing.assert_allclose(
            statistics.share_pruned, share, atol=near.sum() / max(seen.sum(), 1) + 1e-6
        )


def coded_by(q, k, how, bits, threshold, **arguments):
    """Codes that an implementation gives: what it makes of one-hot values."""
    length = q.shape[1]
    assert length <= q.shape[-1]
    one_hot = jnp.eye(length, q.shape[-1])[None, :, None]
    v = jnp.broadcast_to(one_hot, q.shape)
    out = quantized_attention(
        q, k, v, bits=bits, threshold=threshold, **arguments, **how
    )
    levels = np.asarray(quantizers.levels(quantizers.grid_above(threshold, bits)))
    values = np.moveaxis(np.asarray(out), 2, 1)[..., :length]
    codes = np.abs(values[..., None] - levels).argmin(axis=-1)
    np.testing.assert_allclose(levels[codes], values, rtol=1e-4, atol=1e-9)
    return codes


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", FAST)
def test_codes_are_the_references_but_for_those_at_a_cut_point(name, bits):
    q, k, _ = inputs(16, batch=3, heads=2, head_dim=16, spread=2.5, seed=bits)
    _, near, codes, _ = oracle(q, k, q, bits, 1e-3)
    reference = coded_by(q, k, {"implementation": "reference"}, bits, 1e-3)
    found = coded_by(q, k, FAST[name], bits, 1e-3)
    np.testing.assert_array_equal(found[~near], reference[~near])
    np.testing.assert_array_equal(reference[~near], codes[~near])
    assert (np.abs(found.astype(int) - reference) <= 1).all()
    assert near.mean() < 0.05


@pytest.mark.parametrize("name", FAST)
def test_scores_at_cut_points_go_to_one_of_the_two_bins(name):
    """Adversarial: every value of a row is at a cut point of the grid."""
    bits, threshold = 2, 1e-2
    cuts = np.asarray(quantizers.cut_points(quantizers.log_grid(bits, threshold)))
    rest = 1 - cuts.sum()
    row = np.concatenate([cuts, [rest]])
    head_dim = 16
    # q . k / 4 is the logarithm of the wanted value.
    q = jnp.zeros((1, 4, 1, head_dim)).at[..., 0].set(4.0)
    k = jnp.zeros((1, 4, 1, head_dim)).at[0, :, 0, 0].set(jnp.log(jnp.asarray(row)))
    found = coded_by(q, k, FAST[name], bits, threshold)[0, 0]
    upper = (row[:, None] >= cuts * (1 - 1e-6)).sum(axis=1)
    lower = (row[:, None] >= cuts * (1 + 1e-6)).sum(axis=1)
    assert ((found == upper) | (found == lower)).all()
    for at_most, at_least in zip(upper, lower, strict=True):
        assert at_most - at_least <= 1


@pytest.mark.parametrize("scale", [1e3, 1e-8])
@pytest.mark.parametrize("name", ["reference", *FAST])
def test_very_sharp_and_very_flat_attention(name, scale):
    how = FAST.get(name, {"implementation": name})
    q, k, v = inputs(9)
    out = quantized_attention(q * scale, k, v, bits=3, threshold=1e-3, **how)
    values, near, _, _ = oracle(q * scale, k, v, 3, 1e-3)
    assert not near.any()
    wanted = np.einsum("bhqk,bkhd->bqhd", values, np.asarray(v))
    np.testing.assert_allclose(out, wanted, atol=2e-5)


@pytest.mark.parametrize("name", FAST)
def test_longer_than_a_block_and_ragged(name):
    length, lengths = 300, jnp.array([300, 129])
    q, k, v = inputs(length, heads=3, head_dim=20)
    for causal in (False, True):
        out, statistics = quantized_attention(
            q,
            k,
            v,
            bits=3,
            threshold=1e-3,
            lengths=lengths,
            causal=causal,
            return_statistics=True,
            **FAST[name],
        )
        values, near, codes, seen = oracle(q, k, v, 3, 1e-3, lengths, causal=causal)
        wanted = np.einsum("bhqk,bkhd->bqhd", values, np.asarray(v))
        rows = np.moveaxis(~near.any(axis=-1), 1, 2)
        np.testing.assert_allclose(np.asarray(out)[rows], wanted[rows], atol=1e-5)
        assert (np.asarray(out)[1, 129:] == 0).all()
        kept = (np.where(seen, codes, 0) > 0).sum((-2, -1))
        found = np.asarray(statistics.histogram)
        assert np.abs(found[..., 1:].sum(-1) - kept).sum() <= near.sum()
        np.testing.assert_array_equal(found.sum(-1), seen.sum((-2, -1)))


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_pruning_alone(name):
    how = FAST.get(name, {"implementation": name})
    q, k, v = inputs(150)
    out = quantized_attention(q, k, v, bits=None, threshold=0.0, **how)
    np.testing.assert_allclose(out, jax.nn.dot_product_attention(q, k, v), atol=1e-5)
    a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4)
    wanted = jnp.einsum("bhqk,bkhd->bqhd", quantizers.prune(a, 0.01), v)
    out = quantized_attention(q, k, v, bits=None, threshold=0.01, **how)
    # A value at the threshold may go either way, and is worth 0.01.
    assert np.quantile(np.abs(out - wanted), 0.99) < 1e-5


@pytest.mark.parametrize("name", ["reference", "blockwise"])
def test_linear_codes(name):
    q, k, v = inputs(12)
    a = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4)
    for threshold in (0.0, 1e-3):
        out = quantized_attention(
            q, k, v, bits=4, threshold=threshold, is_log=False, implementation=name
        )
        a_coded = quantizers.linear_quantize(a, bits=4)
        if threshold:
            a_coded = quantizers.linear_quantize_pruned(a, bits=4, minimum=threshold)
        wanted = jnp.einsum("bhqk,bkhd->bqhd", a_coded, v)
        np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_renormalized_rows_are_averages(name):
    how = FAST.get(name, {"implementation": name})
    q, k, _ = inputs(30)
    ones = jnp.ones_like(q)
    out = quantized_attention(
        q,
        k,
        ones,
        bits=2,
        threshold=1e-3,
        lengths=jnp.array([30, 3]),
        renormalize=True,
        **how,
    )
    np.testing.assert_allclose(out[0], 1, atol=1e-5)
    np.testing.assert_allclose(out[1, :3], 1, atol=1e-5)
    assert (np.asarray(out[1, 3:]) == 0).all()


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_padding_may_hold_anything_and_nan_is_not_hidden(name):
    how = FAST.get(name, {"implementation": name})
    q, k, v = inputs(10)
    lengths = jnp.array([6, 10])
    wanted = quantized_attention(
        q, k, v, bits=3, threshold=1e-3, lengths=lengths, **how
    )
    spoilt = [x.at[0, 6:].set(jnp.nan) for x in (q, k, v)]
    found = quantized_attention(*spoilt, bits=3, threshold=1e-3, lengths=lengths, **how)
    np.testing.assert_array_equal(found, wanted)
    broken = q.at[0, 2, 1, 0].set(jnp.nan)
    found = quantized_attention(broken, k, v, bits=3, threshold=1e-3, **how)
    is_nan = np.isnan(np.asarray(found)).all(axis=-1)
    assert is_nan[0, 2, 1]
    assert is_nan.sum() == 1


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_an_infinite_score_is_not_hidden(name):
    how = FAST.get(name, {"implementation": name})
    q, k, v = inputs(10)
    q, k = q.at[0, 0, 0, 0].set(1e30), k.at[0, 1, 0, 0].set(1e30)
    found = quantized_attention(q, k, v, bits=3, threshold=1e-3, **how)
    assert np.isnan(np.asarray(found[0, 0, 0])).all()


@pytest.mark.parametrize("statistics", [False, True])
def test_a_mask_over_several_blocks(statistics):
    q, k, v = inputs(200)
    mask = case_arguments("mask", 200)["mask"]
    found, wanted = (
        quantized_attention(
            q,
            k,
            v,
            bits=3,
            threshold=1e-3,
            mask=mask,
            return_statistics=True,
            implementation=name,
        )
        for name in ("blockwise", "reference")
    )
    if statistics:
        counts = [np.asarray(pair[1].histogram) for pair in (found, wanted)]
        assert np.abs(counts[0] - counts[1]).sum() <= 4
    else:
        is_near = np.isclose(found[0], wanted[0], atol=1e-5)
        assert is_near.mean() > 0.999


def test_lengths_past_the_end_are_all_there_is():
    q, k, v = inputs(20)
    attend = jax.jit(
        lambda lengths: (
            kernel.attend(
                q,
                k,
                v,
                lengths,
                scale=0.25,
                threshold=jnp.float32(1e-3),
                grid=(7, 1e-3),
                codes=8,
                interpret=True,
            ).out
        )
    )
    np.testing.assert_array_equal(
        attend(jnp.array([1000, 20])), attend(jnp.array([20, 20]))
    )


def test_the_kernel_leaves_what_does_not_fit_its_memory():
    long = jnp.zeros((1, 8192, 1, 64))
    needs = partial(kernel.unsupported, is_log=True, has_mask=False)
    assert needs(long, platform="gpu") is None
    assert "at most 6144 tokens" in needs(long, platform="tpu")


def test_a_column_of_zeros_stays_zero():
    q, k, v = inputs(20)
    out = quantized_attention(q, k, v.at[..., 3].set(0), bits=3, threshold=1e-3)
    assert (np.asarray(out[..., 3]) == 0).all()
    assert np.isfinite(np.asarray(out)).all()


def test_with_more_bits_the_output_tends_to_full_attention():
    q, k, v = inputs(40)
    full = jax.nn.dot_product_attention(q, k, v)
    errors = [
        float(
            jnp.abs(quantized_attention(q, k, v, bits=b, threshold=1e-5) - full).max()
        )
        for b in (2, 4, 8)
    ]
    assert errors[0] > 2 * errors[1]
    assert errors[1] > 4 * errors[2]
    assert errors[2] < 0.1


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_bfloat16(name):
    how = FAST.get(name, {"implementation": name})
    q, k, v = inputs(33, dtype=jnp.bfloat16)
    out = quantized_attention(q, k, v, bits=3, threshold=1e-3, **how)
    assert out.dtype == jnp.bfloat16
    values, near, _, _ = oracle(q, k, v, 3, 1e-3)
    wanted = np.einsum("bhqk,bkhd->bqhd", values, np.asarray(v, np.float64))
    rows = np.moveaxis(~near.any(axis=-1), 1, 2)
    np.testing.assert_allclose(
        np.asarray(out, np.float64)[rows], wanted[rows], atol=0.03, rtol=0.01
    )


@pytest.mark.parametrize("name", FAST)
def test_under_vmap_and_shard_map(name):
    q, k, v = inputs(24, batch=4)
    lengths = jnp.array([24, 5, 0, 13])

    def attend(q, k, v, lengths):
        return quantized_attention(
            q, k, v, bits=3, threshold=1e-3, lengths=lengths, **FAST[name]
        )

    wanted = attend(q, k, v, lengths)
    by_client = [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v, lengths)]
    mapped = jax.vmap(attend)(*by_client)
    np.testing.assert_allclose(mapped.reshape(wanted.shape), wanted, atol=1e-6)
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",))
    sharded = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=P("clients"),
        out_specs=P("clients"),
        # JAX cannot interpret a kernel with this check.
        check_vma=name != "pallas",
    )(q, k, v, lengths)
    np.testing.assert_allclose(sharded, wanted, atol=1e-6)


@pytest.mark.parametrize("name", FAST)
def test_a_sweep_over_bits_and_thresholds_is_one_program(name):
    traces = []
    q, k, v = inputs(12)

    @jax.jit
    def attend(bits, threshold):
        traces.append(1)
        return quantized_attention(
            q,
            k,
            v,
            bits=bits,
            threshold=threshold,
            return_statistics=True,
            **FAST[name],
        )

    for bits, threshold in ((2, 1e-3), (3, 1e-2), (8, 0.0)):
        wanted, statistics = quantized_attention(
            q, k, v, bits=bits, threshold=threshold, return_statistics=True
        )
        found, counts = attend(bits, threshold)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        np.testing.assert_array_equal(
            counts.histogram[..., 0], statistics.histogram[..., 0]
        )
        np.testing.assert_array_equal(
            counts.histogram[..., 1], statistics.histogram[..., 1:].sum(-1)
        )
    assert len(traces) == 1


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_gradients_are_refused(name):
    how = FAST.get(name, {"implementation": name})
    q, k, v = inputs(8)

    def loss(q):
        return quantized_attention(q, k, v, bits=3, threshold=1e-3, **how).sum()

    with pytest.raises(InputError, match="is for inference: codes have no gradient"):
        jax.grad(loss)(q)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize(
    ("dtype", "length", "head_dim"),
    [(jnp.float32, 300, 20), (jnp.bfloat16, 200, 64)],
)
def test_the_kernel_lowers_for_accelerators(platform, dtype, length, head_dim):
    """Pallas' own compilers accept it; whether it runs there a device must say."""
    q, k, v = inputs(length, batch=3, head_dim=head_dim, dtype=dtype)
    lengths = jnp.array([length, 50, 0])

    def attend(q, k, v, lengths, statistics):
        return kernel.attend(
            q,
            k,
            v,
            lengths,
            scale=0.125,
            threshold=jnp.float32(1e-3),
            grid=(7, 1e-3),
            causal=True,
            codes=8,
            renormalize=True,
            return_statistics=statistics,
            platform="gpu" if platform == "cuda" else platform,
        )

    def of_clients(q, k, v, lengths, statistics):
        mapped = jax.vmap(partial(attend, statistics=statistics))
        return mapped(*(jnp.stack([x, x]) for x in (q, k, v, lengths)))

    # What is compiled for a TPU depends on which one.
    device = AbstractDevice(device_kind="TPU v5e", num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("clients",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        for attended, statistics in (
            (attend, False),
            (attend, True),
            (of_clients, True),
        ):
            exported = jax.export.export(
                jax.jit(attended, static_argnums=4),
                platforms=[platform],
                disabled_checks=list(
                    map(
                        jax.export.DisabledSafetyCheck.custom_call,
                        ("__gpu$xla.gpu.triton", "tpu_custom_call"),
                    )
                ),
            )(q, k, v, lengths, statistics)
            assert "quantized_attention" in exported.mlir_module()


def test_blocks_that_are_pruned_whole_are_skipped():
    length, block = 256, 64
    q = jnp.zeros((1, length, 1, 16)).at[..., 0].set(20.0)
    # All queries look at the second block of keys.
    k = jnp.zeros((1, length, 1, 16)).at[0, 64:128, 0, 0].set(4.0)
    v = inputs(length, batch=1, heads=1)[2]
    found = kernel.attend(
        q,
        k,
        v,
        None,
        scale=0.25,
        threshold=jnp.float32(1e-3),
        grid=(7, 1e-3),
        codes=8,
        return_statistics=True,
        interpret=True,
        block=(block, block),
    )
    assert found.blocks.tolist() == [[[16, 12]]]
    wanted = quantized_attention(q, k, v, bits=3, threshold=1e-3)
    np.testing.assert_allclose(found.out, wanted, atol=1e-5)


def test_blockwise_needs_a_tenth_of_the_memory():
    shape = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)

    def temporaries(name):
        def attend(q, k, v):
            return quantized_attention(
                q, k, v, bits=3, threshold=1e-3, implementation=name
            )

        compiled = jax.jit(attend).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries("blockwise") < 0.1 * temporaries("reference")


BAD = {
    "bits is 9; allowed is 1 to 8": {"bits": 9},
    "bits is 0; allowed is 1 to 8": {"bits": 0},
    "threshold is 1.0; allowed is 0 or more, and below 1": {"threshold": 1.0},
    "threshold is -0.1; allowed is 0 or more": {"threshold": -0.1},
    "implementation is 'magic'; allowed is one of reference, block": {
        "implementation": "magic"
    },
    "'pallas', which needs logarithmic codes": {
        "implementation": "pallas",
        "is_log": False,
        "interpret": True,
    },
    r"'pallas', which needs a GPU or TPU \(it is cpu\), or interpret": {
        "implementation": "pallas"
    },
    "lengths are 0 to 9; allowed is 0 to 8": {"lengths": jnp.array([0, 9])},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_clear_line(message):
    q, k, v = inputs(8)
    arguments = {"bits": 3, "threshold": 1e-3, **BAD[message]}
    with pytest.raises(InputError, match=message):
        quantized_attention(q, k, v, **arguments)


def test_shapes_that_disagree_are_refused():
    q, k, v = inputs(8)
    with pytest.raises(InputError, match="shapes of q, k and v are"):
        _check_arrays(q, k[:, :7], v, None, None)
    with pytest.raises(InputError, match=r"shape of lengths is \(3,\); allowed is \(2"):
        _check_arrays(q, k, v, jnp.array([1, 2, 3]), None)
    with pytest.raises(InputError, match="shape of mask is"):
        _check_arrays(q, k, v, None, jnp.ones((2, 2, 8, 7), bool))
    with pytest.raises(InputError, match="mask is of float32; allowed is bool"):
        _check_arrays(q, k, v, None, jnp.ones((1, 1, 1, 8)))
    with pytest.raises(InputError, match="k is of bfloat16; allowed is one floating"):
        _check_arrays(q, k.astype(jnp.bfloat16), v, None, None)
