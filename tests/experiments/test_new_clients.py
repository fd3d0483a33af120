"""New clients as a user runs it."""

import csv
import json
import shlex

import numpy as np
import pytest

from experiments import new_clients
from fedjax_tp.data.partition import Partition

TINY = shlex.split(
    "--num-clients 6 --held-out 0.34 --sample-fraction 0.5 --rounds 2 --eval-every 2 "
    "--local-epochs 1 --dim 8 --depth 1 --heads 2 --head-dim 4 --mlp-dim 8 "
    "--patch-size 4 --hypernetwork.hidden 8 --hypernetwork.embedding-dim 4 "
    "--devices 1 --no-tune-process --encoder-steps 2 --samples 8,all "
    "--fit-steps 0,1,4"
)


def test_new_clients_join_by_every_way_their_methods_allow(tmp_path):
    out = tmp_path / "run"
    assert new_clients.main(["--out", str(out), *TINY]) == 0
    rows = list(csv.DictReader((out / "new_clients.csv").open()))
    methods = [
        "fedtp: embedding",
        "fedtp: encoder, embedding",
        "fedavg: fine-tuning",
        "local training",
    ]
    keys = [(row["method"], row["samples"], row["steps"]) for row in rows]
    assert keys == [
        (m, n, s) for m in methods for n in ("8", "all") for s in ("0", "1", "4")
    ]
    accuracy = dict(zip(keys, (float(row["accuracy"]) for row in rows), strict=True))
    # Before a step the number of examples is no matter, but to the encoder.
    for method in (methods[0], *methods[2:]):
        assert accuracy[method, "8", "0"] == accuracy[method, "all", "0"]
    assert json.loads((out / "new_clients.json").read_text())["clients"] == 2
    for name in ("new_clients.png", "new_clients.html", "report.html"):
        assert (out / name).stat().st_size > 0
    # Who joins later took no part: four clients are left to train.
    held = json.loads((out / "partition.json").read_text())
    assert len(held["train"]) == 4


def test_clients_are_split_in_two_by_the_seed():
    parts = tuple(np.array([i]) for i in range(10))
    both = [
        new_clients.split_clients(Partition(parts, parts), 0.3, 0, is_new=is_new)
        for is_new in (True, False)
    ]
    held = [[int(part[0]) for part in split.train] for split in both]
    assert [len(clients) for clients in held] == [3, 7]
    assert sorted(held[0] + held[1]) == list(range(10))
    other = new_clients.split_clients(Partition(parts, parts), 0.3, 1, is_new=True)
    assert [int(part[0]) for part in other.train] != held[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--held-out", "1"], "held out is 1.0; allowed is 0 < held out < 1"),
        (["--held-out", "0.01"], "which is 0; allowed is 1 to 5"),
        (["--fit-steps", "0,5,5"], "fit steps is '0,5,5'"),
        (["--fit-steps", "a"], "fit steps is 'a'"),
        (["--samples", "0"], "samples is '0'"),
        (["--seeds", "2"], "seeds is 2; allowed is 1"),
        (["--embedding-lr", "nan"], "embedding lr is nan"),
        (["--algorithms", "scaffold"], "scaffold: it is not known what"),
    ],
)
def test_bad_input_is_refused(tmp_path, capsys, flags, said):
    assert new_clients.main(["--out", str(tmp_path / "out"), *TINY, *flags]) == 2
    assert said in capsys.readouterr().err
