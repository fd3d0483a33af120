"""The groups of flags that experiments share; a field's docstring is its help."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from fedjax_tp.algorithms import HypernetworkOptimizer, MethodConfig
from fedjax_tp.hypernetwork import HypernetworkConfig

_ungrouped = tyro.conf.arg(name="")


@dataclass(frozen=True)
class DataFlags:
    """Which data, and who holds it."""

    dataset: str = "digits"
    """digits, fashion_mnist, cifar10, cifar100, shakespeare, npz:PATH, folder:PATH,
    tfds:NAME or leaf:PATH."""
    data_dir: str | None = None
    """Folder of prepared TFDS sets (see experiments.prepare_data)."""
    partition: str | None = None
    """iid, pathological, dirichlet, dirichlet2, shards, quantity, natural or file:PATH;
    unset: natural where the data says who holds what, else pathological."""
    alpha: float = 0.3
    """Concentration of the Dirichlet partitions; small is more skewed."""
    classes_per_client: int = 2
    """Classes (pathological) or shards (shards) a client."""
    num_clients: int | None = None
    """Clients; unset: 20, or as many as a preset, a partition file or the data has."""
    min_examples: int = 10
    """Training examples every client has at least (dirichlet, quantity)."""
    sequence_length: int = 80
    """Characters of an example (shakespeare)."""
    stride: int | None = None
    """Characters between two examples; unset: as sequence_length."""
    shift: str | None = None
    """What differs between clients beside their labels: noise:X (up to X of the range
    of pixels), rotation:X (up to X degrees) or brightness:X (by class, up to X of the
    range)."""
    validation: bool = False
    """Measure on a fifth of the training examples, held out, instead of the test
    split: for choosing settings."""


@dataclass(frozen=True)
class ModelFlags:
    """The model that clients train."""

    model: Literal["auto", "vit", "cnn", "cnn_bn", "char_transformer", "lstm"] = "auto"
    """Images: vit, cnn (the LeNet of the baselines; no attention, so no FedTP) or
    cnn_bn (with batch normalization). Text: char_transformer or lstm (without
    attention). auto is the transformer."""
    patch_size: int | None = None
    """Side of a patch; unset: the largest that leaves at least 16 patches."""
    dim: int = 64
    """Width of the transformer."""
    depth: int = 2
    """Transformer blocks."""
    heads: int = 4
    """Attention heads."""
    head_dim: int = 16
    """Width of a head; heads times head_dim need not equal dim."""
    mlp_dim: int = 128
    """Hidden width of the MLPs."""
    dropout: float = 0.0
    """Dropout rate in training."""


@dataclass(frozen=True)
class TrainingFlags:
    """Rounds, and local training in a round."""

    algorithms: str = "fedtp,fedtp_vanilla,fedavg,local"
    """Comma-separated, or all."""
    rounds: int = 80
    """Communication rounds."""
    sample_fraction: float = 0.1
    """Share of the clients sampled each round (rounded down, at least one client)."""
    local_epochs: int = 2
    """Passes of a sampled client over its examples."""
    batch_size: int = 16
    """Examples a step."""
    client_lr: float = 0.02
    """Step size of the clients' SGD."""
    client_momentum: float = 0.9
    """Momentum of the clients' SGD; starts afresh every round."""
    client_weight_decay: float = 0.0
    """L2 coefficient of the clients' SGD."""
    lanes: int | None = None
    """Clients trained at a time on one device; unset: by device and memory."""
    chunk_size: int | None = None
    """Clients evaluated at a time on one device; unset: as lanes."""


@dataclass(frozen=True)
class RunFlags:
    """The run itself."""

    seed: int = 0
    """Of partition, initial values, sampling, batches and dropout."""
    seeds: int = 1
    """Runs as many simulations at once, in one program, from seed on; figures are means
    and standard deviations over them."""
    eval_every: int = 5
    """Rounds between two evaluations of all clients."""
    metric_from: int | None = None
    """Also report mean and deviation over the evaluations from this round on."""
    checkpoint_every: int | None = None
    """Rounds between two checkpoints; unset: as eval_every."""
    out: str | None = None
    """Run folder; unset: runs/<time>-<dataset>."""
    resume: bool = False
    """Go on with the run in --out; its flags are the defaults."""


@dataclass(frozen=True)
class DeviceFlags:
    """What the run computes on; changes no result beyond rounding."""

    devices: int | None = None
    """Devices of this process; unset: on CPU one a core, else all."""
    coordinator: str | None = None
    """HOST:PORT of the first of several processes; all are given the same."""
    num_processes: int | None = None
    """Processes in all."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    distributed: bool = False
    """Several processes, found by themselves (SLURM, Open MPI, cloud TPU)."""
    memory_gb: float | None = None
    """Memory of a device; unset: what it has free (of the machine, an equal share)."""
    kept_on_host: Literal["auto", "yes", "no"] = "auto"
    """Hold what clients keep in a file, and only the cohort's on the
    device; auto: where it would take a quarter of the device's memory."""
    tune_process: bool = True
    """On CPU, start the process anew with its buffers in huge pages."""


@dataclass(frozen=True)
class SourceFlags:
    """Which data; the experiment deals it itself."""

    dataset: str = "digits"
    """digits, fashion_mnist, cifar10, cifar100, npz:PATH, folder:PATH or tfds:NAME."""
    data_dir: str | None = None
    """Folder of prepared TFDS sets (see experiments.prepare_data)."""


@dataclass(frozen=True)
class LabFlags:
    """An experiment of many short trainings, each of which is saved when it is done."""

    seed: int = 0
    """Of partitions, initial values, sampling and batches."""
    out: str | None = None
    """Run folder; unset: runs/<time>-<dataset>."""
    resume: bool = False
    """Go on with the run in --out; its flags are the defaults."""
    devices: int | None = None
    """Devices of this process; unset: on CPU one a core, else all."""
    tune_process: bool = True
    """On CPU, start the process anew with its buffers in huge pages."""


@dataclass(frozen=True)
class TrainingRunFlags:
    """Flags of an experiment that trains algorithms on clients."""

    data: Annotated[DataFlags, _ungrouped] = DataFlags()
    model: Annotated[ModelFlags, _ungrouped] = ModelFlags()
    training: Annotated[TrainingFlags, _ungrouped] = TrainingFlags()
    run: Annotated[RunFlags, _ungrouped] = RunFlags()
    device: Annotated[DeviceFlags, _ungrouped] = DeviceFlags()
    hypernetwork: HypernetworkConfig = field(
        default=HypernetworkConfig(), metadata={"prefix": True}
    )
    server: HypernetworkOptimizer = field(
        default=HypernetworkOptimizer(), metadata={"prefix": True}
    )
    method: MethodConfig = field(default=MethodConfig(), metadata={"prefix": True})
