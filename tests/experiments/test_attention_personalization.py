"""Attention and what is personal, as a user runs it."""

import csv
import shlex

import jax
import pytest

from experiments import attention_personalization as experiment
from fedjax_tp import tree
from fedjax_tp.models import task as tasks
from fedjax_tp.models.vit import ViT

TINY = shlex.split(
    "--num-clients 6 --sample-fraction 0.5 --rounds 2 --eval-every 2 "
    "--local-epochs 1 --dim 8 --depth 1 --heads 2 --head-dim 4 --mlp-dim 8 "
    "--patch-size 4 --hypernetwork.hidden 8 --hypernetwork.embedding-dim 4 "
    "--devices 1 --no-tune-process --parts head --map-clients 3 --map-images 4"
)


def test_maps_and_the_ablation_are_written(tmp_path):
    out = tmp_path / "run"
    assert experiment.main(["--out", str(out), *TINY]) == 0
    rows = list(csv.DictReader((out / "attention.csv").open()))
    assert [(row["first"], row["second"], row["layer"]) for row in rows] == [
        ("local", "fedavg", "1"),
        ("local", "fedtp", "1"),
        ("fedavg", "fedtp", "1"),
    ]
    for row in rows:
        assert 0 < float(row["jensen_shannon"]) < 1
        assert 0 < float(row["cosine"]) < 1
    ablation = list(csv.DictReader((out / "ablation.csv").open()))
    assert [row["personal"] for row in ablation] == [
        "nothing",
        "everything",
        "qkv, from a hypernetwork",
        "head",
    ]
    for name in ("distance.png", "similarity.png", "rollout.png", "attention.html"):
        assert (out / name).stat().st_size > 0


def test_parts_name_what_they_say():
    model = ViT(3, patch_size=4, dim=8, depth=1, heads=2, head_dim=4, mlp_dim=8)
    shapes = jax.eval_shape(
        tasks.classification(model, (8, 8, 1)).init, jax.random.key(0)
    )
    paths = {tree.path_name(p) for p, _ in jax.tree_util.tree_leaves_with_path(shapes)}
    block = "block_0/"
    assert {
        part: {path for path in paths if is_part(path)}
        for part, is_part in experiment.PARTS.items()
    } == {
        "qkv": {block + "attention/qkv"},
        "attention": {
            block + "attention/qkv",
            block + "attention/out/kernel",
            block + "attention/out/bias",
        },
        "mlps": {
            f"{block}mlp/{layer}/{leaf}"
            for layer in ("up", "down")
            for leaf in ("kernel", "bias")
        },
        "norms": {
            f"{norm}/{leaf}"
            for norm in (block + "attention_norm", block + "mlp_norm", "head_norm")
            for leaf in ("scale", "bias")
        },
        "head": {"head/kernel", "head/bias"},
    }


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--algorithms", "fedavg,local"], "fedtp is needed too"),
        (["--model", "cnn"], "needs images and a transformer"),
        (["--parts", "qkv,ears"], "parts is 'qkv,ears'"),
        (["--map-images", "0"], "map images is 0"),
    ],
)
def test_bad_input_is_refused(tmp_path, capsys, flags, said):
    assert experiment.main(["--out", str(tmp_path / "out"), *TINY, *flags]) == 2
    assert said in capsys.readouterr().err
