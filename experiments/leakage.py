"""What does one client's update tell of its images, and which part of it tells most?

    python -m experiments.leakage

audits a ViT and a CNN: it seeks images whose gradient points where a client's update
does, against the number of images and of local steps, against codecs, and for the ViT
from the query, key and value projections alone, which FedTP sends as each client's own,
and from all but those; from initial models and from trained ones. Beside it, what a
linear model gives away exactly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial as bind
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments import cli, lab, setup
from experiments.flags import LabFlags, ModelFlags, SourceFlags
from experiments.lab import Arrays, Figures, Lab
from fedjax_tp import tree
from fedjax_tp.algorithms import ClientOptimizer
from fedjax_tp.algorithms.compression import Codec, sign, topk, transmit_all, uniform
from fedjax_tp.analysis import leakage
from fedjax_tp.data import catalog
from fedjax_tp.data.federated import normalized
from fedjax_tp.io import plots, report
from fedjax_tp.models import task as tasks
from fedjax_tp.models.attention import is_attention_projection
from fedjax_tp.models.task import Task
from fedjax_tp.types import Batch, InputError, Params

EXPERIMENT = "leakage"
_ungrouped = tyro.conf.arg(name="")
_MODELS = ("vit", "cnn")


@dataclass(frozen=True)
class Flags:
    """Flags of the experiment."""

    source: Annotated[SourceFlags, _ungrouped] = SourceFlags()
    model: Annotated[ModelFlags, _ungrouped] = ModelFlags(
        dim=32, depth=1, heads=2, mlp_dim=64
    )
    lab: Annotated[LabFlags, _ungrouped] = LabFlags()
    models: str = ",".join(_MODELS)
    """vit, cnn or both; --model is not used."""
    images: int = 4
    """Updates that are audited in each case, of images of different classes."""
    batch_sizes: str = "1,2,4"
    """Images that an update is of."""
    local_steps: str = "1,2,4"
    """Steps of SGD on the same images; the attacker takes them for one."""
    client_lr: float = 0.02
    """Step size of those, and of the training before."""
    epochs: int = 10
    """Passes over the training examples before the update, in the cases of a trained
    model; 0 leaves those out."""
    examples: int = 5000
    """Most training examples of those."""
    attack_steps: int = 400
    """Steps of the search."""
    smoothness: float = 0.01
    """Weight of the total variation."""


class Case(NamedTuple):
    """One row of the audit.

    Attributes:
      model: vit or cnn.
      batch_size, local_steps: of the update.
      codec: none, or the name of one.
      part: of the update that is seen: all, qkv, or all but qkv.
      is_trained: does the model know the task already? Else it is the initial one.
    """

    model: str
    batch_size: int = 1
    local_steps: int = 1
    codec: str = "none"
    part: str = "all"
    is_trained: bool = False

    @property
    def label(self) -> str:
        """What is not as in the plain case."""
        found = []
        if self.batch_size > 1:
            found.append(f"{self.batch_size} images")
        if self.local_steps > 1:
            found.append(f"{self.local_steps} steps")
        if self.codec != "none":
            found.append(self.codec)
        if self.part != "all":
            found.append(self.part)
        if self.is_trained:
            found.append("trained")
        return ", ".join(found) or "one image, one step"


_CODECS: dict[str, Callable[[], Codec]] = {
    "uniform 4": lambda: uniform(4),
    "sign": sign,
    "topk 5%": lambda: topk(0.05),
}
_PARTS: dict[str, Callable[[Params], Params]] = {
    "all": lambda gradient: gradient,
    "qkv": lambda gradient: tree.split(gradient, is_attention_projection)[0],
    "all but qkv": lambda gradient: tree.split(gradient, is_attention_projection)[1],
}


def run(flags: Flags) -> None:
    """Runs the experiment.

    Raises:
      InputError: a flag, the data or the run folder does not allow it.
      Interrupted: told to stop; the finished parts are saved.
    """
    cli.check_counts(flags, "images", "attack_steps", "examples")
    if flags.epochs < 0:
        raise InputError(f"epochs is {flags.epochs}; allowed is 0 or more")
    lab.check_seed(flags.lab)
    models = lab.parse_list("models", flags.models, str)
    if not set(models) <= set(_MODELS):
        raise InputError(
            f"models is {flags.models!r}; allowed are some of {', '.join(_MODELS)}"
        )
    sizes = lab.parse_list("batch sizes", flags.batch_sizes, int)
    steps = lab.parse_list("local steps", flags.local_steps, int)
    for name, values in (("batch sizes", sizes), ("local steps", steps)):
        if min(values) < 1:
            raise InputError(f"{name} is {values}; allowed is 1 or more")
    for name in ("client_lr", "smoothness"):
        value = getattr(flags, name)
        if not 0 <= value < float("inf") or (name == "client_lr" and value == 0):
            raise InputError(
                f"{name.replace('_', ' ')} is {value}; allowed are finite numbers "
                "above 0"
            )
    mesh = lab.make_mesh(flags.lab)
    dataset = lab.load_images(flags.source, EXPERIMENT)
    classes = len(np.unique(dataset.y_test))
    if max(sizes) > classes:
        raise InputError(
            f"batch sizes is {sizes}; images of a batch are of different classes, of "
            f"which there are {classes} among the test examples"
        )
    made = {name: make_task(flags, name, dataset) for name in models}
    cases = cases_of(models, sizes, steps, with_trained=flags.epochs > 0)
    with lab.open_lab(EXPERIMENT, flags, flags.lab, dataset, mesh) as place:
        found, pictures = {}, {}
        initial = {name: initial_params(flags, task) for name, task in made.items()}
        trained, accuracies = {}, {}
        for name in made if flags.epochs else ():
            figures, arrays = lab.part(
                place,
                f"{name}-training",
                {},
                bind(train, place, flags, dataset, made[name]),
            )
            trained[name] = lab.unflat_params(arrays["params"], initial[name])
            accuracies[name] = figures["accuracy"]
        for case in cases:
            start = trained if case.is_trained else initial
            name = f"{case.model}-{case.label}".replace(" ", "-").replace(",", "")
            figures, arrays = lab.part(
                place,
                name.replace("%", ""),
                {"attack_steps": flags.attack_steps},
                bind(audit, flags, dataset, made[case.model], start[case.model], case),
            )
            place.console.print(
                f"{case.model}, {case.label}: PSNR {np.mean(figures['psnr']):.1f} dB, "
                f"gradient distance {np.mean(figures['distance']):.4f}"
            )
            found[case], pictures[case] = figures, arrays
        exact, _ = lab.part(place, "exact", {}, bind(audit_exactly, flags, dataset))
        write(place, flags, dataset, found, pictures, exact, accuracies)


def make_task(flags: Flags, name: str, dataset: catalog.Dataset) -> Task:
    """The ViT of the model's flags, or the LeNet."""
    kind: Any = name
    model = replace(flags.model, model=kind, dropout=0.0)
    return setup.make_task(model, dataset.x_train.shape[1:], dataset.num_classes)


def initial_params(flags: Flags, task: Task) -> Params:
    """Of the model, by the seed; those that training begins at."""
    return jax.jit(task.init)(lab.initial_key(flags.lab.seed))


def train(
    place: Lab, flags: Flags, dataset: catalog.Dataset, task: Task
) -> tuple[Figures, Arrays]:
    """A model that knows the task, and how well."""
    rng = np.random.default_rng(flags.lab.seed)
    count = min(flags.examples, len(dataset.y_train))
    trained = lab.train_centrally(
        place,
        task,
        ClientOptimizer(flags.client_lr, 0.9),
        dataset,
        np.sort(rng.choice(len(dataset.y_train), count, replace=False)),
        seed=flags.lab.seed,
        epochs=flags.epochs,
    )
    return (
        {"accuracy": trained.accuracy},
        {"params": lab.flat_params(trained.params)},
    )


def cases_of(
    models: Sequence[str],
    sizes: Sequence[int],
    steps: Sequence[int],
    *,
    with_trained: bool,
) -> list[Case]:
    """The plain case of each model, and what differs from it in one thing."""
    cases = []
    for model in models:
        cases.append(Case(model))
        cases += [Case(model, batch_size=size) for size in sizes if size > 1]
        cases += [Case(model, local_steps=count) for count in steps if count > 1]
        cases += [Case(model, codec=codec) for codec in _CODECS]
        if model == "vit":
            cases += [Case(model, part=part) for part in _PARTS if part != "all"]
        if with_trained:
            parts = _PARTS if model == "vit" else ["all"]
            cases += [Case(model, part=part, is_trained=True) for part in parts]
    return cases


def chosen_images(
    flags: Flags, dataset: catalog.Dataset, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels, `[images, batch, ...]`: of different classes in a batch, the
    first of each the same whatever the batch. Test examples, so that a trained model
    has seen none of them."""
    rng = np.random.default_rng(flags.lab.seed)
    by_class = [
        rng.permutation(np.flatnonzero(dataset.y_test == label))
        for label in np.unique(dataset.y_test)
    ]
    classes = len(by_class)
    rows = np.array(
        [
            [
                own[i // classes % len(own)]
                for own in (by_class[(i + j) % classes] for j in range(batch_size))
            ]
            for i in range(flags.images)
        ]
    )
    return normalized(dataset.x_test[rows], dataset), dataset.y_test[rows]


def range_of(dataset: catalog.Dataset) -> tuple[float, float]:
    """The smallest and the largest pixel, as models see them."""
    x = dataset.x_train
    low = normalized(x.min(axis=(0, 1, 2)), dataset)
    high = normalized(x.max(axis=(0, 1, 2)), dataset)
    return float(low.min()), float(high.max())


def audit(
    flags: Flags, dataset: catalog.Dataset, task: Task, params: Params, case: Case
) -> tuple[Figures, Arrays]:
    """Seeks the images of some updates; figures are means over the images of each."""
    images, labels = chosen_images(flags, dataset, case.batch_size)
    low, high = range_of(dataset)
    attack = leakage.Attack(
        flags.attack_steps, 0.1, flags.smoothness, low=low, high=high
    )
    codec_key, key = jax.random.split(jax.random.key(flags.lab.seed))

    def update(x: jax.Array, y: jax.Array, key: jax.Array) -> Params:
        batch = Batch(x, y, jnp.ones(len(y), bool))
        slope = jax.grad(lambda p: task.loss_of(task.apply(p, x), batch))

        def step(_: jax.Array, p: Params) -> Params:
            return jax.tree.map(lambda w, g: w - flags.client_lr * g, p, slope(p))

        end = jax.lax.fori_loop(0, case.local_steps, step, params)
        sent = jax.tree.map(jnp.subtract, params, end)
        if case.codec == "none":
            return sent
        return transmit_all(_CODECS[case.codec](), key, sent)

    @jax.jit
    def search(
        x: jax.Array, y: jax.Array, codec_key: jax.Array, key: jax.Array
    ) -> leakage.Reconstruction:
        return leakage.reconstruct(
            task,
            params,
            update(x, y, codec_key),
            y,
            dataset.x_train.shape[1:],
            key,
            attack,
            _PARTS[case.part],
        )

    figures: Figures = {"psnr": [], "distance": []}
    shown = []
    for i, (x, y) in enumerate(zip(images, labels, strict=True)):
        found = search(
            jnp.asarray(x),
            jnp.asarray(y),
            jax.random.fold_in(codec_key, i),
            jax.random.fold_in(key, i),
        )
        figures["psnr"].append(float(_psnr(found.images, x, high - low).mean()))
        figures["distance"].append(float(found.distance))
        shown.append(np.asarray(found.images[0]))
    return figures, {"images": np.stack(shown), "true": images[:, 0]}


def _psnr(found: Any, true: np.ndarray, span: float) -> np.ndarray:
    pairs = zip(np.asarray(found), true, strict=True)
    return np.array(
        [leakage.psnr(jnp.asarray(f), jnp.asarray(t), span) for f, t in pairs]
    )


def audit_exactly(flags: Flags, dataset: catalog.Dataset) -> tuple[Figures, Arrays]:
    """What the gradient of softmax regression gives away of one image, and how near
    the mean image of the data comes without any gradient."""
    images, labels = chosen_images(flags, dataset, 1)
    low, high = range_of(dataset)
    size, classes = images[0].size, dataset.num_classes
    kernel = 0.1 * jax.random.normal(jax.random.key(flags.lab.seed), (size, classes))

    @jax.jit
    def gradient(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(weights: tuple[jax.Array, jax.Array]) -> jax.Array:
            return tasks.cross_entropy(x @ weights[0] + weights[1], y)

        return jax.grad(loss)((kernel, jnp.zeros(classes)))

    mean = normalized(dataset.x_train.mean(axis=0), dataset)
    figures: Figures = {"error": [], "mean_image": []}
    for x, y in zip(images[:, 0], labels[:, 0], strict=True):
        found = leakage.input_of_linear(*gradient(jnp.asarray(x.ravel()), jnp.array(y)))
        figures["error"].append(float(np.abs(found - x.ravel()).max()))
        figures["mean_image"].append(float(_psnr(mean[None], x[None], high - low)[0]))
    return figures, {}


def write(
    place: Lab,
    flags: Flags,
    dataset: catalog.Dataset,
    found: Mapping[Case, Figures],
    images: Mapping[Case, Arrays],
    exact: Figures,
    accuracies: Mapping[str, float],
) -> None:
    """The table, the pictures and the numbers."""
    pictures = {
        "The first images, and what was found": place.out / "images.png",
        "How much is found": place.out / "psnr.png",
    }
    image_file, psnr_file = pictures.values()
    first = next(iter(images.values()))
    plots.image_rows(
        image_file,
        {"true": first["true"]}
        | {f"{c.model}: {c.label}": own["images"] for c, own in images.items()},
        range_of(dataset),
    )
    blind = float(np.mean(exact["mean_image"]))
    plots.bars(
        psnr_file,
        {
            model: {
                "": {
                    case.label: float(np.mean(own["psnr"]))
                    for case, own in found.items()
                    if case.model == model
                }
            }
            for model in dict.fromkeys(case.model for case in found)
        },
        y="PSNR, dB (line: the mean image)",
        line=blind,
    )
    rows = [
        [
            case.model,
            case.label,
            f"{np.mean(own['psnr']):.1f}",
            f"{np.mean(own['distance']):.4f}",
        ]
        for case, own in found.items()
    ]
    table = report.Table(
        f"What is found of an image: PSNR in dB (the mean image has {blind:.1f})",
        ["model", "update", "PSNR", "gradient distance"],
        rows,
    )
    words = [f"{name} {100 * value:.1f}%" for name, value in accuracies.items()]
    shown = f" (test accuracy: {', '.join(words)})" if words else ""
    lab.finish(
        place,
        EXPERIMENT,
        flags,
        title=f"What updates tell of images, on {dataset.name}",
        summary=f"{flags.images} updates in each case, from initial parameters but "
        f"where a model is said to be trained{shown}, {flags.attack_steps} steps of "
        "the search, labels known. Softmax regression gives one image away exactly: "
        f"the largest error of a pixel is {max(exact['error']):.1e}.",
        content={
            "cases": [case._asdict() | own for case, own in found.items()],
            "exact": exact,
            "accuracies": accuracies,
        },
        tables=[table],
        pictures=pictures,
        notices=dataset.notices,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.experiment_main(
        run,
        Flags(),
        argv,
        name=EXPERIMENT,
        description=__doc__,
        normalize=lab.with_absolute_paths,
    )


if __name__ == "__main__":
    raise SystemExit(main())
