"""One host's way through a job, as a table of phases, the events that each phase accepts, and their consequences.

This module is pure: events go in, actions come out, and the caller supplies all times. ``Agents`` owns the commands and
streams, reports events, and carries out actions. ``Startup`` decides which hosts to try, and when. The start-up view,
the errors of a start and the end of the job read the same object; there is no second record.

An event that the table does not list for a phase is the caller's mistake, and raises. Frames that a peer may send at
any time, crossing one of ours on their way, are offered only if the host ``accepts`` them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hvdgloo.errors import HvdglooError
from hvdgloo.runner.console.progress import NOT_TRIED, Step
from hvdgloo.runner.job.spec import HostEntry
from hvdgloo.runner.processes import reaper
from hvdgloo.runner.protocol import heartbeat
from hvdgloo.runner.protocol.heartbeat import Silence
from hvdgloo.runner.transport.failures import Diagnosis

EXIT_TIME = 1.0
"""Seconds for a command to end on its own after its stream did."""

ANSWER_TIME = 3.0
"""Seconds within which the second agent must be up; otherwise the host counts as unreachable."""

SWEEP_TIME = reaper.LIMIT + 2 * reaper.HANG_TIME + 2.0
"""Seconds that a second agent may take beyond the grace period."""

_SILENT = "its host is cut off, switched off or overloaded; if it is only slow, raise --heartbeat-timeout"


class Phase(enum.Enum):
    """Phases of a host."""

    # Its agent cannot be used yet.
    WAITING = "its command is to be started: in its turn, or after a pause"
    CONNECTING = "its command runs, and nothing has answered yet"
    STARTING = "Python runs there"
    CHECKING = "its agent is up, and looks for what workers will need"
    FALLEN = "the stream of its command has ended; the exit status will say why"
    # It can be used.
    READY = "its agent can be used"
    PROBING = "it tries the other hosts' addresses"
    RUNNING = "it was told to start workers"
    # It is to end, or is ending.
    LEAVING = "it was told that the job is over, or needs it no longer, and had no workers"
    ENDING = "it was told that the job is over"
    QUIET = "it has said good-bye: nothing of the job is left there"
    BROKEN = "its stream has ended without a good-bye; there were no workers"
    CUT = "its stream has ended without a good-bye, and workers may be left"
    # It was lost, and another agent is sent after it.
    REVISITED = "another agent is on its way to it"
    SWEEPING = "another agent ends what may be left there"
    # Final phases.
    FAILED = "it cannot be used"
    ENDED = "it has ended as it was told to"
    LOST = "its agent was lost, and had no workers"
    SWEPT = "its agent was lost, and nothing of the job is left there"
    UNREACHED = "its agent was lost, and the host could not be reached a second time"


# Events.


@dataclass(frozen=True)
class Event:
    """Something that has happened to a host, or was decided about it."""


@dataclass(frozen=True)
class Try(Event):
    """Its command is to be started now."""


@dataclass(frozen=True)
class Answered(Event):
    """The first bytes of our protocol have arrived from there."""


@dataclass(frozen=True)
class Greeted(Event):
    """Its agent has sent a hello, and has our version."""


@dataclass(frozen=True)
class Checked(Event):
    """The workers' requirements are met there. ``detail`` is shown."""

    detail: str = ""


@dataclass(frozen=True)
class TryAgain(Event):
    """Its command has failed, but may succeed later: the next attempt is at ``due``, on the clock of all times."""

    diagnosis: Diagnosis
    due: float


@dataclass(frozen=True)
class GiveUp(Event):
    """It cannot be used."""

    diagnosis: Diagnosis


@dataclass(frozen=True)
class Probe(Event):
    """Probing of addresses has begun."""


@dataclass(frozen=True)
class Probed(Event):
    """Its address has been chosen. ``detail`` is shown."""

    detail: str = ""


@dataclass(frozen=True)
class Start(Event):
    """Its workers are to be started; from now on, ``heartbeat_timeout`` seconds of silence mean that it is lost."""

    heartbeat_timeout: float


@dataclass(frozen=True)
class Finish(Event):
    """The job is over, will not take place, or goes on without it."""


@dataclass(frozen=True)
class Farewell(Event):
    """Its agent has reported that nothing of the job is left there."""


@dataclass(frozen=True)
class StreamEnded(Event):
    """The stream of its command has ended."""


@dataclass(frozen=True)
class Lost(Event):
    """Its agent has ended, or counts as ended. ``how`` continues ``the agent on host h1 ...``."""

    how: str


@dataclass(frozen=True)
class SweepFailed(Event):
    """The second agent could not be started or did not do its work; ``why`` is the reason."""

    why: str


class Action(enum.Enum):
    """Actions that follow from events. Their details are in the host's attributes: ``detail``, ``reason``."""

    CONNECT = "start the command that leads there"
    SHOW = "show that it has reached another step"
    CHECK = "ask its agent for what workers will need"
    DROP = "end its command, which has led to no agent that can be used, and forget it"
    FINISH = "tell its agent that the job is over"
    CLOSE = "listen to its command no longer, which ends by itself"
    KILL = "listen to its command no longer, and end it"
    REPORT = "the job has lost it, for the host's reason"
    SWEEP = "send another agent after the lost one"
    TELL = "say that it could not be swept, for the host's reason"


class To:
    """A transition: the next phase, and the actions, in order."""

    def __init__(self, phase: Phase, *actions: Action) -> None:
        self.phase = phase
        self.actions = actions


P, A = Phase, Action
_Row = Mapping[type[Event], To]

# Common rows of several phases.
_UNUSABLE: _Row = {TryAgain: To(P.WAITING, A.DROP, A.SHOW), GiveUp: To(P.FAILED, A.DROP)}
_UNDONE: _Row = {Lost: To(P.LOST, A.KILL, A.REPORT), Finish: To(P.ENDED, A.KILL)}
_IDLE: _Row = {Farewell: To(P.QUIET), StreamEnded: To(P.BROKEN), Lost: To(P.LOST, A.KILL, A.REPORT)}
_BUSY: _Row = {Farewell: To(P.QUIET), StreamEnded: To(P.CUT), Lost: To(P.REVISITED, A.KILL, A.REPORT, A.SWEEP)}
_UNSWEPT: _Row = {SweepFailed: To(P.UNREACHED, A.KILL, A.TELL)}

TABLE: Mapping[Phase, _Row] = {
    P.WAITING: {
        Try: To(P.CONNECTING, A.CONNECT, A.SHOW),
        Lost: To(P.LOST, A.REPORT),
        Finish: To(P.ENDED),
    },
    P.CONNECTING: {Answered: To(P.STARTING, A.SHOW), StreamEnded: To(P.FALLEN), **_UNDONE},
    P.STARTING: {Greeted: To(P.CHECKING, A.CHECK), StreamEnded: To(P.FALLEN), **_UNUSABLE, **_UNDONE},
    P.CHECKING: {
        **_IDLE,
        Checked: To(P.READY, A.SHOW),
        **_UNUSABLE,
        StreamEnded: To(P.FALLEN),
        Finish: To(P.LEAVING, A.FINISH),
    },
    P.FALLEN: {**_UNUSABLE, **_UNDONE},
    P.READY: {
        **_IDLE,
        Probe: To(P.PROBING, A.SHOW),
        Start: To(P.RUNNING),
        Finish: To(P.LEAVING, A.FINISH),
    },
    P.PROBING: {**_IDLE, Probed: To(P.READY, A.SHOW), Finish: To(P.LEAVING, A.FINISH)},
    P.RUNNING: {**_BUSY, Finish: To(P.ENDING, A.FINISH)},
    P.LEAVING: _IDLE,
    P.ENDING: _BUSY,
    P.QUIET: {StreamEnded: To(P.ENDED, A.CLOSE), Lost: To(P.ENDED, A.KILL)},
    P.BROKEN: {Lost: To(P.LOST, A.KILL, A.REPORT)},
    P.CUT: {Lost: To(P.REVISITED, A.KILL, A.REPORT, A.SWEEP)},
    P.REVISITED: {Answered: To(P.SWEEPING), **_UNSWEPT},
    P.SWEEPING: {Farewell: To(P.SWEPT, A.CLOSE), **_UNSWEPT},
    P.FAILED: {},
    P.ENDED: {},
    P.LOST: {},
    P.SWEPT: {},
    P.UNREACHED: {},
}
"""Transition for each phase and each event that may happen in it."""

FINAL = frozenset(phase for phase, row in TABLE.items() if not row)
"""Phases in which nothing more can happen."""

UNDER_WAY = frozenset({P.CONNECTING, P.STARTING, P.CHECKING, P.FALLEN})
"""Phases in which the host's command was started, but it is not known yet whether its agent can be used."""

STARTING_UP = UNDER_WAY | {P.WAITING}
"""Phases bounded by the start timeout."""

SECOND = frozenset({P.REVISITED, P.SWEEPING})
"""Phases in which frames come from a second agent."""

JUDGED = frozenset({P.FALLEN, P.BROKEN, P.CUT})
"""Phases in which the stream has ended without a goodbye, and the command's exit is awaited until the ``deadline``."""

WATCHED = frozenset({P.CHECKING, P.READY, P.PROBING, P.RUNNING, P.LEAVING, P.ENDING, P.QUIET, P.SWEEPING})
"""Phases in which the host's agent sends heartbeats; silence means that it is lost."""

_STEPS = {
    P.WAITING: Step.CONNECTING,
    P.CONNECTING: Step.CONNECTING,
    P.STARTING: Step.PYTHON,
    P.CHECKING: Step.PYTHON,
    P.PROBING: Step.PROBING,
    P.READY: Step.READY,
}
"""Step that users see during a start, for each phase; in all other phases the last step stays."""


class IllegalEventError(HvdglooError):
    """An event that cannot happen in a host's phase: a bug in this program."""


class HostState:
    """The state of one host.

    Args:
        host: the host as the user gave it.
        now: in seconds, on the clock of all other times.
        grace: seconds between asking workers to end and killing them, for the agent that sweeps up.

    Attributes:
        phase: changed only by ``feed``.
        step: the phase as users see it during a start.
        since: time at which it reached this step.
        detail: further details of the step.
        attempts: number of times that its command was started, including the running one.
        last: the reason why it could not be used the last time.
        reason: the reason for its loss; later, the reason why it could not be swept.
        deadline: time of the next look, whatever happens; infinite if silence or the start timeout decides.
        silence: the duration of its agent's silence.
    """

    def __init__(self, host: HostEntry, now: float, grace: float) -> None:
        self.host = host
        self.phase = Phase.WAITING
        self.step = Step.CONNECTING
        self.since = now
        self.detail = NOT_TRIED
        self.attempts = 0
        self.last: Diagnosis | None = None
        self.reason = ""
        self.deadline = now
        self.silence = Silence(heartbeat.FIRST, now)
        self._grace = grace

    @property
    def name(self) -> str:
        return self.host.name

    @property
    def final(self) -> bool:
        """True if this host need not be waited for any longer."""
        return self.phase in FINAL

    @property
    def gone(self) -> bool:
        """True if its first agent no longer answers."""
        return self.phase in FINAL or self.phase in SECOND

    @property
    def starting_up(self) -> bool:
        """True while it is unknown whether the host can be used."""
        return self.phase in STARTING_UP

    @property
    def next(self) -> float:
        """Time at which ``overdue`` may return something if nothing happens until then."""
        return min(self.deadline, self.silence.deadline if self.phase in WATCHED else math.inf)

    def accepts(self, kind: type[Event]) -> bool:
        """Tell whether an event of this kind can happen now."""
        return kind in TABLE[self.phase]

    def feed(self, event: Event, now: float) -> tuple[Action, ...]:
        """Record an event, and change the phase.

        Returns:
            the resulting actions, in order.

        Raises:
            IllegalEventError: the event cannot happen in this phase, which does not change.
        """
        to = TABLE[self.phase].get(type(event))
        if to is None:
            raise IllegalEventError(f"{event} cannot happen to host {self.name} while it is {self.phase.name}")
        self.phase = to.phase
        detail = self._take_note(event, now)
        self.deadline = self._limit(event, now)
        if Action.SHOW in to.actions:
            self._show(Step.UP if isinstance(event, Checked) else _STEPS[self.phase], detail, now)
        return to.actions

    def heard(self, now: float) -> None:
        """Record that something arrived from there."""
        self.silence.heard(now)

    def bear(self, silence: float, now: float) -> None:
        """Set the seconds of silence after which its agent counts as lost."""
        self.silence = Silence(silence, now)

    def overdue(self, now: float) -> Lost | SweepFailed | None:
        """Return the event that results from the passage of time, or None. Called in each turn of the loop."""
        silent = self.phase in WATCHED and self.silence.over(now)
        if self.phase is Phase.REVISITED and now >= self.deadline:
            return SweepFailed("it does not answer")
        if self.phase is Phase.SWEEPING:
            if now >= self.deadline:
                return SweepFailed("it did not end in time")
            return SweepFailed("it has fallen silent") if silent else None
        return Lost(f"has been silent for {self.silence.timeout:g} s: {_SILENT}") if silent else None

    @property
    def failure(self) -> str:
        """Reason why the host cannot be used, once that is final."""
        tried = f" ({self.attempts} attempts)" if self.attempts > 1 else ""
        return (self.last.text if self.last is not None else self.reason) + tried

    def _show(self, step: Step, detail: str, now: float) -> None:
        # A further attempt has another detail, but the host remains at its step since the same time.
        if step is not self.step or self.detail == NOT_TRIED:
            self.since = now
        self.step, self.detail = step, detail

    def _take_note(self, event: Event, now: float) -> str:
        """Record an event, and return the detail to show."""
        match event:
            case Try():
                self.attempts += 1
                self.silence = Silence(heartbeat.FIRST, now)
                return f"attempt {self.attempts}, {self.last.text}" if self.last is not None else ""
            case TryAgain(diagnosis) | GiveUp(diagnosis):
                self.last = diagnosis
                return diagnosis.text
            case Checked(detail) | Probed(detail):
                return detail
            case Start(timeout):
                self.silence = Silence(timeout, now)
            case Lost(reason) | SweepFailed(reason):
                self.reason = reason
        if self.phase is Phase.REVISITED:
            self.silence = Silence(heartbeat.FIRST, now)
        return ""

    def _limit(self, event: Event, now: float) -> float:
        if isinstance(event, TryAgain):
            return event.due
        if self.phase in JUDGED:
            return now + EXIT_TIME
        if self.phase is Phase.REVISITED:
            return now + ANSWER_TIME
        if self.phase is Phase.SWEEPING:
            return now + self._grace + SWEEP_TIME
        return math.inf
