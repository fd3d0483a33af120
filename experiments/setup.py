"""From flags to a federated data set on the device, the task, and the run folder."""

import dataclasses
import itertools
import json
import platform
import shlex
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import Mesh

from experiments.cli import check_counts, to_flat
from experiments.flags import (
    DataFlags,
    ModelFlags,
    RunFlags,
    TrainingFlags,
    TrainingRunFlags,
)
from experiments.launch import replicate
from fedjax_tp.algorithms import ClientOptimizer, Setting, check_setting
from fedjax_tp.data import catalog, partition, shift
from fedjax_tp.data.federated import FederatedDataset, federate
from fedjax_tp.io import folder, metrics
from fedjax_tp.models import task as tasks
from fedjax_tp.models.attention import AttentionFunction
from fedjax_tp.models.char_transformer import CharTransformer
from fedjax_tp.models.cnn import LeNet
from fedjax_tp.models.lstm import CharLSTM
from fedjax_tp.models.vit import ViT, check_patch_size
from fedjax_tp.simulation.cohort import LocalSchedule
from fedjax_tp.simulation.rounds import cohort_size
from fedjax_tp.types import InputError

DEFAULT_CLIENTS = 20
_FEWEST_PATCHES = 16


class Setup(NamedTuple):
    """A data set dealt to clients and on the device, with the task it poses.

    There is a partition a seed; with several, those of `train` and `test` are stacked.
    """

    dataset: catalog.Dataset
    seeds: tuple[int, ...]
    partitions: tuple[partition.Partition, ...]
    train: FederatedDataset
    test: FederatedDataset
    task: tasks.Task
    cohort: int
    schedule: LocalSchedule
    notices: tuple[str, ...]
    kept_on_host: bool = False

    @property
    def num_clients(self) -> int:
        return self.partitions[0].num_clients

    @property
    def test_capacity(self) -> int:
        """Test examples of the largest client."""
        return max(len(part) for parts in self.partitions for part in parts.test)


def check_flags(data: DataFlags, training: TrainingFlags, run: RunFlags) -> None:
    """Raises InputError for values that no data could make valid."""
    check_counts(
        training, "rounds", "local_epochs", "batch_size", "lanes", "chunk_size"
    )
    check_counts(run, "seeds", "eval_every", "checkpoint_every", "metric_from")
    if run.metric_from is not None and run.metric_from > training.rounds:
        raise InputError(
            f"metric from is {run.metric_from}; allowed is 1 to {training.rounds}, "
            "the rounds"
        )
    if not 0 <= run.seed <= 2**32 - run.seeds:
        raise InputError(f"seed is {run.seed}; allowed is 0 to {2**32 - run.seeds}")
    clients = DEFAULT_CLIENTS if data.num_clients is None else data.num_clients
    cohort_size(clients, training.sample_fraction)
    if data.shift is not None:
        shift.parse(data.shift)
    partition.check_settings(_request(data, np.zeros(0, int), 1, clients, None))


def check_one_seed(run: RunFlags) -> None:
    """Raises InputError for several seeds, in an experiment that takes one."""
    if run.seeds != 1:
        raise InputError(f"seeds is {run.seeds}; allowed is 1, with any --seed")


def _request(
    data: DataFlags,
    labels: np.ndarray,
    num_classes: int,
    num_clients: int,
    superclass: np.ndarray | None,
) -> partition.Request:
    return partition.Request(
        labels,
        num_classes,
        num_clients,
        alpha=data.alpha,
        classes_per_client=data.classes_per_client,
        min_examples=data.min_examples,
        superclass=superclass,
    )


def make_setup(
    data: DataFlags,
    model: ModelFlags,
    training: TrainingFlags,
    run: RunFlags,
    mesh: Mesh,
    *,
    select: Callable[[partition.Partition], partition.Partition] = lambda parts: parts,
) -> Setup:
    """Loads, deals and places the data, and builds the task.

    Args:
      data, model, training, run: flags.
      mesh: the devices.
      select: which of the clients that the data is dealt to take part.

    Raises:
      InputError: anything that the data, the partition or the model does not allow.
    """
    dataset = _load(data)
    seeds = tuple(range(run.seed, run.seed + run.seeds))
    dealt = tuple(deal_to_clients(data, dataset, seed) for seed in seeds)
    partitions = tuple(map(select, dealt))
    num_clients = partitions[0].num_clients
    task = make_task(model, dataset.x_train.shape[1:], dataset.num_classes)
    shown, placed = dataset, partitions
    if data.shift is not None:
        # By a client's number among all: whoever takes part, its images are the same.
        shown, placed = _shifted(dataset, dealt, data.shift, seeds)
        placed = tuple(map(select, placed))
    train, test = (
        replicate(federate(shown, split, [getattr(p, split) for p in placed]), mesh)
        for split in ("train", "test")
    )
    cohort = cohort_size(num_clients, training.sample_fraction)
    capacity = max(len(part) for parts in partitions for part in parts.train)
    schedule = LocalSchedule(
        # A batch larger than any client would be padding alone.
        batch_size=min(training.batch_size, capacity),
        local_epochs=training.local_epochs,
        capacity=capacity,
        lanes=training.lanes or default_lanes(cohort * len(seeds), mesh),
        mesh=mesh,
    )
    notices = dataset.notices
    for seed, parts in zip(seeds, partitions, strict=True):
        without_test = [i for i, part in enumerate(parts.test) if len(part) == 0]
        if len(without_test) == num_clients:
            raise InputError("no client has a test example; nothing could be measured")
        if without_test:
            named = ", ".join(map(str, without_test[:10]))
            more = ", ..." if len(without_test) > 10 else ""
            of_seed = f" (seed {seed})" if len(seeds) > 1 else ""
            notices += (
                f"{len(without_test)} clients{of_seed} have no test example and are "
                f"left out of the figures over clients: {named}{more}",
            )
    return Setup(
        dataset, seeds, partitions, train, test, task, cohort, schedule, notices
    )


def make_setting(flags: TrainingRunFlags, prepared: Setup) -> Setting:
    """All that algorithms are built from.

    Raises:
      InputError: a value that some algorithm would refuse.
    """
    label_counts = None
    if len(prepared.seeds) == 1:
        label_counts = partition.label_counts(
            prepared.partitions[0].train,
            prepared.dataset.y_train,
            prepared.dataset.num_classes,
        )
    setting = Setting(
        prepared.task,
        prepared.num_clients,
        ClientOptimizer(
            flags.training.client_lr,
            flags.training.client_momentum,
            flags.training.client_weight_decay,
        ),
        flags.hypernetwork,
        flags.server,
        flags.method,
        label_counts,
    )
    check_setting(setting)
    return setting


def default_lanes(cohort: int, mesh: Mesh) -> int:
    """Clients at a time on a device if memory is no matter.

    One on CPU, where two would only push each other out of the caches; on accelerators
    all that a device gets.
    """
    return 1 if jax.default_backend() == "cpu" else -(-cohort // mesh.size)


def _load(data: DataFlags) -> catalog.Dataset:
    dataset = catalog.load(
        data.dataset,
        data.data_dir,
        sequence_length=data.sequence_length,
        stride=data.stride,
    )
    return catalog.hold_out(dataset) if data.validation else dataset


def _shifted(
    dataset: catalog.Dataset,
    partitions: Sequence[partition.Partition],
    kind: str,
    seeds: Sequence[int],
) -> tuple[catalog.Dataset, tuple[partition.Partition, ...]]:
    """The images as each seed's clients have them, one seed's after the other's."""
    found = [
        shift.apply(dataset, parts, kind, seed=seed)
        for parts, seed in zip(partitions, seeds, strict=True)
    ]
    every = dataset._replace(
        x_train=np.concatenate([d.x_train for d in found]),
        y_train=np.concatenate([d.y_train for d in found]),
        x_test=np.concatenate([d.x_test for d in found]),
        y_test=np.concatenate([d.y_test for d in found]),
    )
    sizes = len(dataset.y_train), len(dataset.y_test)
    placed = tuple(
        partition.Partition(
            *(
                tuple(part + i * size for part in parts)
                for parts, size in zip(of_seed, sizes, strict=True)
            )
        )
        for i, of_seed in enumerate(partitions)
    )
    return every, placed


def deal_to_clients(
    data: DataFlags, dataset: catalog.Dataset, seed: int
) -> partition.Partition:
    """The partition that the flags ask for."""
    owners = dataset.owners
    scheme = data.partition or ("pathological" if owners is None else "natural")
    if scheme == "natural":
        if owners is None:
            raise InputError(
                f"partition natural needs data that says who holds what; "
                f"{dataset.name} does not (allowed are "
                f"{', '.join([*partition.SCHEMES, 'file:PATH'])})"
            )
        return partition.natural(
            (owners.train, owners.test),
            len(owners.names),
            data.num_clients,
            seed=seed,
        )
    if scheme.startswith("file:"):
        return partition.read_partition(
            scheme.removeprefix("file:"),
            len(dataset.y_train),
            len(dataset.y_test),
            data.num_clients,
        )
    request = _request(
        data,
        dataset.y_train,
        dataset.num_classes,
        DEFAULT_CLIENTS if data.num_clients is None else data.num_clients,
        dataset.superclass,
    )
    return partition.make_partition(scheme, request, dataset.y_test, seed=seed)


_MODELS = {"text": ("char_transformer", "lstm"), "images": ("vit", "cnn", "cnn_bn")}


def make_task(
    flags: ModelFlags, example_shape: tuple[int, ...], num_classes: int
) -> tasks.Task:
    """The task of the model that the flags ask for; see `make_module`."""
    module = make_module(flags, example_shape, num_classes)
    if len(example_shape) == 1:
        return tasks.next_character(module, example_shape[0])
    return tasks.classification(module, example_shape)


def make_module(
    flags: ModelFlags,
    example_shape: tuple[int, ...],
    num_classes: int,
    attend: AttentionFunction | None = None,
) -> nn.Module:
    """The model that the flags ask for, fitted to the examples.

    Args:
      flags: which model, and its sizes.
      example_shape: `[height, width, channels]` of images, `[length]` of texts.
      num_classes: labels, or characters.
      attend: what a transformer uses instead of full attention.

    Raises:
      InputError: a size that is not allowed, or a model that is not for such data.
    """
    kind = "text" if len(example_shape) == 1 else "images"
    name = _MODELS[kind][0] if flags.model == "auto" else flags.model
    if name not in _MODELS[kind]:
        raise InputError(
            f"model is {name}, and the data is {kind}; allowed is "
            f"{' or '.join(_MODELS[kind])}"
        )
    for field in ("dim", "depth", "heads", "head_dim", "mlp_dim"):
        if getattr(flags, field) < 1:
            raise InputError(
                f"{field} is {getattr(flags, field)}; allowed is 1 or more"
            )
    if not 0 <= flags.dropout < 1:
        raise InputError(f"dropout is {flags.dropout}; allowed is 0 <= dropout < 1")
    if kind == "images":
        return _image_model(name, flags, example_shape, num_classes, attend)
    if name == "lstm":
        return CharLSTM(num_classes)
    return CharTransformer(
        num_classes,
        dim=flags.dim,
        depth=flags.depth,
        heads=flags.heads,
        head_dim=flags.head_dim,
        mlp_dim=flags.mlp_dim,
        dropout=flags.dropout,
        attend=attend,
    )


def _image_model(
    name: str,
    flags: ModelFlags,
    image_shape: tuple[int, ...],
    num_classes: int,
    attend: AttentionFunction | None,
) -> nn.Module:
    height, width, _ = image_shape
    if name in ("cnn", "cnn_bn"):
        return LeNet(num_classes, batch_norm=name == "cnn_bn")
    patch_size = flags.patch_size
    if patch_size is None:
        patch_size = _fitting_patch_size(height, width)
    check_patch_size(patch_size, height, width)
    return ViT(
        num_classes=num_classes,
        patch_size=patch_size,
        dim=flags.dim,
        depth=flags.depth,
        heads=flags.heads,
        head_dim=flags.head_dim,
        mlp_dim=flags.mlp_dim,
        dropout=flags.dropout,
        attend=attend,
    )


def _fitting_patch_size(height: int, width: int) -> int:
    """The largest patch that tiles the image in at least 16 patches, else 1."""
    return max(
        (
            p
            for p in range(1, min(height, width) + 1)
            if height % p == 0
            and width % p == 0
            and (height // p) * (width // p) >= _FEWEST_PATCHES
        ),
        default=1,
    )


def absolute_paths(data: DataFlags) -> DataFlags:
    """The same flags with absolute paths, so that a run resumes from anywhere."""
    return dataclasses.replace(
        absolute_source(data),
        partition=data.partition and _resolved(data.partition, ("file",)),
    )


def absolute_source(data: Any) -> Any:
    """Flags with a data set and a `data_dir`, these with absolute paths."""
    return dataclasses.replace(
        data,
        dataset=_resolved(data.dataset, ("npz", "folder", "leaf")),
        data_dir=data.data_dir and str(Path(data.data_dir).resolve()),
    )


def _resolved(value: str, kinds: Sequence[str]) -> str:
    kind, _, argument = value.partition(":")
    is_path = kind in kinds and argument
    return f"{kind}:{Path(argument).resolve()}" if is_path else value


def with_absolute_paths(flags: Any) -> Any:
    """An experiment's flags with `absolute_paths`."""
    return dataclasses.replace(flags, data=absolute_paths(flags.data))


def open_run(experiment: str, flags: Any, setup: Setup) -> Path:
    """Makes the run folder with `config.json` and `partition.json`, or reopens it.

    Raises:
      InputError: the folder cannot be used; see `folder.open_folder`.
    """
    run: RunFlags = flags.run
    out = new_folder(setup.dataset.name) if run.out is None else Path(run.out)
    if folder.open_folder(out, resume=run.resume):
        _allow_more_rounds(out, flags.training.rounds)
    else:
        # The config comes first: a run that is killed now can be resumed.
        write_config(out, experiment, flags)
    sizes = (len(setup.dataset.y_train), len(setup.dataset.y_test))
    for seed, parts in zip(setup.seeds, setup.partitions, strict=True):
        suffix = "" if seed == setup.seeds[0] else f"-seed{seed}"
        saved = out / f"partition{suffix}.json"
        content = {
            "dataset": setup.dataset.name,
            "examples": {"train": sizes[0], "test": sizes[1]},
            "checksum": checksum(setup.dataset),
            "train": [part.tolist() for part in parts.train],
            "test": [part.tolist() for part in parts.test],
        }
        if not saved.exists():
            folder.write_text(saved, json.dumps(content) + "\n")
        elif folder.read_json(saved) != content:
            raise InputError(f"the data or its partition is no longer that of {saved}")
    return out


def _allow_more_rounds(out: Path, rounds: int) -> None:
    """Refuses fewer rounds than a run has done, and notes how many it now has."""
    done = max(
        (r["round"] for r in metrics.read_rows(out / "metrics.jsonl")), default=0
    )
    if done > rounds:
        raise InputError(
            f"rounds is {rounds}, but the run in {out} has done {done}; allowed is "
            f"{done} or more"
        )
    note_rounds(out, rounds)


def note_rounds(out: Path, rounds: int) -> None:
    """Notes in `config.json` how many rounds a run that goes on now has."""
    config = folder.read_json(out / "config.json")
    config["flags"]["rounds"] = rounds
    folder.write_json(out / "config.json", config)


def checksum(dataset: catalog.Dataset) -> int:
    """CRC-32 of all images and labels."""
    arrays = (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test)
    total = 0
    for array in arrays:
        total = zlib.crc32(np.ascontiguousarray(array).data, total)
    return total


def new_folder(dataset: str) -> Path:
    """A folder under runs/ that is not there yet, named by time and data set."""
    kind, _, argument = dataset.partition(":")
    name = Path(argument).stem if argument else kind
    base = Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    numbered = (base.with_name(f"{base.name}-{i}") for i in itertools.count(2))
    return next(p for p in itertools.chain([base], numbered) if not p.exists())


def write_config(out: Path, experiment: str, flags: Any) -> None:
    """Writes `config.json`: every flag, the command, versions, git hash, device."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    content = {
        "experiment": experiment,
        "flags": to_flat(flags),
        "command": command_line(experiment),
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in packages},
        "git": _git_hash(),
        "device": {
            "platform": jax.default_backend(),
            "kind": jax.devices()[0].device_kind,
            "count": jax.device_count(),
        },
    }
    folder.write_json(out / "config.json", content)


def command_line(experiment: str) -> str:
    """The command that started this process, to be typed again."""
    return shlex.join(["python", "-m", f"experiments.{experiment}", *sys.argv[1:]])


def _git_hash() -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return found.stdout.strip() or None


def resume_command(out: Path) -> str:
    """The command that goes on with a run."""
    experiment = json.loads((out / "config.json").read_text())["experiment"]
    return shlex.join(
        ["python", "-m", f"experiments.{experiment}", "--out", str(out), "--resume"]
    )
