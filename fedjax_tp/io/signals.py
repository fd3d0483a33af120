"""SIGTERM and Ctrl-C as a wish to stop, so that a run can save before it ends."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SignalReceived = Callable[[], int | None]


@contextmanager
def stop_signals() -> Iterator[SignalReceived]:
    """A function that returns the signal received, or None; a second one kills."""
    received: list[int] = []

    def note(signal_number: int, frame: object) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(signal_number)
        print(
            "stopping: the round in progress is finished and saved first",
            file=sys.stderr,
        )

    caught = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, note) for number in caught}
    try:
        yield lambda: received[0] if received else None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
