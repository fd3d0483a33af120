"""Progress of a run: a bar on a terminal, a plain line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[int, str], None]


@contextmanager
def rounds_progress(
    name: str, first_round: int, num_rounds: int, every: int
) -> Iterator[Report]:
    """A function `(rounds done, text)` that shows how far a run is, and how fast.

    Args:
      name: what runs.
      first_round, num_rounds: rounds done at the start, and to be done.
      every: rounds between two lines where the output is no terminal.
    """
    started = time.perf_counter()

    def rate(done: int) -> float:
        return (done - first_round) / max(time.perf_counter() - started, 1e-9)

    if not sys.stdout.isatty():

        def line(done: int, text: str) -> None:
            if done % every == 0 or done == num_rounds:
                shown = f"{name} round {done}/{num_rounds} {rate(done):.2f} rounds/s"
                print(f"{shown} {text}", flush=True)

        yield line
        return

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console()) as bar:
        task = bar.add_task(name, total=num_rounds, completed=first_round, text="")
        yield lambda done, text: bar.update(
            task, completed=done, text=f"{rate(done):.2f} rounds/s {text}"
        )
