"""Pain 20: what is said while a job starts, and when, on a clock of the test's own."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import select
from collections.abc import Sequence
from dataclasses import dataclass

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo.runner.console.console import Console, Window
from hvdgloo.runner.console.lines import Screen
from hvdgloo.runner.console.progress import (
    NOT_TRIED,
    REMEDIES,
    Arriving,
    Backoff,
    InitProgress,
    Missing,
    Progress,
    Step,
    describe_missing,
    seconds,
)
from hvdgloo.runner.console.startup_view import INIT_LINE_AFTER, SHOW_AFTER, LiveDisplay, StartDisplay
from hvdgloo.runner.protocol.frames import STDOUT
from hvdgloo.runner.supervise.init_watch import Arrivals, InitWatch


class Surface:
    """A console that remembers."""

    def __init__(self, window: Window | None) -> None:
        self.shape = window
        self.notices: list[str] = []
        self.shown: list[str] = []
        self.drawings = 0

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def window(self) -> Window | None:
        return self.shape

    def below(self, lines: Sequence[str]) -> None:
        self.shown = list(lines)
        self.drawings += 1

    def wait_until_written(self, timeout: float) -> None:
        pass


@dataclass
class Host:
    """The state of a host, as set by the test."""

    name: str
    step: Step = Step.CONNECTING
    since: float = 0.0
    detail: str = ""


class Scene:
    """A display, its surface and its clock."""

    def __init__(self, *hosts: str, window: Window | None = None, verbose: bool = False, term: str = "xterm") -> None:
        self.now = 100.0
        self.surface = Surface(window)
        self.hosts = {name: Host(name, since=100.0) for name in hosts}
        self.display = StartDisplay(
            list(self.hosts.values()),
            self.surface,
            environ={"TERM": term, "NO_COLOR": "1"},
            verbose=verbose,
            clock=lambda: self.now,
        )

    def step(self, name: str, step: Step, detail: str = "") -> None:
        """Have a host get on."""
        host = self.hosts[name]
        host.since = host.since if host.step is step else self.now
        host.step, host.detail = step, detail
        self.display.step(host)

    def at(self, elapsed: float) -> float | None:
        """Let the time come; when the display wants to be called again, since the start."""
        self.now = 100.0 + elapsed
        wanted = self.display.tick()
        return None if wanted is None else wanted - 100.0


class TestList:
    def test_it_comes_late_and_goes_when_all_are_ready(self) -> None:
        scene = Scene("a", "b", window=Window(80, 24))
        assert scene.at(0.5) == SHOW_AFTER
        scene.step("a", Step.READY)
        assert scene.surface.drawings == 0
        assert scene.at(SHOW_AFTER) == SHOW_AFTER + 1
        assert scene.surface.shown == ["starting on 2 hosts, 2.0 s", "  a  ready", "  b  connecting        2.0 s"]
        scene.step("b", Step.READY)
        assert scene.at(2.5) is None
        assert (scene.surface.shown, scene.surface.notices) == ([], [])

    def test_a_step_is_shown_soon_and_many_of_them_not_often(self) -> None:
        scene = Scene(*"abcdefgh", window=Window(80, 24))
        scene.at(SHOW_AFTER)
        for number, host in enumerate("abcdefg"):
            scene.step(host, Step.READY)
            scene.at(2.5 + number / 1000)
        assert scene.surface.drawings == 2
        scene.at(2.6)
        assert scene.surface.drawings == 3
        assert [line.split()[1] for line in scene.surface.shown[1:]] == ["ready"] * 7 + ["connecting"]

    def test_no_list_where_others_write(self) -> None:
        """A job in a shell's background says it in lines; brought back, it draws."""
        scene = Scene("a", window=None)
        scene.at(SHOW_AFTER)
        assert scene.surface.drawings == 0
        scene.surface.shape = Window(80, 24)
        scene.at(3)
        assert scene.surface.shown[0] == "starting on 1 host, 3.0 s"

    def test_the_end_takes_it_away_whatever_happened(self) -> None:
        scene = Scene("a", window=Window(80, 24))
        with scene.display:
            scene.at(3)
            assert scene.surface.shown
        assert not scene.surface.shown
        assert scene.at(10) is None
        assert not scene.surface.shown

    @given(
        st.lists(st.text(min_size=1, max_size=70), min_size=1, max_size=50, unique=True),
        st.text(max_size=150),
        st.integers(20, 200),
        st.integers(1, 60),
    )
    def test_it_never_leaves_its_window(self, hosts: list[str], detail: str, width: int, height: int) -> None:
        first, *others = hosts
        progress = Progress([Host(first, Step.PYTHON, 1.0, detail), *map(Host, others)], 0.0)
        lines = progress.screen(1e4, width, height, colour=False)
        assert 1 <= len(lines) <= height
        assert max(map(len, lines)) < width
        assert all(line.isprintable() for line in lines)

    def test_colours_change_no_column(self) -> None:
        progress = Progress([Host("connecting"), Host("b", Step.PROBING, 1.0, "10.0.0.2")], 0.0)
        plain = progress.screen(3.0, 80, 24, colour=False)
        coloured = progress.screen(3.0, 80, 24, colour=True)
        assert coloured[1] == "  connecting  \x1b[33mconnecting\x1b[0m        3.0 s"
        assert [re.sub(r"\x1b\[\d*m", "", line) for line in coloured] == plain

    def test_many_hosts_are_counted_and_the_slowest_named(self) -> None:
        hosts = [Host("h0", Step.PYTHON, 4.0), *(Host(f"h{number}", Step.READY, 4.0) for number in range(1, 60))]
        hosts += [Host(f"h{number}", Step.CONNECTING, 1.0) for number in range(60, 63)]
        progress = Progress([*hosts, Host("h63", detail=NOT_TRIED)], 0.0)
        assert [" ".join(line.split()) for line in progress.screen(10.0, 100, 24, colour=False)] == [
            "starting on 64 hosts, 10 s: 4 connecting, 1 python, 59 ready",
            "h63 connecting 10 s not tried yet",
            *(f"h{number} connecting 9.0 s" for number in range(60, 63)),
            "h0 python 6.0 s",
        ]


class TestLines:
    def test_a_log_hears_of_it_more_and_more_rarely(self) -> None:
        scene = Scene("a", "b")
        assert scene.at(9.9) == 10
        scene.step("a", Step.READY)
        scene.step("b", Step.CONNECTING, "attempt 2")
        wanted = [10.0]
        for _ in range(3):
            wanted.append(scene.at(wanted[-1]) or math.nan)
        assert wanted == [10, 30, 70, 150]
        assert scene.surface.notices[0] == (
            "1 of 2 hosts ready after 10 s; still waiting for b (connecting for 10 s, attempt 2)"
        )
        assert len(scene.surface.notices) == 3
        scene.now += 20
        scene.step("b", Step.READY)
        scene.step("a", Step.PROBING)
        scene.step("a", Step.READY, "reached at 10.0.0.1")
        assert len(scene.surface.notices) == 3
        scene.display.close()
        assert scene.surface.notices[3:] == ["all hosts are ready after 90 s"]

    def test_a_quick_start_says_nothing(self) -> None:
        scene = Scene("a")
        scene.step("a", Step.READY)
        assert scene.at(20) is None
        assert scene.surface.notices == []

    def test_verbose_tells_every_step_once(self) -> None:
        scene = Scene("a", verbose=True, window=Window(80, 24))
        for step, detail in ((Step.PYTHON, ""), (Step.UP, "10.0.0.7, agent is process 12")):
            scene.now += 0.25
            scene.step("a", step, detail)
        assert scene.surface.notices == [
            "a: python after 0.2 s",
            "a: up after 0.5 s (10.0.0.7, agent is process 12)",
        ]

    def test_a_command_that_ended_each_time_is_told_from_one_that_waits(self) -> None:
        text = describe_missing([Missing("a", Step.CONNECTING, "status 255", ended=True)], 5.0)
        assert "a (status 255): the command that connects to it was tried repeatedly, and failed each time" in text
        assert "nothing has answered yet" not in text

    def test_what_one_can_do_is_said_for_every_step(self) -> None:
        assert set(REMEDIES) == {step for step in Step if step.waits}
        text = describe_missing(
            [Missing("a", Step.PROBING), Missing("b", Step.CONNECTING, "x"), Missing("c", Step.CONNECTING)], 5.0
        )
        first, *lines = text.splitlines()
        assert first == "3 hosts not ready within 5 s (--start-timeout), at these steps:"
        assert lines == [
            f"  connecting: b (x), c: {REMEDIES[Step.CONNECTING]}",
            f"  probing: a: {REMEDIES[Step.PROBING]}",
        ]

    @pytest.mark.parametrize(
        ("duration", "text"), [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (119.4, "119 s"), (150, "2 min 30 s")]
    )
    def test_durations(self, duration: float, text: str) -> None:
        assert seconds(duration) == text

    def test_backing_off(self) -> None:
        backoff = Backoff(0.0, 1.0)
        assert [now for now in range(20) if backoff.due(now)] == [1, 3, 7, 15]


class TestOnAScreen:
    """The bytes, as a terminal shows them."""

    @staticmethod
    def screen(pieces: Sequence[bytes]) -> list[str]:
        screen = pyte.Screen(40, 12)
        pyte.ByteStream(screen).feed(b"".join(pieces).replace(b"\n", b"\r\n"))
        lines = [line.rstrip() for line in screen.display]
        return lines[: max((n + 1 for n, line in enumerate(lines) if line), default=0)]

    def test_output_goes_above(self) -> None:
        screen = Screen(terminal=True)
        screen.below = (b"list", b"of two")
        out = [screen.lower()]
        for line in (b"one\n", b"two\n"):
            out += [screen.lift(), screen.line((0, 1), b"[0]", line), screen.lower()]
        assert self.screen(out) == ["[0]one", "[0]two", "list", "of two"]
        screen.below = ()
        out += [screen.lift(), screen.lower()]
        assert self.screen(out) == ["[0]one", "[0]two"]

    def test_an_unfinished_line_is_not_drawn_over(self) -> None:
        screen = Screen(terminal=True)
        screen.below = (b"list",)
        out = [screen.lower(), screen.lift(), screen.partial((0, 1), b"[0]", b"password: ", bar=False), screen.lower()]
        assert self.screen(out) == ["[0]password:"]
        out += [screen.lift(), screen.line((0, 1), b"[0]", b"password: ok\n"), screen.lower()]
        assert self.screen(out) == ["[0]password: ok", "list"]

    def test_a_progress_bar_is_not_drawn_over(self) -> None:
        screen = Screen(terminal=True)
        screen.below = (b"list",)
        out = [screen.lower(), screen.lift(), screen.line((0, 1), b"[0]", b"50 %\r"), screen.lower()]
        out += [screen.lift(), screen.line((0, 1), b"[0]", b"60 %\r"), screen.lower()]
        assert self.screen(out) == ["[0]60 %"]
        out += [screen.lift(), screen.line((0, 1), b"[0]", b"done\n"), screen.lower()]
        assert self.screen(out) == ["[0]done", "list"]

    def test_a_console_on_a_terminal(self) -> None:
        master, slave = pty.openpty()
        with os.fdopen(slave, "w") as stream:
            console = Console(stdout=stream, stderr=stream)
            assert console.window() is not None
            console.below(["the list"])
            console.output(0, STDOUT, b"hello\n")
            console.notice("a notice")
            console.wait_until_written(5)
            seen = b""

            def shows(lines: list[str]) -> bool:
                """Wait for the terminal to show these lines, which arrive in pieces; return False if it does not."""
                nonlocal seen
                while self.screen([seen.replace(b"\r\n", b"\n")]) != lines:
                    if not select.select([master], [], [], 5)[0]:
                        return False
                    seen += os.read(master, 65536)
                return True

            assert shows(["[0]<stdout>:hello", "hvdgloo-run: a notice", "the list"]), seen
            console.below([])
            console.wait_until_written(5)
            assert shows(["[0]<stdout>:hello", "hvdgloo-run: a notice"]), seen
            console.close()
        os.close(master)

    def test_where_there_is_no_terminal_there_is_no_window(self) -> None:
        console = Console(stdout=io.StringIO(), stderr=io.StringIO())
        assert console.window() is None
        console.close()


class TestInit:
    """Workers that wait in hvd.init()."""

    @staticmethod
    def watch(arrivals: list[Arrivals], **options: bool) -> InitWatch:
        watch = InitWatch(lambda: arrivals[-1], {0: "a", 1: "b", 2: "c"}, timeout=30.0, **options)
        for rank in range(3):
            watch.spawned(rank, 10 + rank)
        return watch

    def test_slow_ones_are_named_after_a_while(self) -> None:
        arrivals = [Arrivals(0, (0, 1, 2))]
        watch = self.watch(arrivals)
        assert [watch.report(now) for now in (0.0, 10.0, 20.0, 30.0)] == [""] * 4
        arrivals.append(Arrivals(1, (1, 2)))
        said = {now: text for now in range(31, 200) if (text := watch.report(float(now)))}
        assert list(said) == [50, 70, 110, 190]
        assert said[50].startswith(
            "hvd.init() has waited 10 s for ranks 1 (b, process 11), 2 (c, process 12), which have"
        )
        assert watch.verdict() is None
        arrivals.append(Arrivals(3, ()))
        assert watch.report(1000.0) == ""
        assert watch.next == math.inf

    def test_a_job_without_init_is_none_of_our_business(self) -> None:
        watch = self.watch([Arrivals(0, (0, 1, 2))])
        watch.ended(1, 0)
        assert [watch.report(float(now)) for now in range(100)] == [""] * 100
        assert watch.verdict() is None

    def test_one_that_has_ended_is_found_even_if_others_come_later(self) -> None:
        arrivals = [Arrivals(0, (0, 1, 2))]
        watch = self.watch(arrivals)
        watch.report(0.0)
        watch.ended(1, 0)
        watch.report(10.0)
        arrivals.append(Arrivals(1, (1, 2)))
        assert watch.next == 11.0
        watch.report(11.0)
        failure = watch.verdict()
        assert failure is not None
        assert (failure.rank, failure.host, failure.exit_code) == (1, "b", 1)
        assert failure.reason == "ended without calling hvd.init(), in which 1 other rank waited for it"

    def test_what_was_known_before_it_ended_proves_nothing(self) -> None:
        """It may have arrived, taken part in everything and ended before the launcher heard of its arrival."""
        arrivals = [Arrivals(1, (1, 2))]
        watch = self.watch(arrivals)
        watch.report(0.0)
        arrivals.append(Arrivals(2, (2,)))
        watch.ended(1, 0)
        assert watch.verdict() is None
        watch.ended(2, 0)
        failure = watch.verdict()
        assert failure is not None
        assert failure.rank == 2

    def test_one_that_failed_speaks_for_itself(self) -> None:
        watch = self.watch([Arrivals(2, (1,))])
        watch.ended(1, 7)
        assert watch.verdict() is None

    def test_one_that_had_called_it_may_end(self) -> None:
        watch = self.watch([Arrivals(2, (1,))])
        watch.ended(0, 0)
        assert watch.verdict() is None

    def test_too_late(self) -> None:
        watch = self.watch([Arrivals(1, (1, 2), "epoch 0 did not start within 30 s")])
        watch.ended(0, 1)
        failure = watch.verdict()
        assert failure is not None
        assert (failure.rank, failure.reason) == (
            1,
            "had not called hvd.init() within 30 s of the last rank that did (--start-timeout), nor had rank 2 "
            "(c, process 12)",
        )

    def test_a_start_that_failed_for_another_reason(self) -> None:
        watch = self.watch([Arrivals(3, (), "epoch 0 cannot start: rank 2 is on host h0")])
        watch.ended(0, 1)
        assert watch.verdict() is None


class TestArriving:
    """From the workers' start until all are in hvd.init()."""

    def scene(self, *states: Arriving | None, window: Window | None = None) -> tuple[Surface, list[float], LiveDisplay]:
        remaining = list(states)
        clock = [0.0]
        surface = Surface(window)
        progress = InitProgress(lambda: remaining.pop(0) if len(remaining) > 1 else remaining[0], 0.0, 120.0)
        lines = Backoff(0.0, INIT_LINE_AFTER, once=True)
        display = LiveDisplay(progress, surface, lines, environ={"TERM": "xterm"}, clock=lambda: clock[0])
        return surface, clock, display

    def test_a_live_line_that_goes_away(self) -> None:
        surface, clock, display = self.scene(Arriving(2, 2, 0), window=Window(80, 24))
        for clock[0] in (0.0, 1.9):
            assert display.tick() == SHOW_AFTER
            assert surface.shown == []
        clock[0] = 2.0
        assert display.tick() == 3.0
        assert surface.shown == ["2 workers started, loading, 2.0 s"]
        display.close()
        assert surface.shown == []
        assert surface.notices == []

    def test_it_goes_away_on_its_own(self) -> None:
        surface, clock, display = self.scene(Arriving(2, 2, 0), Arriving(2, 2, 1), None, window=Window(80, 24))
        seen = []
        for clock[0] in (2.0, 3.0, 4.0, 5.0):
            display.tick()
            seen.append(surface.shown)
        assert seen == [
            ["2 workers started, loading, 2.0 s"],
            ["2 workers started, 1 of 2 in hvd.init(), 3.0 s"],
            [],
            [],
        ]

    def test_a_log_gets_one_line(self) -> None:
        surface, clock, display = self.scene(Arriving(100, 17, 2))
        for now in range(100):
            clock[0] = float(now)
            display.tick()
        assert surface.notices == ["17 of 100 workers started, 2 of 100 in hvd.init() after 5.0 s"]
        display.close()
        assert len(surface.notices) == 1

    def test_a_log_of_a_quick_start_gets_none(self) -> None:
        surface, clock, display = self.scene(Arriving(1, 1, 0), None)
        for clock[0] in (1.0, 4.9, 5.0, 9.0):
            display.tick()
        assert surface.notices == []

    def test_a_log_gets_none_while_all_import(self) -> None:
        """That none has called it yet looks like a fault, and is none."""
        surface, clock, display = self.scene(Arriving(2, 2, 0))
        for now in range(100):
            clock[0] = float(now)
            display.tick()
        display.close()
        assert surface.notices == []

    def test_a_program_that_never_calls_it_is_left_alone(self) -> None:
        surface, clock, display = self.scene(Arriving(1, 1, 0), window=Window(80, 24))
        clock[0] = 29.0
        display.tick()
        assert surface.shown == ["1 worker started, loading, 29 s"]
        clock[0] = 31.0
        display.tick()
        assert surface.shown == []
        clock[0] = 121.0
        assert display.tick() is None
        assert surface.shown == []

    def test_what_the_watch_knows(self) -> None:
        arrivals = [Arrivals(0, (0, 1, 2))]
        watch = InitWatch(lambda: arrivals[-1], {0: "a", 1: "b", 2: "c"}, timeout=30.0)
        assert watch.arriving() == Arriving(3, 0, 0)
        watch.spawned(0, 10)
        arrivals.append(Arrivals(1, (1, 2)))
        assert watch.arriving() == Arriving(3, 1, 1)
        arrivals.append(Arrivals(3, ()))
        assert watch.arriving() is None
        watch = InitWatch(lambda: arrivals[0], {0: "a", 1: "b", 2: "c"}, timeout=30.0)
        watch.ended(1, 3)
        assert watch.arriving() is None, "the job is about to end"
