"""Progress of hosts and workers during the start of a job, in words. Pure; the caller supplies all times.

A host goes through steps. Each step answers the questions of a waiting user: what is missing, and what can I do about
it?
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from unicodedata import east_asian_width

SHOWN = 20
"""Maximum number of hosts with a line each; of more, the steps are counted and the slowest few are named."""

NOT_TRIED = "not tried yet"
"""Detail of a host whose turn has not come: only a limited number of hosts are contacted at a time."""

_LOOK_AGAIN = 0.5  # seconds between looks at who is in hvd.init()
_LOADING = 30.0  # seconds for which it is shown that workers have been started, and for which none has done more
_SLOWEST = 5
_NAMED = 16  # hosts that a line of a log names
_COLOURS = {
    "connecting": "\x1b[33m",
    "python": "\x1b[36m",
    "up": "\x1b[32m",
    "probing": "\x1b[34m",
    "ready": "\x1b[32m",
}
_PLAIN = "\x1b[0m"


class Step(enum.Enum):
    """Steps of a host's start, in order."""

    CONNECTING = "connecting"
    PYTHON = "python"
    UP = "up"
    PROBING = "probing"
    READY = "ready"

    @property
    def waits(self) -> bool:
        """True if the host is on its way to the next step. Where there is nothing to probe, a host stays up."""
        return self not in (Step.UP, Step.READY)


_ENDED = (
    "the command that connects to it was tried repeatedly, and failed each time; run it by hand, and check "
    "--agent-command or the ssh options (--no-wait-for-hosts gives up at the first failure)"
)

REMEDIES = {
    Step.CONNECTING: "the command that connects to it runs, but nothing has answered yet: it may be waiting for a "
    "login, or the network may be dropping its packets; run the same command by hand",
    Step.PYTHON: "Python runs there, but hvdgloo's agent is not up yet: the file system that it is imported from may "
    "be slow, or the host overloaded",
    Step.PROBING: "the agent is up, but its addresses have not been tested yet: a firewall may be dropping the "
    "packets; --nics chooses other addresses",
}
"""For each step that may take too long: the likely cause, and the remedy."""


class Stage(Protocol):
    """State of one host: its step, the time since it began, and further details."""

    @property
    def name(self) -> str: ...
    @property
    def step(self) -> Step: ...
    @property
    def since(self) -> float: ...
    @property
    def detail(self) -> str: ...


class Progress:
    """The progress of each host, in words.

    Args:
        hosts: in order; their progress is read from them.
        now: in seconds, on the same clock as all other times.
        doing: beginning of the headline, before the number of hosts.
    """

    def __init__(self, hosts: Sequence[Stage], now: float, doing: str = "starting on") -> None:
        self.started = now
        self._doing = doing
        self._hosts = hosts

    @property
    def waiting(self) -> list[Stage]:
        """Hosts that are not ready."""
        return [host for host in self._hosts if host.step.waits]

    def elapsed(self, now: float) -> float:
        return now - self.started

    def over(self, now: float) -> bool:
        """Tell whether all hosts are ready."""
        return not self.waiting

    def done(self, now: float) -> str:
        """Return one line saying that all hosts are ready."""
        return f"all hosts are ready after {seconds(self.elapsed(now))}"

    def screen(self, now: float, width: int, height: int, *, colour: bool) -> list[str]:
        """Return the live list: at most ``height`` lines, none wider than ``width``."""
        rows: Sequence[Stage]
        if len(self._hosts) <= min(SHOWN, height - 1):
            rows = self._hosts
            head = f"{self._doing} {_hosts(len(rows))}, {seconds(self.elapsed(now))}"
        else:
            rows = self._slowest()[: max(0, min(_SLOWEST, height - 1))]
            head = f"{self._doing} {_hosts(len(self._hosts))}, {seconds(self.elapsed(now))}: {self._counts()}"
        name_width = min(max((len(host.name) for host in rows), default=0), max(8, width - 36))
        lines = [_row(host, now, name_width, width, colour) for host in rows]
        return [cut(head, width), *lines][:height]

    def line(self, now: float) -> str:
        """Return the progress in one line, for a log; empty if all hosts are ready."""
        waiting = self.waiting
        if not waiting:
            return ""
        named = _named([f"{host.name} ({_stage(host, now)})" for host in self._slowest()])
        ready, total = len(self._hosts) - len(waiting), len(self._hosts)
        return f"{ready} of {_hosts(total)} ready after {seconds(self.elapsed(now))}; still waiting for {named}"

    def _slowest(self) -> list[Stage]:
        """Return the hosts that are not ready: the earliest step first, and within a step the longest wait first."""
        order = list(Step)
        return sorted(self.waiting, key=lambda host: (order.index(host.step), host.since))

    def _counts(self) -> str:
        counts = Counter(host.step for host in self._hosts)
        return ", ".join(f"{counts[step]} {step.value}" for step in Step if counts[step])


@dataclass(frozen=True)
class Arriving:
    """Workers on their way to ``hvd.init()``.

    Attributes:
        size: number of workers in the job.
        started: number of workers that were started.
        arrived: number of workers that called ``hvd.init()``.
    """

    size: int
    started: int
    arrived: int


class InitProgress:
    """The number of workers in ``hvd.init()``, in words.

    A job whose program never calls ``hvd.init()`` cannot be recognised as such: it counts as starting until
    ``give_up``. So a log says nothing until a first worker has called it: importing takes its time, and the call may
    never come.

    Args:
        look: returns the current state; None once there is nothing left to wait for.
        now: in seconds, on the same clock as all other times.
        give_up: seconds after which, if no worker at all has arrived, none is expected any more.
    """

    def __init__(self, look: Callable[[], Arriving | None], now: float, give_up: float) -> None:
        self._look = look
        self._started = now
        self._give_up = give_up
        self._state: Arriving | None = Arriving(0, 0, 0)
        self._next_look = now + _LOOK_AGAIN

    def over(self, now: float) -> bool:
        """Tell whether the wait is over."""
        if self._state is not None and now >= self._next_look:
            self._next_look = now + _LOOK_AGAIN
            self._state = self._look()
            if self._state is not None and not self._state.arrived and now - self._started > self._give_up:
                self._state = None
        return self._state is None

    def screen(self, now: float, width: int, height: int, *, colour: bool) -> list[str]:
        """Return the live view: one line, or none if it is late and no worker has arrived."""
        elapsed, state = now - self._started, self._state
        if (state is None or not state.arrived) and elapsed > _LOADING:
            return []
        return [cut(f"{self._counted()}, {seconds(elapsed)}", width)][:height]

    def line(self, now: float) -> str:
        """Return the state in one line, for a log; empty while no worker has arrived."""
        if self._state is None or not self._state.arrived:
            return ""
        return f"{self._counted()} after {seconds(now - self._started)}"

    def done(self, now: float) -> str:
        """Return nothing: the workers' own output follows."""
        return ""

    def _counted(self) -> str:
        state = self._state or Arriving(0, 0, 0)
        started = str(state.size) if state.started == state.size else f"{state.started} of {state.size}"
        arrived = f"{state.arrived} of {state.size} in hvd.init()" if state.arrived else "loading"
        return f"{started} worker{'s' if state.size != 1 else ''} started, {arrived}"


class Backoff:
    """Times at which to repeat a report: the pause doubles each time.

    Args:
        start: on the caller's clock.
        first: seconds until the first time.
        once: there is no second time.
    """

    def __init__(self, start: float, first: float, *, once: bool = False) -> None:
        self._pause = math.inf if once else first
        self.next = start + first

    def due(self, now: float) -> bool:
        """Tell whether a report is due; if so, set the next time."""
        if now < self.next:
            return False
        self._pause *= 2
        self.next = now + self._pause
        return True


def first_report(verbose: bool) -> float:
    """Return the seconds after which a log first reports the wait."""
    return 1.0 if verbose else 10.0


@dataclass(frozen=True)
class Missing:
    """A host that is not ready.

    Attributes:
        step: the step that the host has reached.
        detail: further details, or nothing.
        ended: the command that leads to the host no longer runs: its last attempt has ended.
    """

    host: str
    step: Step
    detail: str = ""
    ended: bool = False


def describe_missing(hosts: Sequence[Missing], timeout: float) -> str:
    """Describe the hosts that missed the start timeout: their steps, and what to do.

    Args:
        hosts: the hosts that are not ready.
        timeout: the start timeout, in seconds.
    """
    by_remedy: dict[tuple[Step, str], list[str]] = {}
    for each in hosts:
        remedy = _ENDED if each.ended else REMEDIES[each.step]
        name = f"{each.host} ({each.detail})" if each.detail else each.host
        by_remedy.setdefault((each.step, remedy), []).append(name)
    lines = [
        f"  {step.value}: {_named(names)}: {remedy}"
        for (step, remedy), names in sorted(by_remedy.items(), key=lambda each: list(REMEDIES).index(each[0][0]))
    ]
    return "\n".join(
        [f"{_hosts(len(hosts))} not ready within {timeout:g} s (--start-timeout), at these steps:", *lines]
    )


def seconds(duration: float) -> str:
    """Format a duration: ``0.4 s``, ``12 s``, ``2 min 5 s``."""
    if duration < 9.95:
        return f"{duration:.1f} s"
    whole = round(duration)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60} s"


def _hosts(number: int) -> str:
    return f"{number} host{'s' if number != 1 else ''}"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _stage(stage: Stage, now: float) -> str:
    detail = f", {stage.detail}" if stage.detail else ""
    return f"{stage.step.value} for {seconds(now - stage.since)}{detail}"


def _row(host: Stage, now: float, name_width: int, width: int, colour: bool) -> str:
    """Return a line of the list: name, step, time, detail."""
    name = host.name if len(host.name) <= name_width else host.name[: name_width - 3] + "..."
    step = host.step.value
    time = seconds(now - host.since) if host.step.waits else ""
    before = f"  {name:<{name_width}}  "
    text = cut(f"{before}{step:<10}  {time:>11}  {host.detail}".rstrip(), width)
    if not colour or not text.startswith(step, len(before)):
        return text
    return f"{text[: len(before)]}{_COLOURS[step]}{step}{_PLAIN}{text[len(before) + len(step) :]}"


def cut(text: str, width: int) -> str:
    """Cut a text to one column less than the terminal's width, because some terminals wrap at the last one; replace
    wide and unprintable characters."""
    clean = "".join(c if c.isprintable() and east_asian_width(c) not in "WF" else "?" for c in text)
    return clean if len(clean) < width else clean[: max(0, width - 4)] + "..."
