"""What do pruned attention values in a few bits cost, without any retraining?

    python -m experiments.quantized_attention clients --run DIR
    python -m experiments.quantized_attention sentiment --train FILE --validation FILE
    python -m experiments.quantized_attention qa --questions FILE

measures it on every client's personal model of a run, on a pretrained language model
that is fine-tuned to judge sentences, and on one that finds answers in texts: accuracy
against bits and thresholds, logarithmic against linear codes, and the share pruned by
layer and head.
"""

import sys
from collections.abc import Sequence

from experiments import cli, launch
from experiments.quantized import clients, qa, sentiment
from fedjax_tp.types import InputError

EXPERIMENT = "quantized_attention"
COMMANDS = {"clients": clients, "sentiment": sentiment, "qa": qa}


def run(argv: Sequence[str]) -> None:
    """Runs a subcommand.

    Raises:
      InputError: there is no such subcommand, or it does not allow its flags.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        print(
            "\n".join(
                f"{name}: {(module.__doc__ or '').splitlines()[0]}"
                for name, module in COMMANDS.items()
            )
        )
        print(f"\npython -m experiments.{EXPERIMENT} COMMAND --help shows its flags")
        return
    name, *rest = argv
    if name not in COMMANDS:
        raise InputError(
            f"subcommand is {name!r}; allowed is one of {', '.join(COMMANDS)}"
        )
    module = COMMANDS[name]
    prog = f"experiments.{EXPERIMENT} {name}"
    defaults = module.Flags()
    flags = cli.tyro_cli(type(defaults), rest, module.__doc__ or "", prog, defaults)
    module.run(flags)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    if argv is None:
        launch.start_tuned()
        argv = sys.argv[1:]
    arguments = list(argv)
    return cli.run_main(lambda: run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
