"""The text that a rank prints when it ends with one of hvdgloo's errors.

When one rank of many fails, all others fail with it a moment later, each somewhere in a collective. A traceback from
every one of them would hide the only one that matters. So a rank that ends only because another one did prints in two
lines where it was and which rank's end it met; the last line is the error itself, from which the launcher knows that
this failure is a consequence of another.

All other errors are shown without hvdgloo's frames: without those that called the program (``elastic.run``, or a worker
of ``run()``), and, if the error is hvdgloo's, without those that raised it. They say nothing about the mistake, and
would push the program's own line out of the launcher's summary. An error of hvdgloo's that the next one repeats is left
out. Ctrl-C usually arrives in hvdgloo, too, on all ranks at once. An error about a variable in the environment is shown
without any traceback, since the mistake is not in the program.
"""

from __future__ import annotations

import logging
import sys
import traceback
from types import TracebackType
from typing import TypeGuard

from hvdgloo._platform.own_frames import before_own, is_of_program, without_between, without_own
from hvdgloo.config import Config, environment_names
from hvdgloo.errors import (
    ConfigError,
    HvdglooError,
    JobShutdownError,
    PeerLostError,
    RemoteTraceback,
)

HINT = "(without hvdgloo's own frames; HVDGLOO_LOG_LEVEL=DEBUG shows them)\n"
"""The line before a traceback in which they are missing."""

_FRAMES = 3
_LONGEST = 300


def install(rank: int | None = None) -> None:
    """Have uncaught errors shown in this way, unless the program has installed a hook of its own.

    Args:
        rank: this process's, once it is known.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _Hook(rank)
    elif isinstance(sys.excepthook, _Hook) and rank is not None:
        sys.excepthook.rank = rank


class _Hook:
    """Replaces ``sys.excepthook``."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not _debugging():
            if is_echo(error, self.rank):
                sys.stderr.write(brief(error, trace))
                return
            if is_about_variable(error):
                sys.stderr.write("".join(traceback.format_exception_only(type(error), error)))
                return
            text = from_outside(error, trace)
            if isinstance(error, HvdglooError) or text.startswith(HINT):
                sys.stderr.write(text)
                return
        sys.__excepthook__(kind, error, trace)  # which may use colours


def _debugging() -> bool:
    """Also reads the setting itself: before ``init()`` no logger has been set up by it."""
    if logging.getLogger("hvdgloo").isEnabledFor(logging.DEBUG):
        return True
    try:
        return Config.from_env().log_level in ("TRACE", "DEBUG")
    except ConfigError:
        return False


def uncaught() -> str:
    """Return the error that ends this interpreter, in one line; empty if none does. For use after the main program."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception):
        return ""
    line = "".join(traceback.format_exception_only(type(error), error)).strip().partition("\n")[0]
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def is_echo(error: BaseException, rank: int | None) -> TypeGuard[JobShutdownError | PeerLostError]:
    """True if the error reports the end of another rank; False while this process's own rank is unknown."""
    if rank is None or not isinstance(error, (JobShutdownError, PeerLostError)):
        return False
    return error.rank is not None and error.rank != rank


def is_about_variable(error: BaseException) -> bool:
    """True if the error is about the value of a variable in the environment."""
    return isinstance(error, ConfigError) and str(error).partition(":")[0] in environment_names()


def _is_own(error: BaseException) -> bool:
    """True if hvdgloo raised the error, be it in torch.distributed's name."""
    return isinstance(error, HvdglooError) or (
        type(error).__name__ == "DistBackendError" and str(error).startswith("hvdgloo: ")
    )


def brief(error: JobShutdownError | PeerLostError, trace: TracebackType | None) -> str:
    """Describe where it happened, in the program's own files, and what happened."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if is_of_program(frame.filename)]
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in (own or frames)[-_FRAMES:]]
    end = "was lost" if isinstance(error, PeerLostError) else "ended"
    where = f"Stopped because rank {error.rank} {end}"
    if places:
        where += f", at {', '.join(reversed(places))}"
    what = "".join(traceback.format_exception_only(type(error), error)).rstrip("\n")
    if error.operation and places:
        what += f"; this rank was in {error.operation}, called at {places[-1]}"  # the launcher reads this
    return f"{where} (HVDGLOO_LOG_LEVEL=DEBUG shows the traceback)\n{what}\n"


def from_outside(error: BaseException, trace: TracebackType | None) -> str:
    """Return a traceback of the program's own frames, with the errors that led to this one. If the error is hvdgloo's,
    or was raised again by ``run()``, the traceback ends where the program called hvdgloo.
    """
    shown = traceback.TracebackException(type(error), error, trace)
    hint = HINT if not _debugging() and _cut(shown, error) else ""
    return hint + "".join(shown.format())


def _adds_nothing(shown: traceback.TracebackException | None, error: BaseException | None, text: str) -> bool:
    """True if an error happened within hvdgloo, was caused by no other, and is told in this text of the next one."""
    if shown is None or error is None or not _is_own(error) or str(error) not in text:
        return False
    earlier = shown.__cause__ or (shown.__context__ and not shown.__suppress_context__)
    return not (earlier or any(is_of_program(frame.filename) for frame in shown.stack))


def _cut(shown: traceback.TracebackException | None, error: BaseException | None) -> bool:
    """Remove hvdgloo's frames from the errors in a chain; True if there were any."""
    found = False
    while shown is not None and error is not None:
        kept = without_between(shown.stack)
        if isinstance(error, KeyboardInterrupt):
            kept = before_own(kept)
        elif _is_own(error) or isinstance(error.__cause__, RemoteTraceback):
            kept = without_own(kept)
        if len(kept) < len(shown.stack):
            shown.stack = traceback.StackSummary.from_list(kept)
            found = True
        chained = shown.__cause__ is not None
        cause = shown.__cause__ if chained else shown.__context__
        reason = error.__cause__ if chained else error.__context__
        if _is_own(error) and _adds_nothing(cause, reason, str(error)):
            shown.__cause__ = shown.__context__ = None
            return True
        shown, error = cause, reason
    return found
