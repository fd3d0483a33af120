"""Flags in, exit codes out: what every experiment's command line has in common."""

import argparse
import contextlib
import dataclasses
import io
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from experiments import launch
from experiments.flags import DeviceFlags
from fedjax_tp.io.folder import is_empty, read_json
from fedjax_tp.types import InputError

# A run may go on for more rounds than first asked for, and on other devices (results
# are equal to rounding there); the rest must not change.
_MAY_CHANGE_ON_RESUME = {"rounds", "out", "resume"} | {
    field.name
    for field in dataclasses.fields(DeviceFlags)
    if field.name != "kept_on_host"
}


class Interrupted(Exception):
    """The run was told to stop, and has saved what it had."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.signal_number = signal_number


def to_flat(flags: Any) -> dict[str, Any]:
    """Flag names and values: groups without their name, library settings with it."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if not dataclasses.is_dataclass(value):
            flat[field.name] = value
        elif _has_prefix(field):
            flat |= {f"{field.name}.{k}": v for k, v in to_flat(value).items()}
        else:
            flat |= to_flat(value)
    return flat


def with_values(flags: Any, values: Mapping[str, Any]) -> Any:
    """The same flags with some values replaced, by the names of `to_flat`."""
    changed = {}
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        if not dataclasses.is_dataclass(value):
            changed[field.name] = values.get(field.name, value)
        elif _has_prefix(field):
            prefix = f"{field.name}."
            inner = {
                name.removeprefix(prefix): v
                for name, v in values.items()
                if name.startswith(prefix)
            }
            changed[field.name] = with_values(value, inner)
        else:
            changed[field.name] = with_values(value, values)
    return dataclasses.replace(flags, **changed)


def _has_prefix(field: dataclasses.Field) -> bool:
    return bool(field.metadata.get("prefix"))


def parse(
    defaults: Any,
    presets: Mapping[str, Mapping[str, Any]],
    argv: Sequence[str] | None,
    description: str,
    prog: str,
    normalize: Callable[[Any], Any] = lambda flags: flags,
) -> Any:
    """Reads the command line on top of a preset, or of the run to be resumed.

    Args:
      defaults: the flags when nothing is given.
      presets: flag values by preset name.
      argv: the arguments; None for those of the process.
      description, prog: for `--help`.
      normalize: applied to the flags before they are compared with those of the run.

    Raises:
      InputError: `--resume` without `--out`, or with flags that contradict the run.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--preset", nargs="?", default="default")
    early.add_argument("--out", nargs="?", default=None)
    early.add_argument("--resume", action="store_true")
    known, _ = early.parse_known_args(argv)
    saved: dict[str, Any] | None = None
    if known.resume:
        if known.out is None:
            raise InputError(
                "--resume needs --out, the folder of the run to go on with"
            )
        config = Path(known.out) / "config.json"
        if config.is_file():
            experiment = prog.removeprefix("experiments.")
            saved = saved_flags(config, defaults, [experiment])
        elif Path(known.out).is_dir() and not is_empty(Path(known.out)):
            raise InputError(f"out {known.out} holds no run to resume (no config.json)")
    values = presets.get(known.preset, {}) if saved is None else saved
    defaults = with_values(defaults, values)
    flags = normalize(tyro_cli(type(defaults), argv, description, prog, defaults))
    if saved is not None:
        _refuse_contradictions(saved, to_flat(flags), known.out)
    return flags


def tyro_cli(
    kind: type, argv: Sequence[str] | None, description: str, prog: str, default: Any
) -> Any:
    """`tyro.cli`, with what it finds wrong as one line instead of a box.

    Raises:
      InputError: a flag that does not exist, or a value that it cannot hold.
    """
    boxed = io.StringIO()
    try:
        with contextlib.redirect_stderr(boxed):
            return tyro.cli(
                kind, prog=prog, description=description, args=argv, default=default
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip("│ ") for line in boxed.getvalue().splitlines()]
        words = " ".join(line for line in lines if line and line[0] not in "╭╰─")
        raise InputError(words or "bad flags") from None


def check_counts(flags: Any, *names: str) -> None:
    """Raises InputError for a count among the flags that is below 1; None is unset."""
    for name in names:
        value = getattr(flags, name)
        if value is not None and value < 1:
            shown = name.replace("_", " ")
            raise InputError(f"{shown} is {value}; allowed is 1 or more")


def saved_flags(
    config: Path, defaults: Any, experiments: Sequence[str]
) -> dict[str, Any]:
    """Flag values of a run's `config.json`, by the names of `to_flat`.

    Args:
      config: the file.
      defaults: the flags that are wanted; a run may have more.
      experiments: whose run it may be.

    Raises:
      InputError: it is of another experiment, or its flags are not those.
    """
    content = read_json(config)
    if not isinstance(content, dict) or not isinstance(content.get("flags"), dict):
        raise InputError(f"{config} holds no flags; it is not the config of a run")
    if content.get("experiment") not in experiments:
        raise InputError(
            f"{config.parent} holds a run of {content.get('experiment')!r}; allowed is "
            f"one of {', '.join(map(repr, experiments))}"
        )
    saved, known, hints = content["flags"], to_flat(defaults), _hints(type(defaults))
    for name in known:
        if name not in saved or not _fits(saved[name], hints[name]):
            raise InputError(
                f"{config}: flag {name} is {saved.get(name, 'not there')!r}; it is not "
                "the config of a run of this version"
            )
    return {name: saved[name] for name in known}


def _hints(kind: Any, prefix: str = "") -> dict[str, Any]:
    """The type of each flag, by the names of `to_flat`."""
    hints: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        hint = typing.get_type_hints(kind)[field.name]
        if dataclasses.is_dataclass(hint):
            inner = f"{field.name}." if _has_prefix(field) else ""
            hints |= _hints(hint, prefix + inner)
        else:
            hints[prefix + field.name] = hint
    return hints


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if isinstance(value, bool) or hint is bool:
        return isinstance(value, bool) and hint is bool
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint)


def _refuse_contradictions(
    saved: Mapping[str, Any], given: Mapping[str, Any], out: str
) -> None:
    for name, value in given.items():
        if name in _MAY_CHANGE_ON_RESUME or name not in saved or saved[name] == value:
            continue
        flag = "--" + name.replace("_", "-")
        raise InputError(
            f"{flag} is {value}, but the run in {out} has {saved[name]}; "
            "--resume allows no other value"
        )


def experiment_main(
    run: Callable[[Any], None],
    defaults: Any,
    argv: Sequence[str] | None,
    *,
    name: str,
    description: str | None,
    presets: Mapping[str, Mapping[str, Any]] | None = None,
    normalize: Callable[[Any], Any] = lambda flags: flags,
) -> int:
    """The command line of an experiment; returns the exit code.

    Args:
      run: takes the flags.
      defaults, presets, normalize: as for `parse`.
      argv: the arguments; None for those of the process, which is started anew first
        where that makes it faster.
      name, description: of the experiment.
    """
    if argv is None:
        launch.start_tuned()
    return run_main(
        lambda: run(
            parse(
                defaults,
                presets or {},
                argv,
                description or "",
                f"experiments.{name}",
                normalize,
            )
        )
    )


def run_main(run: Callable[[], None]) -> int:
    """Runs, and turns what goes wrong into an exit code and a line on stderr.

    2 for bad input, 1 for a disk that refuses, 128 + signal for a run told to stop.
    """
    try:
        run()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal_number
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
