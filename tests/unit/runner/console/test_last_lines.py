"""The lines of a worker's output that are kept for the summary, and the omitted ones."""

from __future__ import annotations

import io
from typing import Any

import pytest

from hvdgloo.errors import ConfigError
from hvdgloo.runner.cli.flags import build_parser
from hvdgloo.runner.console.console import IN_SIGHT, Console
from hvdgloo.runner.console.interrupted_imports import InterruptedImport
from hvdgloo.runner.console.last_lines import KEPT, LastLines
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec, Output
from hvdgloo.runner.protocol.frames import STDERR, STDOUT

TRACE = [
    "Traceback (most recent call last):",
    '  File "t.py", line 4, in <module>',
    "    step()",
    "ValueError: bad data",
]


def last_lines(*lines: str) -> LastLines:
    found = LastLines()
    for position, line in enumerate(lines):
        found.add(line, position, error_stream=True)
    return found


class TestLastLines:
    def test_a_traceback_at_the_end(self) -> None:
        found = last_lines("epoch 1", *TRACE)
        assert found.lines == ("epoch 1", *TRACE)
        assert found.cause == found.exception == "ValueError: bad data"
        assert found.first_position == 0

    @pytest.mark.parametrize("after", [1, KEPT - 1, KEPT, 30])
    def test_the_cause_is_kept_when_text_follows(self, after: int) -> None:
        found = last_lines("epoch 1", *TRACE, *(f"wandb: waiting {i}" for i in range(after)))
        assert found.cause == "ValueError: bad data"
        assert len(found.lines) <= KEPT
        assert "ValueError: bad data" in found.lines
        assert found.lines[-1] == f"wandb: waiting {after - 1}"
        if after >= KEPT:
            assert found.lines[:5] == (*TRACE, f"[{after - 5} more lines]")
            assert found.first_position == 1

    def test_a_traceback_long_ago_was_survived(self) -> None:
        found = last_lines(*TRACE, *(f"epoch {i}" for i in range(200)))
        assert found.cause == "epoch 199"
        assert found.exception == ""
        assert len(found.lines) == KEPT

    def test_the_last_of_several_counts(self) -> None:
        found = last_lines(*TRACE, "The above exception ...", *TRACE[:-1], "KeyError: 'x'", "bye")
        assert found.cause == "KeyError: 'x'"

    def test_one_that_torch_distributed_prints(self) -> None:
        found = last_lines("epoch 1", *(f"[rank1]: {line}" for line in TRACE), "bye")
        assert found.cause == "ValueError: bad data"

    @pytest.mark.parametrize("error", ["SyntaxError: invalid syntax", "IndentationError: unexpected indent"])
    def test_a_program_that_is_no_python(self, error: str) -> None:
        found = last_lines('  File "train.py", line 3', "    def f(:", "          ^", error)
        assert found.exception == error

    def test_an_echo_without_a_traceback(self) -> None:
        found = last_lines("hvdgloo.errors.JobShutdownError: rank 1 (host a, pid 1) ended", "wandb: syncing")
        assert found.cause.startswith("hvdgloo.errors.JobShutdownError: rank 1 ")

    def test_one_that_was_cut_short_is_no_cause(self) -> None:
        assert last_lines(*TRACE[:-1]).cause == "    step()"

    def test_what_is_printed_elsewhere_does_not_tear_it(self) -> None:
        found = LastLines()
        for number, line in enumerate(TRACE):
            found.add(line, 0, error_stream=True)
            found.add(f"batch {number}", 0, error_stream=False)
        assert found.cause == "ValueError: bad data"


class TestInSight:
    def console(self, **options: Any) -> tuple[Console, io.StringIO]:
        stream = io.StringIO()
        return Console(stdout=stream, stderr=stream, options=Output(**options)), stream

    def write(self, console: Console, rank: int, *lines: str, stream: int = STDERR) -> None:
        console.output(rank, stream, "".join(f"{line}\n" for line in lines).encode())

    def test_a_failure_is_told_once(self) -> None:
        console, _ = self.console()
        self.write(console, 1, *TRACE)
        console.finish()  # it was held back for a moment: more of it might follow
        assert console.in_sight(1)
        self.write(console, 0, *["more"] * (IN_SIGHT - len(TRACE)))
        assert console.in_sight(1)
        self.write(console, 0, "too much")
        assert not console.in_sight(1), "it has been pushed away by other ranks' output"

    def test_what_was_never_printed_is_not_in_sight(self) -> None:
        console, _ = self.console(log_ranks=frozenset({0}))
        self.write(console, 1, *TRACE)
        assert not console.in_sight(1)
        assert not console.in_sight(0)
        assert console.tail(1) == tuple(TRACE)

    def test_what_went_to_another_place_is_not_in_sight(self) -> None:
        console = Console(stdout=io.StringIO(), stderr=io.StringIO())
        self.write(console, 0, "to the file", stream=STDOUT)
        self.write(console, 1, "to the terminal")
        assert not console.in_sight(0)
        assert console.in_sight(1)

    def test_ranks_that_are_shown_and_prefixes(self) -> None:
        console, stream = self.console(log_ranks=frozenset({1}), prefix=False)
        self.write(console, 0, "zero")
        self.write(console, 1, "one", stream=STDOUT)
        console.finish()
        console.drain(lambda: False)
        assert stream.getvalue() == "one\n"


def importing(error: str = "KeyboardInterrupt") -> list[bytes]:
    return [
        b"Traceback (most recent call last):\n",
        b'  File "train.py", line 1, in <module>\n',
        b"    import torch\n",
        b'  File ".../torch/__init__.py", line 70, in <module>\n',
        b"    from torch._C import *  # noqa: F403\n",
        b"    ^^^^^^^^^^^^^^^^^^^^^\n",
        error.encode() + b"\n",
    ]


class TestInterruptedImports:
    def test_they_are_left_out_with_all_that_follows(self) -> None:
        worker = InterruptedImport()
        assert worker.feed([b"loading\n", *importing(), b"\n", b"During handling of the above ...\n"]) == [b"loading\n"]
        assert worker.feed([b"Exception ignored in: ...\n"]) == []
        assert worker.finish() == []

    def test_line_by_line(self) -> None:
        worker = InterruptedImport()
        assert [worker.feed([line]) for line in importing()] == [[]] * len(importing())

    def test_another_error_is_shown(self) -> None:
        lines = importing("ImportError: libfoo.so is missing")
        assert InterruptedImport().feed(lines) == lines

    def test_where_the_program_itself_was_is_shown(self) -> None:
        lines = [line.replace(b"import ", b"train(").replace(b"from ", b"go") for line in importing()]
        assert InterruptedImport().feed([*lines, b"bye\n"]) == [*lines, b"bye\n"]

    def test_what_never_ends_is_shown_in_the_end(self) -> None:
        worker = InterruptedImport()
        assert worker.feed(importing()[:3]) == []
        assert worker.finish() == importing()[:3]

    def test_an_interpreter_that_was_starting(self) -> None:
        lines = [b"Fatal Python error: init_import_site: Failed to import the site module\n", *importing()]
        assert InterruptedImport().feed(lines) == []


class TestFlags:
    @pytest.mark.parametrize(
        ("text", "ranks"), [("0", {0}), ("0,4-6", {0, 4, 5, 6}), ("3-3", {3}), (" 1 , 2 ", {1, 2})]
    )
    def test_ranks(self, text: str, ranks: set[int]) -> None:
        assert build_parser().given(["--log-ranks", text]).log_ranks == ranks

    @pytest.mark.parametrize("text", ["", "x", "2-1", "-1", "1-", "0,,1", "99999999", "²"])
    def test_no_ranks(self, text: str) -> None:
        with pytest.raises(ConfigError, match="is not a list of ranks, such as 0 or 0,4-7"):
            build_parser().given([f"--log-ranks={text}"])

    def spec(self, np: int, ranks: set[int] | None, *, prefix: bool) -> LaunchSpec:
        log_ranks = None if ranks is None else frozenset(ranks)
        hosts = (HostEntry("localhost", np),)
        return LaunchSpec(("true",), hosts, np, "/", {}, b"", output=Output(log_ranks=log_ranks, prefix=prefix))

    @pytest.mark.parametrize(
        ("np", "ranks", "prefix", "problem"),
        [
            (2, {2}, True, "--log-ranks 2: there are only ranks 0 to 1"),
            (1, {1}, True, "--log-ranks 1: there is only rank 0"),
            (2, None, False, "--no-prefix is for the output of a single rank"),
            (2, {0, 1}, False, "--no-prefix is for the output of a single rank"),
        ],
    )
    def test_what_does_not_fit(self, np: int, ranks: set[int] | None, prefix: bool, problem: str) -> None:
        with pytest.raises(ConfigError, match=problem):
            self.spec(np, ranks, prefix=prefix)

    def test_what_fits(self) -> None:
        self.spec(1, None, prefix=False)
        self.spec(4, {3}, prefix=False)
        self.spec(4, {0, 3}, prefix=True)
