"""The subcommand ``top``: its arguments, the job that they name, and the form in which it is shown."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Protocol, TextIO

from hvdgloo._observe.jobs import JobFile, jobs
from hvdgloo._observe.top.source import OTHER_VERSION, GoneError, Source, decoded, of_job, of_link
from hvdgloo._observe.trace_control import MOST_STEPS
from hvdgloo._observe.view import STATES, Snapshot
from hvdgloo._observe.words import duration
from hvdgloo._platform.files import create
from hvdgloo._platform.runtime import runtime_folder
from hvdgloo._platform.spelling import in_one_line, suggestions
from hvdgloo._platform.tables import aligned
from hvdgloo.errors import ConfigError

_DESCRIPTION = """\
Show a running job: what its ranks do, which of them make the others wait, and
its events. On the screen, arrow keys scroll through the ranks, and q quits.
"""
_EPILOG = """\
JOB is the beginning of a job's id, or its launcher's process id. Without it,
the job is shown that you are running on this host; if there are several, they
are listed. For a job elsewhere, give the link that its launcher printed
(--page), in quotes; as in a browser, it works once.

Exit status: 0, also if the job ends meanwhile; 1 if it does not answer; 2 if
there is no such job, or it cannot be shown.
"""
_KEYS = {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1, "\x1b[5~": -10, "\x1b[6~": 10, " ": 10}
"""Keys, and the number of ranks by which they scroll."""
_SETTLING = 4.0  # seconds within which ranks send their first sample; each sends one a second
_LOOK_AGAIN = 0.5  # seconds
_QUIT = frozenset("q\x04")


class _Parser(argparse.ArgumentParser):
    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            close = suggestions(unknown[0].partition("=")[0], known, limit=1)
            self.error(f"unknown argument {unknown[0]}{f'; did you mean {close[0]}?' if close else ''}")
        return options

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"top: {message}")


def main(arguments: Sequence[str], stdout: TextIO, environ: Mapping[str, str]) -> int:
    """Run the subcommand; return the exit status.

    Args:
        arguments: the arguments after ``top``.
        environ: this process's environment.

    Raises:
        ConfigError: an argument cannot be used, there is no such job, or it cannot be shown.
        GoneError: the job does not answer.
    """
    options = build_parser().parse_args(arguments)
    if options.token:
        stdout.write(f"{find(options.job, environ).token}\n")
        return 0
    elsewhere = options.job is not None and "://" in options.job
    if options.job is None and not (options.trace or options.link or options.json or options.once):
        running = jobs(runtime_folder(environ))
        if len(running) > 1:
            stdout.write(f"You are running {len(running)} jobs on this host; hvdgloo-run top JOB shows one of them:\n")
            stdout.write(_listed(running) + "\n")
            return 0
    source = of_link(options.job) if elsewhere else of_job(find(options.job, environ))
    try:
        if options.trace:
            _trace(source, options.trace, stdout)
        elif options.link:
            stdout.write(f"{source.link()}\n")
        elif options.json:
            _print_json(source, stdout, options.interval, once=options.once)
        elif options.once or not stdout.isatty():
            _drawing().write(_settled(source), stdout, whole=True)
        else:
            _watch(source, stdout, options.interval)
    except KeyboardInterrupt:
        pass  # a usual way to quit
    finally:
        source.close()
    stdout.flush()
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the arguments after ``top``."""
    parser = _Parser(
        prog="hvdgloo-run top",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="the job to show (default: the only one, or a list)")
    parser.add_argument(
        "--trace",
        type=_steps,
        metavar="STEPS",
        help="trace the next steps, write the merged trace into this directory, and quit (needs --page-control)",
    )
    parser.add_argument("--once", action="store_true", help="show the job once, and quit")
    parser.add_argument("--json", action="store_true", help="print JSON, one line each time (docs/observing.md)")
    parser.add_argument("--link", action="store_true", help="print a new link to the job's page, and quit")
    parser.add_argument("--token", action="store_true", help="print the token for scripts and Prometheus, and quit")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SECONDS", help="time between two updates (default: 1)"
    )
    return parser


def find(which: str | None, environ: Mapping[str, str]) -> JobFile:
    """Find the job on this host that an argument names.

    Raises:
        ConfigError: there is no such job, or more than one.
    """
    running = jobs(runtime_folder(environ))
    found = [job for job in running if which is None or job.id.startswith(which) or str(job.pid) == which]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError("top: several jobs match; name one of these:\n" + _listed(found))
    if running:
        raise ConfigError(f"top: there is no job {which}; these are running:\n" + _listed(running))
    raise ConfigError("top: you are running no job on this host; for a job elsewhere, give the link to its page")


def _listed(found: Sequence[JobFile]) -> str:
    now = time.time()
    rows = [
        (job.id[:12], duration(round(max(0.0, now - job.started))), str(job.pid), in_one_line(job.command))
        for job in found
    ]
    lines = aligned([("job", "runs for", "launcher", "command"), *rows], right=(1, 2))
    return "\n".join(f"  {line}" for line in lines)


def _steps(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_STEPS:
        raise argparse.ArgumentTypeError(f"{text} is not a number of steps from 1 to {MOST_STEPS:,}")
    return int(text)


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.1 to 3600")
    return value


def _print_json(source: Source, stdout: TextIO, interval: float, *, once: bool) -> None:
    if once:
        _settled(source)
    stdout.write(f"{_plain(source.snapshot(curves=True))}\n")
    try:
        while not once:
            stdout.flush()
            time.sleep(interval)
            stdout.write(f"{_plain(source.snapshot())}\n")
    except GoneError:
        pass  # the job is over


def _plain(data: bytes) -> str:
    """Return JSON as a line that is harmless to a terminal, whatever server sent it."""
    text = data.decode("utf-8", "replace")
    if text.isprintable():
        return text
    try:
        return json.dumps(json.loads(text))
    except (ValueError, RecursionError):
        raise ConfigError(OTHER_VERSION) from None


class Drawing(Protocol):
    """A way to draw snapshots: a module."""

    def live(self, stdout: TextIO) -> AbstractContextManager[Callable[[Snapshot, int], None]]: ...
    def write(self, snapshot: Snapshot, stdout: TextIO, *, whole: bool) -> None: ...


def _drawing() -> Drawing:
    """Return the way to draw: with colours by rich where it is installed, otherwise in plain text."""
    if importlib.util.find_spec("rich") is None:
        from hvdgloo._observe.top import plain

        return plain
    from hvdgloo._observe.top import screen  # which --json and --link do without

    return screen


def _trace(source: Source, steps: int, stdout: TextIO) -> None:
    """Have steps traced, and write the merged trace to a new file.

    Raises:
        ConfigError: the trace is refused, failed, or cannot be written.
    """
    trace = source.trace(steps)
    while trace.state == "tracing":
        time.sleep(_LOOK_AGAIN)
        trace = source.state_of(trace.number)
    if trace.state != "ready":
        raise ConfigError(f"top: trace {trace.number} failed: {trace.text}")
    path = f"hvdgloo-trace-{trace.number}.json"
    try:
        with os.fdopen(create(path), "wb") as file:
            file.write(source.traced(trace.number))
    except OSError as error:
        raise ConfigError(f"top: {path} cannot be written: {error.strerror or error}") from None
    stdout.write(f"{path}: {trace.text}; open it in ui.perfetto.dev\n")


def _settled(source: Source) -> Snapshot:
    """Return the job once its ranks have sent samples, which they only begin to do for the first observer."""
    deadline = time.monotonic() + _SETTLING
    while True:
        snapshot = decoded(source.snapshot())
        if any(STATES[state] != "starting" for state in snapshot.ranks.state) or time.monotonic() >= deadline:
            return snapshot
        time.sleep(_SETTLING / 20)


def _watch(source: Source, stdout: TextIO, interval: float) -> None:
    drawing = _drawing()
    snapshot, first = decoded(source.snapshot()), 0
    with _keys() as pressed, drawing.live(stdout) as show:
        while True:
            show(snapshot, first)
            deadline = time.monotonic() + interval
            keys = ""
            while not keys and (left := deadline - time.monotonic()) > 0:
                keys = pressed(left)
            if not _QUIT.isdisjoint(keys):
                return
            if keys:
                moved = sum(keys.count(key) * by for key, by in _KEYS.items())
                first = max(0, min(first + moved, len(snapshot.ranks.rank) - 1))
                continue
            try:
                snapshot = decoded(source.snapshot())
            except GoneError:
                break
    # The last snapshot stays readable when the screen is gone.
    drawing.write(snapshot, stdout, whole=False)
    stdout.write("The job is over.\n")


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Provide a function that waits for keys for at most so many seconds, and returns them as they are pressed."""
    if not sys.stdin.isatty():
        yield _rest
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> str:
        if not select.select([descriptor], [], [], seconds)[0]:
            return ""
        return os.read(descriptor, 64).decode("ascii", "ignore") or "q"  # the terminal was closed

    tty.setcbreak(descriptor)
    try:
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _rest(seconds: float) -> str:
    """Sleep in place of a wait for keys, where there is no terminal."""
    time.sleep(seconds)
    return ""
