"""What a rank prints that ends with one of hvdgloo's errors.

When one rank of many fails, all others fail with it a moment later, each somewhere in a collective. A traceback from
every one of them would bury the only one that matters. So a rank that ends only because another one did says in two
lines where it was and whose end it met; the last line is the error itself, by which the launcher knows that this
failure is an echo.

Any other error of hvdgloo's is shown with the program's frames, and without those in which hvdgloo has raised it: they
are many, say nothing about the mistake, and would push the program's own line out of the launcher's summary.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from types import TracebackType

from hvdgloo.config import Config
from hvdgloo.errors import ConfigError, HvdglooError, JobShutdownError, PeerLostError

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_FRAMES = 3
_LONGEST = 300


def install(rank: int | None = None) -> None:
    """Have uncaught errors shown in this way, unless the program shows them in one of its own.

    Args:
        rank: this process's, once it is known.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _Hook(rank)
    elif isinstance(sys.excepthook, _Hook) and rank is not None:
        sys.excepthook.rank = rank


class _Hook:
    """In the place of ``sys.excepthook``."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, HvdglooError) or _debugging():
            sys.__excepthook__(kind, error, trace)
        elif is_echo(error, self.rank):
            sys.stderr.write(brief(error, trace))
        else:
            sys.stderr.write(from_outside(error, trace))


def _debugging() -> bool:
    """Asked of the setting itself, too: before ``init()`` nothing has been set up by it."""
    if logging.getLogger("hvdgloo").isEnabledFor(logging.DEBUG):
        return True
    try:
        return Config.from_env().log_level in ("TRACE", "DEBUG")
    except ConfigError:
        return False


def uncaught() -> str:
    """The error that ends this interpreter, in a line; empty if none does. For the time after the main program."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception):
        return ""
    line = "".join(traceback.format_exception_only(type(error), error)).strip().partition("\n")[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def is_echo(error: BaseException, rank: int | None) -> bool:
    """Another rank's end is what it is about; never, as long as this process's own is not known."""
    if rank is None or not isinstance(error, (JobShutdownError, PeerLostError)):
        return False
    return error.rank is not None and error.rank != rank


def brief(error: BaseException, trace: TracebackType | None) -> str:
    """Where it happened, in the program's own files, and what."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not frame.filename.startswith(_OURS) and _INSTALLED not in frame.filename]
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in (own or frames)[-_FRAMES:]]
    where = f"Stopped with another rank, at {', '.join(reversed(places))}" if places else "Stopped with another rank"
    what = "".join(traceback.format_exception_only(type(error), error))
    return f"{where} (HVDGLOO_LOG_LEVEL=DEBUG shows the whole traceback)\n{what}"


def from_outside(error: BaseException, trace: TracebackType | None) -> str:
    """A traceback that ends where the program called hvdgloo; so do those of hvdgloo's errors that led to this one."""
    shown = traceback.TracebackException(type(error), error, trace)
    hint = "(without hvdgloo's own frames; HVDGLOO_LOG_LEVEL=DEBUG shows them)\n" if _cut(shown, error) else ""
    return hint + "".join(shown.format())


def _cut(shown: traceback.TracebackException | None, error: BaseException | None) -> bool:
    """Take hvdgloo's last frames away from its errors in a chain; whether there were any."""
    found = False
    while shown is not None and error is not None:
        if isinstance(error, HvdglooError):
            kept = list(shown.stack)
            while kept and kept[-1].filename.startswith(_OURS):
                kept.pop()
            # What has nothing of the program in it, like the trace of a thread of ours, is all that there is.
            if kept and len(kept) < len(shown.stack):
                shown.stack = traceback.StackSummary.from_list(kept)
                found = True
        if shown.__cause__ is not None:
            shown, error = shown.__cause__, error.__cause__
        else:
            shown, error = shown.__context__, error.__context__
    return found
