"""What a rank prints that ends only because another one did.

When one rank of many fails, all others fail with it a moment later, each somewhere in a collective. A traceback from
every one of them would bury the only one that matters. So such a rank says in two lines where it was and whose end it
met; the last line is the error itself, by which the launcher knows that this failure is an echo.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from types import TracebackType

from hvdgloo.errors import JobShutdownError, PeerLostError

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_FRAMES = 3
_LONGEST = 300


def install(rank: int) -> None:
    """Have uncaught errors shown in this way, unless the program shows them in one of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _Hook(rank)
    elif isinstance(sys.excepthook, _Hook):
        sys.excepthook.rank = rank


class _Hook:
    """In the place of ``sys.excepthook``."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if is_echo(error, self.rank) and not logging.getLogger("hvdgloo").isEnabledFor(logging.DEBUG):
            sys.stderr.write(brief(error, trace))
        else:
            sys.__excepthook__(kind, error, trace)


def uncaught() -> str:
    """The error that ends this interpreter, in a line; empty if none does. For the time after the main program."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception):
        return ""
    line = "".join(traceback.format_exception_only(type(error), error)).strip().partition("\n")[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def is_echo(error: BaseException, rank: int) -> bool:
    """Another rank's end is what it is about."""
    return isinstance(error, (JobShutdownError, PeerLostError)) and error.rank is not None and error.rank != rank


def brief(error: BaseException, trace: TracebackType | None) -> str:
    """Where it happened, in the program's own files, and what."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not frame.filename.startswith(_OURS) and _INSTALLED not in frame.filename]
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in (own or frames)[-_FRAMES:]]
    where = f"Stopped with another rank, at {', '.join(reversed(places))}" if places else "Stopped with another rank"
    what = "".join(traceback.format_exception_only(type(error), error))
    return f"{where} (HVDGLOO_LOG_LEVEL=DEBUG shows the whole traceback)\n{what}"
