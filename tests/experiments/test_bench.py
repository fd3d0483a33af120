"""The benchmarks run, at sizes of no meaning, and end with their figures as JSON."""

import json
import shlex

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import attention, devices, gpu, scale, skew, timing
from experiments.bench import round as round_benchmark
from fedjax_tp.models import task as tasks
from fedjax_tp.models.vit import ViT

TINY = shlex.split(
    "--dim 8 --depth 1 --heads 2 --head-dim 4 --mlp-dim 8 --steps 2 --batch-size 2 "
    "--rounds 1 --devices 2"
)


@pytest.fixture(autouse=True)
def _small_peak(monkeypatch):
    monkeypatch.setattr(timing.matmul_peak, "__defaults__", (64, 1))


def figures(capsys, module, *flags):
    assert module.main(list(flags)) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_round(capsys):
    found = figures(capsys, round_benchmark, *TINY, "--clients", "3", "--no-torch")
    assert found["images_per_second"] > 0
    assert found["peak_share"] > 0
    assert found["ratio"] is None


def test_attention(capsys):
    sizes = ("--lengths", "8", "256", "--heads", "2", "--head-dim", "16")
    found = figures(capsys, attention, *sizes, "--repeats", "1")
    assert [row["length"] for row in found["lengths"]] == [8, 256]
    for row in found["lengths"]:
        assert row["ms"].keys() >= {"full", "reference", "blockwise"}
        assert 0 <= row["blocks_skipped"] < 1
    assert attention.main(["--lengths", "300"]) == 2
    assert "length is 300; allowed is up to 128, or a" in capsys.readouterr().err


def test_blocks_of_softmax_are_full_attention():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 256, 4, 8))
    wanted = jax.nn.dot_product_attention(q, k, v)
    np.testing.assert_allclose(attention.blocks_of_softmax(q, k, v), wanted, atol=1e-5)


def test_share_of_blocks_that_are_pruned_whole():
    q = jnp.ones((1, 128, 1, 4)) * 30
    k = jnp.zeros((1, 128, 1, 4)).at[0, 70].set(1.0)
    assert attention.skipped_blocks(q, k, 1e-3, 64) == 0.5
    # The last block is of 2 keys and queries; padding is pruned, and is not counted.
    q, k = jnp.ones((2, 130, 2, 4)), jnp.ones((2, 130, 2, 4))
    assert attention.skipped_blocks(q, k, 1e-3, 64) == 0


def test_round_against_pytorch(capsys):
    pytest.importorskip("torch")
    found = figures(capsys, round_benchmark, *TINY, "--clients", "3")
    assert found["ratio"] == pytest.approx(
        found["images_per_second"] / found["torch_images_per_second"], rel=1e-2
    )


def test_the_pytorch_reference_has_the_same_model():
    torch = pytest.importorskip("torch")
    from experiments.bench import torch_fedtp

    sizes = {
        "dim": 8, "depth": 2, "heads": 2, "head_dim": 4, "mlp_dim": 16, "dropout": 0.0
    }  # fmt: skip
    theirs = torch_fedtp.ViT(**sizes)
    task = tasks.classification(ViT(10, patch_size=4, **sizes), (32, 32, 3))

    def array(name):
        return theirs.get_parameter(name).detach().numpy()

    def linear(name):
        return {"kernel": array(f"{name}.weight").T, "bias": array(f"{name}.bias")}

    def norm(name):
        return {"scale": array(f"{name}.weight"), "bias": array(f"{name}.bias")}

    def block(i):
        qkv = array(f"blocks.{i}.attention.qkv.weight")
        return {
            "attention_norm": norm(f"blocks.{i}.attention_norm"),
            "attention": {
                "qkv": np.moveaxis(qkv.reshape(3, 2, 4, 8), 3, 0),
                "out": linear(f"blocks.{i}.attention.out"),
            },
            "mlp_norm": norm(f"blocks.{i}.mlp_norm"),
            "mlp": {
                "up": linear(f"blocks.{i}.mlp.0"), "down": linear(f"blocks.{i}.mlp.3")
            },
        }  # fmt: skip

    params = {
        "patch_embedding": linear("embedding"),
        "cls": array("cls"),
        "positions": array("positions"),
        "block_0": block(0),
        "block_1": block(1),
        "head_norm": norm("norm"),
        "head": linear("head"),
    }
    images = np.random.default_rng(0).normal(size=(3, 32, 32, 3)).astype(np.float32)
    expected = theirs(torch.from_numpy(images)).detach().numpy()
    found = task.apply(jax.tree.map(jnp.asarray, params), jnp.asarray(images))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def clock_of_rounds(monkeypatch, seconds_of_steps):
    """Runs no round, and says that it took what a function of its steps says."""

    def round_timer(algorithm, data, cohort, schedule, **rest):
        assert cohort == data.num_clients
        assert schedule.capacity == np.max(data.size)
        steps = -(-np.asarray(data.size) // schedule.batch_size)
        return lambda: seconds_of_steps(steps)

    monkeypatch.setattr(timing, "round_timer", round_timer)


def test_skew(capsys, monkeypatch):
    # A round of 1 s, and 0.01 s for each step of the two lanes or the longest client.
    clock_of_rounds(
        monkeypatch,
        lambda steps: 1 + 0.01 * max(np.ceil(steps.sum() / 2), steps.max()),
    )
    found = figures(capsys, skew, *TINY, "--clients", "6", "--steps", "20")
    assert found["lanes"] == 2
    for name, sizes in (
        ("zipf", skew.zipf_sizes(6, 40)), ("dirichlet", skew.dirichlet_sizes(6, 40))
    ):  # fmt: skip
        steps = -(-sizes // 2)
        bound = 0.01 * max(steps.sum() / 2, steps.max())
        rounded_up = 0.01 * max(np.ceil(steps.sum() / 2), steps.max())
        expected = (1 + rounded_up) / bound
        assert found[f"{name}_ratio"] == pytest.approx(expected, abs=2e-3)
        padded = (1 + 0.01 * 3 * steps.max()) / bound
        assert found[f"{name}_padding_ratio"] == pytest.approx(padded, abs=2e-2)
    assert found["ratio"] == max(found["zipf_ratio"], found["dirichlet_ratio"])


def test_steps_too_few_to_time_are_said_to_be(capsys, monkeypatch):
    clock_of_rounds(monkeypatch, lambda steps: 1 / steps.sum())
    assert skew.main([*TINY, "--clients", "2", "--steps", "8"]) == 2
    assert "steps is 8, try 80" in capsys.readouterr().err


def test_sizes_are_as_skewed_as_they_say():
    sizes = skew.zipf_sizes(64, 100_000)
    assert sizes[0] / sizes[7] == pytest.approx(8**1.2, rel=0.01)
    assert sizes.min() >= 1
    sizes = skew.dirichlet_sizes(64, 100_000)
    assert sizes.min() >= 1
    assert abs(sizes.sum() - 100_000) < 100
    # The share of squares expected of Dirichlet(0.1) is (0.1 + 1) / (6.4 + 1).
    assert 0.03 < ((sizes / sizes.sum()) ** 2).sum() < 0.4


def test_scale(capsys):
    flags = "--clients 5 20 --cohort 2 --more-rounds 2"
    found = figures(capsys, scale, *TINY, *shlex.split(flags))
    ratios = []
    for name in ("fedtp", "fedtp_vanilla"):
        times = found["seconds"][name]
        ratios.append(times["20"] / times["5"])
        assert found["ratios"][name] == pytest.approx(ratios[-1], rel=0.01)
    assert found["ratio"] == pytest.approx(max(ratios), rel=0.01)


def test_devices(capsys):
    found = figures(capsys, devices, *TINY, "--clients", "4")
    assert set(found["images_per_second"]) == {"1", "2"}


@pytest.mark.smoke
def test_gpu(capsys):
    found = figures(capsys, gpu, *TINY, "--cohorts", "1", "3", "--no-torch")
    assert set(found["images_per_second"]) == {"1", "3"}
    assert found["torch_ratio"] is None


def test_work_is_counted_from_the_formulas():
    sizes = round_benchmark.Sizes()
    block = 65 * (128 * 1536 + 512 * 128 + 2 * 128 * 256) + 2 * 65 * 65 * 512
    forward = 2 * (6 * block + 64 * 48 * 128 + 128 * 10)
    assert round_benchmark.flops_an_image(sizes) == 3 * forward


def test_bad_numbers_are_refused(capsys):
    assert skew.main(["--clients", "0"]) == 2
    assert "clients is 0; allowed is 1 or more" in capsys.readouterr().err
