"""How signals end the command: at once, or where something must be tidied up first, after that."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE = 2.0
"""Seconds that tidying up has before another signal interrupts it."""


class Ended(KeyboardInterrupt):
    """A signal came where something had to be tidied up first. number: which."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def end_at_once() -> None:
    """Interrupts end the process as other signals do. Python's own handler raises KeyboardInterrupt wherever the
    program is, in the middle of an import too, and what is said of it then is a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def tidied() -> Iterator[None]:
    """A block that an ending signal leaves by an exception, `Ended`, so that it can remove what it began.

    More signals within `PATIENCE` of it are dropped, so that tidying up is not interrupted by a key held down or by a
    caller that signals both the process and its group. Signals the caller has had ignored (nohup) stay so. Where
    Python swallows the exception, in a callback of its collector say, the signal is sent anew.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    since = 0.0

    def raise_ended(number: int, frame: object) -> None:
        nonlocal since
        if came and monotonic() - since < PATIENCE:
            return
        came.append(number)
        since = monotonic()
        raise Ended(number)

    def unraisable(fault: Any) -> None:
        if isinstance(fault.exc_value, Ended):
            came.clear()
            # Later: a signal that came at once would be raised, and swallowed, in this hook.
            again = threading.Timer(0.01, os.kill, (os.getpid(), fault.exc_value.number))
            again.daemon = True
            again.start()
        else:
            hook(fault)

    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    handlers = {number: signal.getsignal(number) for number in ENDING}
    before = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, raise_ended)
        yield
    except Exception as error:
        # What was interrupted in the middle of an import has failed for another reason by now.
        if came:
            raise Ended(came[0]) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook
    if came:
        raise Ended(came[0])


def end_by(number: int) -> None:
    """Ends the process by a signal, as one that had nothing to tidy up: the caller sees which."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
