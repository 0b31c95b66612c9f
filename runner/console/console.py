"""The workers' output: prefixed lines on the console, byte-exact files, and the last lines for a summary.

The supervisor passes output to ``output`` as it arrives and never waits for a reader. Two writer threads do: one for
the console and one for the files.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from hvdgloo._platform.files import check_link
from hvdgloo._platform.spelling import followed_by, in_one_line
from hvdgloo._platform.writable import why_not_writable
from hvdgloo.errors import ConfigError, LaunchError
from hvdgloo.runner.console.interrupted_imports import InterruptedImport
from hvdgloo.runner.console.last_lines import LastLines
from hvdgloo.runner.console.lines import Lines, Screen, Source
from hvdgloo.runner.console.tracebacks import Piece, Tracebacks
from hvdgloo.runner.console.writer import DescriptorTarget, FileTarget, Target, TextTarget, Writer, is_broken_pipe
from hvdgloo.runner.job.outcome import named_culprit
from hvdgloo.runner.job.spec import Output
from hvdgloo.runner.protocol.frames import STDERR, STDOUT
from hvdgloo.topology import ranges

IN_SIGHT = 20
"""Lines that may follow what a failed worker printed last before the summary repeats it."""

_ERROR_WIDTH = 200
_IDLE = 0.1  # seconds after which an unfinished line is shown, where that is wanted
_STREAM_NAMES = {STDOUT: "stdout", STDERR: "stderr"}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True)
class Window:
    """Current size of the terminal that the launcher draws its own lines on."""

    width: int
    height: int


class Console:
    """The destination of all output.

    Workers are identified by number. Their lines, and the names of their files, begin with the ranks that they have at
    that moment; in a job of fixed size, rank and number are the same.

    Args:
        stdout, stderr: receive the workers' lines; the launcher's own notices go to ``stderr``.
        options: the user's options. Files contain the output of all ranks.
        interactive: the rank whose unfinished lines (prompts) are shown at once.
        quiet: suppress notices.
        news: report changes among the workers, even if notices are suppressed.
        rank_of: returns a worker's rank, given its number.

    Attributes:
        on_broken: called from another thread when ``stdout`` or ``stderr`` has lost its reader.
        opened: time of construction, in seconds since the epoch.
        unwritten: the outputs that could not be written, each with the reason.
    """

    def __init__(
        self,
        *,
        stdout: TextIO,
        stderr: TextIO,
        options: Output = Output(),  # noqa: B008 - it never changes
        interactive: int | None = None,
        quiet: bool = False,
        news: bool = True,
        rank_of: Callable[[int], int] = lambda number: number,
    ) -> None:
        self._rank_of = rank_of
        self._options = options
        self._interactive = interactive
        self._quiet = quiet
        self._news = news or not quiet
        self.on_broken: Callable[[], None] = lambda: None
        self.opened = time.time()
        self.unwritten: list[str] = []
        self._lines: dict[tuple[int, int], Lines] = {}
        self._unfinished: dict[tuple[int, int], float] = {}
        self._last: defaultdict[int, LastLines] = defaultdict(LastLines)
        self._printed: Counter[int] = Counter()
        self._interrupted: defaultdict[int, InterruptedImport] | None = None
        self._tracebacks = Tracebacks()
        self._same = same = _same_file(stdout, stderr)
        screen = Screen(terminal=is_terminal(stdout))
        self._screens = {STDOUT: screen, STDERR: screen if same else Screen(terminal=is_terminal(stderr))}
        self._terminal = _descriptor(stderr)
        self._files: Writer | None = None
        self._file_list: list[FileTarget] = []
        self._size = 0
        self._file_index: dict[tuple[int, int], int] = {}
        # If both lead to one place, one thread writes them and lines keep their order; otherwise neither waits for the
        # other: `hvdgloo-run ... | less` still shows errors.
        out = Writer("hvdgloo-stdout", [_target(stdout)], lambda _, error: self._console_failed(STDOUT, error))
        err = (
            out
            if same
            else Writer("hvdgloo-stderr", [_target(stderr)], lambda _, error: self._console_failed(STDERR, error))
        )
        self._writers = {STDOUT: out, STDERR: err}

    # From the supervisor.

    def expect(self, size: int, *, again: bool = False) -> None:
        """Prepare for the output of ``size`` workers.

        Args:
            again: append to the files, which contain the output of the same ranks before their restart.

        Raises:
            LaunchError: the directory cannot be written to.
        """
        files = _open_files(self._options.directory, range(size), size, again=again)
        self._size = size
        self._files = Writer("hvdgloo-files", list(files.values()), self._file_failed) if files else None
        self._file_list = list(files.values())
        self._file_index = {source: index for index, source in enumerate(files)}

    def output(self, number: int, stream: int, data: bytes) -> None:
        """Process bytes that a worker wrote."""
        source = (number, stream)
        if self._files is not None:
            self._files.put(self._file(self._files, self._rank_of(number), stream), data)
        lines = self._lines.setdefault(source, Lines())
        self._take(source, lines.feed(data))
        self._unfinished.pop(source, None)
        if lines.rest and self._shows_unfinished(source, lines):
            self._unfinished[source] = time.monotonic() + _IDLE

    def notice(self, text: str) -> None:
        """Print a notice of the launcher's own."""
        if not self._quiet:
            self.always(text)

    def news(self, text: str) -> None:
        """Print a change among the workers."""
        if self._news:
            self.always(text)

    def always(self, text: str) -> None:
        """Print a text, which may have several lines, even if notices are suppressed."""
        for each in text.split("\n"):
            line = f"hvdgloo-run: {each}\n".encode("utf-8", "surrogateescape")
            self._printed[STDERR] += 1
            self._draw(STDERR, self._screens[STDERR].line((-1, STDERR), b"", line))

    def window(self) -> Window | None:
        """Return the size of the terminal for ``below``; None if there is no terminal, other programs are using it, or
        notices are suppressed."""
        if self._quiet or not self._screens[STDERR].terminal or self._terminal is None:
            return None
        try:
            if os.tcgetpgrp(self._terminal) != os.getpgrp():
                return None  # we are in the background of a shell, which writes here
        except OSError:
            pass  # the terminal controls no session, so there is no background either
        try:
            size = os.get_terminal_size(self._terminal)
        except OSError:
            return None
        return Window(size.columns or 80, size.lines or 24)

    def below(self, lines: Sequence[str]) -> None:
        """Keep these lines below everything else on the terminal until the next call; an empty list removes them."""
        screen = self._screens[STDERR]
        lifted = screen.lift()
        screen.below = tuple(line.encode("utf-8", "replace") for line in lines)
        data = lifted + screen.lower()
        if data:
            self._put(STDERR, data)

    def wait_until_written(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for each of the console's writers."""
        for writer in {*self._writers.values()}:
            writer.wait_until_written(timeout)

    def tick(self) -> float | None:
        """Show unfinished lines and tracebacks that are due; return the time of the next one."""
        now = time.monotonic()
        for source, when in list(self._unfinished.items()):
            if when <= now:
                del self._unfinished[source]
                lines = self._lines[source]
                screen = self._screens[source[1]]
                bar = source[0] != self._interactive
                self._draw(source[1], screen.partial(source, self._prefix(source), lines.rest, bar=bar))
        self._show(self._tracebacks.take(now), now)
        times = (min(self._unfinished.values(), default=None), self._tracebacks.next)
        return min((when for when in times if when is not None), default=None)

    @property
    def congested(self) -> bool:
        """True if so much output is waiting to be written that workers should wait as well."""
        return sum(writer.backlog for writer in self._all_writers()) > self._options.backlog

    def tail(self, number: int) -> tuple[str, ...]:
        """Return the last lines of a worker, from both streams in order of arrival."""
        return self._last[number].lines

    def cause(self, rank: int) -> str:
        """Return the line with a worker's most likely reason for its failure; empty if it printed nothing."""
        return self._last[rank].cause

    def exception(self, number: int) -> str:
        """Return the last line of a worker's last traceback; empty if none explains the worker's end."""
        return self._last[number].exception

    def shown_with(self, number: int) -> int:
        """The worker whose traceback was shown in place of this one's, which was equal; itself if its own was."""
        return self._tracebacks.shown_with(number)

    def culprit(self, rank: int) -> int | None:
        """Return the rank that a worker blames for its failure."""
        return named_culprit(self.cause(rank))

    def folder(self, rank: int | None) -> str:
        """Return the directory with the output files of a rank, or of all ranks; empty if there are none."""
        directory = self._options.directory if self._size else None
        if directory is None:
            return ""
        return directory if rank is None else rank_folder(directory, rank, self._size)

    def in_sight(self, rank: int) -> bool:
        """Tell whether the reader of the launcher's own lines has just seen the lines of ``tail``."""
        first = self._last[rank].first_position
        return first is not None and self._shows(rank) and self._printed[STDERR] - first <= IN_SIGHT

    def interrupted(self) -> None:
        """Suppress the tracebacks of workers in the middle of an import: all are about to be interrupted."""
        if self._interrupted is None:
            self._interrupted = defaultdict(InterruptedImport)

    def finish(self) -> None:
        """Write the unfinished lines, because no more output will arrive."""
        for source, lines in self._lines.items():
            if rest := lines.finish():
                self._take(source, [rest])
        for rank, held in (self._interrupted or {}).items():
            self._sort((rank, STDERR), held.finish())
        now = time.monotonic()
        self._show(self._tracebacks.take(now, over=True), now, over=True)
        self._unfinished.clear()

    def drain(self, give_up: Callable[[], bool]) -> None:
        """Wait until everything is written, as any program waits for its terminal; ``give_up`` ends the wait."""
        for writer in self._all_writers():
            while not writer.wait_until_written(0.1):
                if give_up():
                    return

    def close(self) -> None:
        """Stop the threads."""
        for writer in self._all_writers():
            writer.close()
        for file in self._file_list:
            file.close()

    # Internal.

    def _file(self, files: Writer, rank: int, stream: int) -> int:
        """Return the index of a rank's file. Files of unexpected ranks are created on first use."""
        if (rank, stream) not in self._file_index:
            try:
                made: Mapping[tuple[int, int], Target] = _open_files(self._options.directory, [rank], self._size)
            except LaunchError as error:
                self.always(followed_by(error, f"the output of rank {rank} is not written to a file"))
                self.unwritten.append(str(error))
                made = dict.fromkeys(((rank, STDOUT), (rank, STDERR)), _Nowhere())
            self._file_list += [file for file in made.values() if isinstance(file, FileTarget)]
            self._file_index.update({source: files.add(file) for source, file in made.items()})
        return self._file_index[rank, stream]

    def _all_writers(self) -> set[Writer]:
        return {*self._writers.values(), *([self._files] if self._files is not None else [])}

    def _shows(self, number: int) -> bool:
        return self._options.log_ranks is None or self._rank_of(number) in self._options.log_ranks

    def _take(self, source: tuple[int, int], lines: Sequence[bytes]) -> None:
        """Process complete lines of a worker: show them, and remember the last ones."""
        rank, stream = source
        # If the two streams lead to different places, the reader of stderr has not seen stdout.
        visible = self._same or stream == STDERR
        position = self._printed[STDERR] if visible else -math.inf
        for number, line in enumerate(lines):
            text = _ESCAPES.sub("", line.decode("utf-8", "replace")).rstrip()
            if text and not line.endswith(b"\r"):
                self._last[rank].add(text, position + number, error_stream=stream == STDERR)
        if self._interrupted is not None and stream == STDERR:
            lines = self._interrupted[rank].feed(lines)
        self._sort(source, lines)

    def _sort(self, source: Source, lines: Sequence[bytes]) -> None:
        """Show lines now, or together with the traceback that they belong to."""
        if source[0] == self._interactive or not self._shows(source[0]):
            self._emit(source, lines)
        else:
            now = time.monotonic()
            self._show(self._tracebacks.feed(source, lines, now), now)

    def _show(self, pieces: Sequence[Piece], now: float, *, over: bool = False) -> None:
        for piece in pieces:
            self._emit(piece.source, piece.lines)
        for numbers, error in self._tracebacks.same(now, over=over):
            ranks = sorted(set(map(self._rank_of, numbers)))  # successive workers may have had one rank
            some = f"{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"
            text = in_one_line(error)
            shown = text if len(text) <= _ERROR_WIDTH else f"{text[:_ERROR_WIDTH]}..."
            self.always(f"the same error on rank{some}: {shown}")

    def _emit(self, source: tuple[int, int], lines: Sequence[bytes]) -> None:
        if not lines or not self._shows(source[0]):
            return
        prefix, screen = self._prefix(source), self._screens[source[1]]
        self._draw(source[1], b"".join([screen.line(source, prefix, line) for line in lines]))
        self._printed[STDERR if self._same else source[1]] += len(lines)

    def _prefix(self, source: tuple[int, int]) -> bytes:
        when = time.asctime() if self._options.timestamps else ""
        if self._options.prefix:
            return f"{when}[{self._rank_of(source[0])}]<{_STREAM_NAMES[source[1]]}>:".encode()
        return f"{when} ".encode() if when else b""

    def _draw(self, stream: int, data: bytes) -> None:
        """Write the result of a Screen, with our own lines out of its way."""
        screen = self._screens[stream]
        self._put(stream, screen.lift() + data + screen.lower())

    def _put(self, stream: int, data: bytes) -> None:
        self._writers[stream].put(0, data)

    def _shows_unfinished(self, source: tuple[int, int], lines: Lines) -> bool:
        """Tell whether to show an unfinished line at once: a prompt always, a bar only if it can be erased again."""
        if not self._shows(source[0]):
            return False
        is_bar = lines.redrawn or lines.rest.endswith(b"\r")
        return source[0] == self._interactive or (is_bar and self._screens[source[1]].terminal)

    def _console_failed(self, stream: int, error: Exception) -> None:
        if is_broken_pipe(error) or isinstance(error, ValueError):
            self.on_broken()
            return
        self.unwritten.append(f"standard {'output' if stream == STDOUT else 'error'}: {_reason(error)}")
        if stream == STDOUT and self._writers[STDERR] is not self._writers[STDOUT]:
            text = f"hvdgloo-run: standard output can no longer be written: {error}\n"
            self._put(STDERR, text.encode("utf-8", "replace"))

    def _file_failed(self, index: int, error: Exception) -> None:
        rank, stream = list(self._file_index)[index]
        self.unwritten.append(f"the file of rank {rank}'s {_STREAM_NAMES[stream]}: {_reason(error)}")
        text = f"hvdgloo-run: rank {rank}'s {_STREAM_NAMES[stream]} is no longer written to its file: {error}\n"
        # Bypass the screen: this is the other writer's thread, and the screen belongs to the supervisor's.
        self._put(STDERR, text.encode("utf-8", "replace"))


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class _Nowhere:
    """A target that drops everything."""

    def write(self, data: bytes) -> None:
        """Drop the data."""


def rank_folder(directory: str, rank: int, size: int) -> str:
    """Return ``directory/rank.<rank>``, padded to the digits of the highest rank, so that names sort."""
    return os.path.join(directory, f"rank.{rank:0{len(str(size - 1))}d}")


def make_directory(directory: str) -> None:
    """Create the directory for per-rank files early, so that an unusable one is reported before anything starts.

    Files of an earlier job are checked as well, because they will be overwritten.

    Raises:
        ConfigError: the directory cannot be created or written to.
    """
    try:
        _make_private(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory)
        earlier = [entry.path for entry in os.scandir(directory) if entry.name.startswith("rank.")]
        for folder in earlier:
            check_link(folder)
    except OSError as error:
        not_a_folder = isinstance(error, FileExistsError | NotADirectoryError)
        where = "it" if error.filename == directory else error.filename
        reason = f"{where} is not a directory" if not_a_folder else f"{where} cannot be written: {error.strerror}"
        raise ConfigError(f"--output-filename {directory}: {reason}") from error
    for path in (os.path.join(folder, name) for folder in earlier for name in _STREAM_NAMES.values()):
        reason = why_not_writable(path)
        if reason:
            raise ConfigError(f"--output-filename {directory}: {path} cannot be written: {reason}")


def _make_private(folder: str) -> None:
    """Create a directory and its missing parents for this user alone; existing ones stay as they are.

    Raises:
        OSError: it cannot be created, or its name is another user's link.
    """
    above = os.path.dirname(os.path.abspath(folder))
    if not os.path.isdir(above):
        _make_private(above)
    try:
        os.mkdir(folder, 0o700)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise
        check_link(folder)


def _open_files(
    directory: str | None, ranks: Iterable[int], size: int, *, again: bool = False
) -> dict[tuple[int, int], FileTarget]:
    files: dict[tuple[int, int], FileTarget] = {}
    if directory is None:
        return files
    try:
        for rank in ranks:
            folder = rank_folder(directory, rank, size)
            _make_private(folder)
            for stream, name in _STREAM_NAMES.items():
                files[rank, stream] = FileTarget(os.path.join(folder, name), append=again)
    except OSError as error:
        for file in files.values():
            file.close()
        raise LaunchError(f"--output-filename {directory}: {error}") from error
    return files


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):
        return None


def _target(stream: TextIO) -> Target:
    descriptor = _descriptor(stream)
    # A replacement of sys.stdout may expose the real one's descriptor, and still expect to be written to itself.
    if descriptor is None or stream not in (sys.__stdout__, sys.__stderr__):
        return TextTarget(stream)
    stream.flush()
    return DescriptorTarget(descriptor)


def is_terminal(stream: TextIO) -> bool:
    """Tell whether a stream leads to a terminal."""
    descriptor = _descriptor(stream)
    return descriptor is not None and os.isatty(descriptor)


def _same_file(one: TextIO, other: TextIO) -> bool:
    first, second = _descriptor(one), _descriptor(other)
    if first is None or second is None:
        return one is other
    if not os.path.sameopenfile(first, second):
        return False
    # A regular file that was opened twice has two positions, and both must be written.
    regular = stat.S_ISREG(os.fstat(first).st_mode)
    return not regular or os.lseek(first, 0, os.SEEK_CUR) == os.lseek(second, 0, os.SEEK_CUR)
