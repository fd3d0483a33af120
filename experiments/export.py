"""One client's personal model as a bundle that runs without this library.

    python -m experiments.export --run DIR --client 7 --out FOLDER
    python FOLDER/read_bundle.py examples.npy

The bundle has the client's weights (those that the hypernetwork emits among them) as
safetensors, its forward pass with quantized attention as a `jax.export` program, the
configuration with class names, and a short reader, which needs jax, numpy, safetensors
and flatbuffers.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from experiments import cli, launch, results, setup, trained
from experiments.trained import Trained
from fedjax_tp.data.federated import gather
from fedjax_tp.inference import export, quantizers
from fedjax_tp.inference.attention import quantized_attention
from fedjax_tp.io import folder, pretrained
from fedjax_tp.types import Array, InputError, Params

EXPERIMENT = "export"

READER = '''\
"""Class of each example: python read_bundle.py EXAMPLES.npy [LOGITS.npy]"""
import json
import sys
from pathlib import Path

import jax.export
import numpy as np
from safetensors.numpy import load_file

bundle = Path(__file__).parent
config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
weights = load_file(bundle / "weights.safetensors")
forward = jax.export.deserialize(bytearray((bundle / "forward.jax").read_bytes()))
examples = np.load(sys.argv[1]).astype(np.float32)
shape = tuple(config["example_shape"])
if examples.shape[1:] != shape:
    sys.exit(f"examples are {examples.shape}; allowed is (any number, *{shape})")
logits = np.asarray(forward.call(weights, examples))
for row in logits.reshape(len(logits), -1, logits.shape[-1])[:, -1]:
    print(config["classes"][int(row.argmax())])
if len(sys.argv) > 2:
    np.save(sys.argv[2], logits)
'''


@dataclass(frozen=True)
class Flags:
    """Flags of the export."""

    run: str | None = None
    """Folder of the run."""
    algorithm: str = "fedtp"
    """Which of its algorithms."""
    client: int = 0
    """Whose model."""
    bits: int | None = 3
    """Bits of the attention values; None prunes alone."""
    threshold: float = 1e-3
    """Attention values at or below it are 0."""
    out: str | None = None
    """Folder for the bundle."""


def run(flags: Flags) -> None:
    """Writes the bundle, and compares it with the model.

    Raises:
      InputError: a flag or the run does not allow it.
    """
    if flags.out is None:
        raise InputError("out is not given; allowed is a folder")
    if flags.bits is not None:
        quantizers.check_bits(flags.bits)
    quantizers.check_threshold(flags.threshold)
    found = trained.load_transformer(flags.run, flags.algorithm)
    console = launch.make_console()
    if not 0 <= flags.client < found.setup.num_clients:
        raise InputError(
            f"client is {flags.client}; allowed is 0 to {found.setup.num_clients - 1}"
        )
    out = Path(flags.out)
    folder.open_folder(out, resume=False, can_resume=False)
    params = trained.params_of(found.algorithm, found.state, jnp.int32(flags.client))
    forward = make_forward(found, flags)
    write_bundle(out, flags, found, params, forward)
    for path in sorted(out.iterdir()):
        console.print(f"{path.name}: {results.human(path.stat().st_size)}")
    console.print(
        f"client {flags.client} of {flags.algorithm} after {found.round} rounds; "
        + compare(out, flags, found, params, forward),
        soft_wrap=True,
    )
    console.print(f"to run it: python {out / 'read_bundle.py'} EXAMPLES.npy")


def make_forward(found: Trained, flags: Flags) -> Callable[[Params, Array], Array]:
    """`(params, raw examples) -> logits`, with quantized attention in plain XLA."""
    dataset, test = found.setup.dataset, found.setup.test
    module = setup.make_module(
        found.flags.model,
        dataset.x_train.shape[1:],
        dataset.num_classes,
        partial(
            quantized_attention,
            bits=flags.bits,
            threshold=flags.threshold,
            implementation="blockwise",
        ),
    )
    mean, std = np.asarray(test.mean), np.asarray(test.std)

    def forward(params: Params, x: Array) -> Array:
        return cast(Array, module.apply({"params": params}, (x - mean) / std))

    return forward


def write_bundle(
    out: Path,
    flags: Flags,
    found: Trained,
    params: Params,
    forward: Callable[[Params, Array], Array],
) -> None:
    """Writes the files of the bundle."""
    dataset = found.setup.dataset
    shape = dataset.x_train.shape[1:]
    program = export.export_forward(forward, params, shape)
    weights = {
        name: np.asarray(leaf) for name, leaf in export.flat_params(params).items()
    }
    pretrained.write_tensors(out / "weights.safetensors", weights, {})
    folder.write_bytes(out / "forward.jax", program)
    folder.write_json(
        out / "config.json",
        {
            "algorithm": flags.algorithm,
            "client": flags.client,
            "round": found.round,
            "dataset": dataset.name,
            "classes": list(dataset.class_names),
            "example_shape": list(shape),
            "examples": "as the data set has them; the program normalizes them",
            "attention": {"bits": flags.bits, "threshold": flags.threshold},
            "model": asdict(found.flags.model),
            "platforms": list(export.PLATFORMS),
            "jax": jax.__version__,
        },
    )
    folder.write_text(out / "read_bundle.py", READER)


def compare(
    out: Path,
    flags: Flags,
    found: Trained,
    params: Params,
    forward: Callable[[Params, Array], Array],
) -> str:
    """Accuracy of the bundle on the client's test examples, and its largest difference
    from the model that it is of."""
    test, client = found.setup.test, jnp.int32(flags.client)
    size = int(test.size[flags.client])
    if size == 0:
        return "it has no test example"
    places = jnp.arange(size)
    batch = gather(test, client, places, places < size)
    raw = np.asarray(batch.x * test.std + test.mean)
    program = jax.export.deserialize(bytearray((out / "forward.jax").read_bytes()))
    weights: dict[str, Any] = pretrained.read_tensors(out / "weights.safetensors")
    logits = program.call(weights, raw)
    difference = float(jnp.abs(logits - jax.jit(forward)(params, raw)).max())
    full = found.setup.task.metrics(params, batch)
    ours = found.setup.task.score(logits, batch)
    return (
        f"on its {size} test examples: full precision {float(full.correct) / size:.1%},"
        f" bundle {float(ours.correct) / size:.1%}; logits differ by up to "
        f"{difference:.1e} from the model with the same attention"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return cli.run_main(
        lambda: run(
            cli.tyro_cli(
                Flags, argv, __doc__ or "", f"experiments.{EXPERIMENT}", Flags()
            )
        )
    )


if __name__ == "__main__":
    raise SystemExit(main())
