"""Quantized attention of clients and of language models; bundles; end to end."""

import csv
import json
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import export, fedtp, quantized_attention, sweep
from experiments.sweep import Found, Rule
from fedjax_tp.inference.export import flat_params, unflat_params
from fedjax_tp.io import pretrained
from fedjax_tp.models import bert

TINY = shlex.split(
    "--dataset digits --num-clients 5 --rounds 2 --eval-every 2 --local-epochs 1 "
    "--sample-fraction 0.4 --dim 8 --depth 2 --heads 2 --head-dim 4 --mlp-dim 8 "
    "--devices 1"
)
FEW = ("--thresholds", "1e-3,1e-1")
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tiny"
    arguments = [*TINY, "--algorithms", "fedtp,fedavg_ft", "--out", str(out)]
    assert fedtp.main(arguments) == 0
    return out


@pytest.fixture(scope="module", autouse=True)
def _few_bits():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "BITS", (2, 8))
        yield


def call(capsys, *arguments):
    code = quantized_attention.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def check_outputs(out):
    for name in ("sweep.png", "heads.png"):
        assert (out / name).read_bytes().startswith(PNG)
    assert "<table>" in (out / "report.html").read_text()
    rows = list(csv.DictReader((out / "sweep.csv").open()))
    assert [row["rule"] for row in rows] == [
        "full",
        "pruned at 0.001",
        "pruned at 0.1",
        "3 bits log, not pruned",
        "3 bits log, pruned at 0.001",
        "3 bits log, pruned at 0.1",
        "2 bits log, pruned at 0.001",
        "8 bits log, pruned at 0.001",
        "3 bits linear, pruned at 0.001",
        "2 bits linear, pruned at 0.001",
        "8 bits linear, pruned at 0.001",
        "all pruned",
    ]
    shares = [float(row["share_pruned"]) for row in rows]
    assert shares[0] == 0
    assert shares[1] <= shares[2]
    assert shares[3] <= shares[1]
    # Of the first layer it is the same; later layers see other states.
    assert shares[4] == pytest.approx(shares[1], abs=0.05)
    assert shares[-1] > 0.99
    return rows, json.loads((out / "summary.json").read_text())


def test_clients_of_a_run(run, tmp_path, capsys):
    out = tmp_path / "q"
    code, printed, _ = call(capsys, "clients", "--run", run, "--out", out, *FEW)
    assert code == 0
    rows, summary = check_outputs(out)
    # At full precision it is what the run itself measured.
    trained = json.loads((run / "summary.json").read_text())
    wanted = trained["algorithms"]["fedtp"]["accuracy"]["pooled"]
    assert float(rows[0]["accuracy"]) == pytest.approx(wanted, abs=1e-6)
    assert summary["full"] == pytest.approx(wanted, abs=1e-6)
    fidelity = list(csv.DictReader((out / "fidelity.csv").open()))
    assert sorted(int(row["client"]) for row in fidelity) == [0, 1, 2, 3, 4]
    differences = [float(row["difference"]) for row in fidelity]
    assert differences == sorted(differences)
    heads = list(csv.DictReader((out / "heads.csv").open()))
    assert len(heads) == len(rows) * 2 * 2
    assert (out / "values.png").read_bytes().startswith(PNG)
    assert "Fidelity" in printed
    code, _, error = call(capsys, "clients", "--run", run, "--out", out, *FEW)
    assert code == 2
    assert "is not empty" in error


def test_a_bundle_runs_without_the_library(run, tmp_path, capsys):
    out = tmp_path / "bundle"
    flags = ["--run", str(run), "--client", "2", "--out", str(out)]
    assert export.main(flags) == 0
    printed = capsys.readouterr().out
    assert "weights.safetensors: " in printed
    assert "forward.jax: " in printed
    examples = np.random.default_rng(0).integers(0, 17, (5, 8, 8, 1))
    np.save(tmp_path / "x.npy", examples)
    code = (
        "import sys, runpy; sys.modules['fedjax_tp'] = None; "
        f"sys.argv = ['reader', {str(tmp_path / 'x.npy')!r}, "
        f"{str(tmp_path / 'logits.npy')!r}]; "
        f"runpy.run_path({str(out / 'read_bundle.py')!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    )
    logits = np.load(tmp_path / "logits.npy")
    config = json.loads((out / "config.json").read_text())
    assert done.stdout.split() == [config["classes"][i] for i in logits.argmax(1)]
    # The same from the run, with everything built anew.
    from experiments import launch, trained
    from experiments.flags import DeviceFlags

    found = trained.load(run, "fedtp", launch.make_mesh(DeviceFlags(devices=1)))
    params = trained.params_of(found.algorithm, found.state, jax.numpy.int32(2))
    forward = export.make_forward(found, export.Flags())
    wanted = forward(params, jax.numpy.asarray(examples, "float32"))
    np.testing.assert_allclose(wanted, logits, atol=1e-5)
    saved = pretrained.read_tensors(out / "weights.safetensors")
    assert saved.keys() == flat_params(params).keys()
    again = unflat_params({name: jax.numpy.asarray(x) for name, x in saved.items()})
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert (out / "read_bundle.py").read_text().count("\n") <= 25
    assert export.main(flags) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "run is not given"),
        (["--run", "nowhere"], "run nowhere is no run folder"),
        (["--run", "RUN", "--algorithm", "moon"], "'moon', of which run"),
        (["--run", "RUN", "--algorithm", "fedavg_ft"], "adapt their model before"),
        (["--run", "RUN", "--bits", "9"], "bits is 9; allowed is 1 to 8"),
        (["--run", "RUN", "--thresholds", "1e-3,2"], "threshold is 2.0; allowed is 0"),
        (["--run", "RUN", "--thresholds", "0"], "allowed are different ones above 0"),
        (["--run", "RUN", "--thresholds", "x"], "allowed are numbers such as"),
        (["--run", "RUN", "--clients-at-a-time", "0"], "clients at a time is 0"),
    ],
)
def test_bad_flags_of_clients(run, capsys, arguments, message):
    arguments = [str(run) if a == "RUN" else a for a in arguments]
    code, _, error = call(capsys, "clients", *arguments)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"flags": {}},
            "is 'not there'; it is not the config of a run of this version",
        ),
        ({"flags": None}, "holds no flags"),
        ({"experiment": "new_clients"}, "holds a run of 'new_clients'; allowed is one"),
    ],
)
def test_folders_of_other_runs(run, tmp_path, capsys, change, message):
    config = json.loads((run / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, error = call(capsys, "clients", "--run", tmp_path)
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--client", "5"], "client is 5; allowed is 0 to 4"),
        (["--threshold", "1"], "threshold is 1.0; allowed is 0 or more"),
        (["--bits", "0"], "bits is 0; allowed is 1 to 8"),
        (["--algorithm", "local"], "of which run"),
    ],
)
def test_bad_flags_of_the_export(run, tmp_path, capsys, arguments, message):
    out = str(tmp_path / "bundle")
    assert export.main(["--run", str(run), "--out", out, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_subcommands(capsys):
    code, _, error = call(capsys, "translate")
    assert code == 2
    assert "allowed is one of clients, sentiment, qa" in error
    assert call(capsys)[0] == 0


def tiny_model(path):
    """A BERT of two layers, with a tokenizer of words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "where", "gold"]
    words += [f"w{i}" for i in range(20)]
    vocabulary = {word: i for i, word in enumerate(words)}
    found = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    )
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    content = {
        "model_type": "bert",
        "vocab_size": len(words),
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
        "hidden_dropout_prob": 0.0,
    }
    config = bert.config_from(content)
    params = bert.init(bert.Bert(config), jax.random.key(0))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(content))
    found.save(str(path / "tokenizer.json"))
    tensors = bert.tensors_from(params, config)
    pretrained.write_tensors(path / "model.safetensors", tensors, {})
    return path


def write_sentences(path, count, seed):
    rng = np.random.default_rng(seed)
    lines = ["sentence\tlabel"]
    for _ in range(count):
        label = int(rng.integers(2))
        words = [f"w{i}" for i in rng.integers(0, 20, rng.integers(1, 6))]
        words.insert(int(rng.integers(len(words) + 1)), ("bad", "good")[label])
        lines.append(f"{' '.join(words)}\t{label}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_sentiment_learns_is_saved_and_read_again(tmp_path, capsys):
    model = tiny_model(tmp_path / "model")
    learnt = write_sentences(tmp_path / "train.tsv", 300, 0)
    judged = write_sentences(tmp_path / "dev.tsv", 60, 1)
    out = tmp_path / "out"
    common = ["sentiment", "--validation", judged, *FEW]
    learning = ["--train", learnt, "--epochs", 6, "--learning-rate", 0.01]
    code, _, error = call(capsys, *common, "--model", model, *learning, "--out", out)
    assert (code, error) == (0, "")
    rows, summary = check_outputs(out)
    assert float(rows[0]["accuracy"]) > 0.95
    assert float(rows[-1]["accuracy"]) < 0.8
    assert summary["full"] == float(rows[0]["accuracy"])
    again = tmp_path / "again"
    code, printed, _ = call(capsys, *common, "--model", out / "model", "--out", again)
    assert code == 0
    assert "fine-tuned" not in printed
    assert (again / "sweep.csv").read_text() == (out / "sweep.csv").read_text()


def test_sentiment_with_a_frozen_encoder(tmp_path, capsys):
    model = tiny_model(tmp_path / "model")
    learnt = write_sentences(tmp_path / "train.tsv", 40, 0)
    flags = ["--train", learnt, "--validation", learnt, "--examples", 30]
    code, printed, _ = call(
        capsys, "sentiment", "--model", model, *flags, "--layers", 0, *FEW,
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert code == 0
    assert "frozen part computed" in printed
    assert "30 texts, 1 steps" in printed
    _, before = pretrained.read_model(model)
    content, after = pretrained.read_model(tmp_path / "out" / "model")
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[name])
    drawn = bert.init(
        bert.Bert(bert.config_from(content), labels=2, pools=False), jax.random.key(0)
    )
    assert (drawn["head"]["kernel"] != after["classifier.weight"].T).all()


def write_questions(path):
    """The answer is the word after gold: without attention it cannot be found."""
    rng = np.random.default_rng(0)
    data = []
    for article in range(4):
        paragraphs = []
        for number in range(40):
            words = [f"w{i}" for i in rng.permutation(20)[:5]]
            place = int(rng.integers(4))
            words.insert(place, "gold")
            start = len(" ".join(words[: place + 1])) + 1
            answers = [{"text": words[place + 1], "answer_start": start}]
            asked = {"id": f"{article}-{number}", "question": "where gold"}
            context = {"context": " ".join(words)}
            paragraphs.append(context | {"qas": [asked | {"answers": answers}]})
        data.append({"paragraphs": paragraphs})
    path.write_text(json.dumps({"data": data}))
    return path


def test_answers_are_found(tmp_path, capsys):
    model = tiny_model(tmp_path / "model")
    asked = write_questions(tmp_path / "q.json")
    out = tmp_path / "out"
    flags = ["--questions", asked, "--length", 96, "--stride", 16, *FEW]
    code, printed, error = call(
        capsys, "qa", "--model", model, *flags, "--held-out", 0.25, "--epochs", 30,
        "--batch-size", 20, "--learning-rate", 0.01, "--out", out,
    )  # fmt: skip
    assert (code, error) == (0, "")
    rows, summary = check_outputs(out)
    assert summary["questions"] == 40
    assert "120 texts" in printed
    # On an article that was not learnt from.
    assert float(rows[0]["F1"]) > 0.5
    assert summary["exact_match"]["full"] == pytest.approx(float(rows[0]["F1"]))
    assert float(rows[-1]["F1"]) < float(rows[0]["F1"]) - 0.2
    answers = json.loads((out / "answers.json").read_text())
    assert len(answers) == 40
    again = tmp_path / "again"
    code, printed, _ = call(
        capsys, "qa", "--model", out / "model", *flags, "--out", again
    )
    assert code == 0
    assert "fine-tuned" not in printed
    assert len(json.loads((again / "answers.json").read_text())) == 160


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sentiment"], "validation is not given"),
        (["sentiment", "--epochs", "0"], "epochs is 0; allowed is 1 or more"),
        (["sentiment", "--learning-rate", "2"], "learning rate is 2.0; allowed"),
        (["sentiment", "--validation", "DEV", "--model", "gone"], "is not there"),
        (
            ["sentiment", "--validation", "DEV", "--model", "MODEL"],
            "train is not given, and the model has no classifier",
        ),
        (
            ["sentiment", "--validation", "DEV", "--model", "MODEL", "--layers", "3"],
            "layers is 3; allowed is 0 to 2",
        ),
        (
            [
                "sentiment",
                "--validation",
                "DEV",
                "--model",
                "MODEL",
                "--longest",
                "200",
            ],
            "longest is 200; allowed is 3 to 128",
        ),
        (["qa"], "questions is not given"),
        (["qa", "--questions", "DEV"], "cannot read"),
        (["qa", "--questions", "Q", "--model", "MODEL"], "length is 384; the model"),
        (["qa", "--questions", "Q", "--held-out", "1"], "held out is 1.0; allowed"),
    ],
)
def test_bad_flags_of_language_models(tmp_path, capsys, arguments, message):
    made = {
        "DEV": lambda: write_sentences(tmp_path / "dev.tsv", 3, 0),
        "MODEL": lambda: tiny_model(tmp_path / "model"),
        "Q": lambda: write_questions(tmp_path / "q.json"),
    }
    code, _, error = call(capsys, *(made[a]() if a in made else a for a in arguments))
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_the_most_pruned_within_the_allowed_loss():
    def found(bits, threshold, score, share, is_log=True):
        return Found(Rule(bits, threshold, is_log), score, np.full((1, 1), share))

    sweeped = [
        Found(sweep.FULL, 0.9, np.zeros((1, 1))),
        found(3, 1e-3, 0.9, 0.3),
        found(3, 1e-2, 0.8920, 0.5),
        found(3, 1e-1, 0.8909, 0.9),
        found(3, 2e-1, 0.9, 0.99, is_log=False),
    ]
    assert sweep.best_within_loss(sweeped, 3) == sweeped[2]
    assert sweep.best_within_loss(sweeped, 4) is None
    assert sweep.relative_loss(sweeped[3], sweeped[0]) == pytest.approx(
        0.0101, abs=1e-4
    )


def test_rules_of_a_kind_share_a_program():
    traces = []

    def make(attention_of):
        def function(bits, threshold):
            traces.append(1)
            return bits + threshold

        return function

    apply = sweep.by_kind(make)
    for rule in sweep.rules(3, (1e-3, 1e-2)):
        apply(rule)
    assert len(traces) == 3
