"""The second way to a host whose agent was lost: another agent, which ends what the first one may have left.

The first way is the agent itself, or its warden: they hear that the stream has ended, or nothing any more, and end the
workers. That does not help where both were killed, or hang. So the launcher sends another one after it, if the host
can still be reached; a host that cannot has only the first way.
"""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from hvdgloo.errors import LaunchError
from hvdgloo.runner.job.spec import HostEntry
from hvdgloo.runner.processes import reaper
from hvdgloo.runner.protocol.frames import Bye, Noise, Sweep
from hvdgloo.runner.supervise.agent_link import Link
from hvdgloo.runner.transport.base import Spawner

ANSWER_TIME = 3.0
"""Seconds in which the other agent must be there: beyond these the host counts as unreachable."""

_END_TIME = reaper.LIMIT + 2 * reaper.HANG_TIME + 2.0  # seconds that it may take beyond the grace period


@dataclass
class _Errand:
    link: Link
    deadline: float
    answered: bool = False
    done: bool = False


class Sweeping:
    """All sweeps of a job.

    Args:
        spawner: starts agents.
        selector: of the supervisor's loop.
        job_id: whose processes are to be ended.
        grace: seconds between asking workers to end and killing them.
        notice: is told what could not be done.
    """

    def __init__(
        self,
        spawner: Spawner,
        selector: selectors.BaseSelector,
        job_id: str,
        grace: float,
        notice: Callable[[str], None],
    ) -> None:
        self._spawner = spawner
        self._selector = selector
        self._job_id = job_id
        self._grace = grace
        self._notice = notice
        self._errands: list[_Errand] = []

    def begin(self, host: HostEntry, now: float) -> None:
        """Send another agent to ``host``."""
        try:
            link = Link(host, self._spawner.start(host))
        except LaunchError as error:
            self._say_unreached(host, str(error))
            return
        errand = _Errand(link, now + ANSWER_TIME)
        self._errands.append(errand)
        self._selector.register(link.channel.receive_fd, selectors.EVENT_READ, partial(self._on_readable, errand))
        self._selector.register(link.stream.stderr, selectors.EVENT_READ, partial(self._on_stderr, errand))
        link.channel.send(Sweep(self._job_id, self._grace))

    @property
    def over(self) -> bool:
        """Nothing is under way."""
        return all(errand.done for errand in self._errands)

    @property
    def next(self) -> float:
        """When something is to be done again if nothing happens until then."""
        waiting = [errand for errand in self._errands if not errand.done]
        silences = [errand.link.silence.deadline for errand in waiting if errand.answered]
        return min([*silences, *(errand.deadline for errand in waiting)], default=math.inf)

    def beat(self) -> None:
        """Show life: the agents listen while they sweep."""
        for errand in self._errands:
            if not errand.done:
                errand.link.channel.beat()

    def keep_time(self, now: float) -> None:
        """Give up what has taken too long."""
        for errand in self._errands:
            if errand.done:
                continue
            errand.link.channel.flush()
            if errand.link.channel.decoder.opened and not errand.answered:
                errand.answered = True
                errand.deadline = now + self._grace + _END_TIME
            if now >= errand.deadline:
                self._finish(errand, "it did not end in time" if errand.answered else "it does not answer")
            elif errand.answered and errand.link.silence.over(now):
                self._finish(errand, "it has fallen silent")

    def close(self) -> None:
        """End what is still under way."""
        for errand in self._errands:
            if not errand.done:
                self._finish(errand, "the launcher ends")
            errand.link.close()

    def _on_readable(self, errand: _Errand) -> None:
        if errand.done:
            return
        link = errand.link
        try:
            items = link.channel.receive()
        except LaunchError as error:
            self._finish(errand, str(error))
            return
        link.silence.heard(time.monotonic())
        for item in items:
            if isinstance(item, Noise):
                link.keep(item.data)
            elif isinstance(item, Bye):
                link.said_bye = True
                if item.left:
                    self._notice(describe_left(link.host, item.left))
                self._finish(errand)
                return
        if link.channel.ended:
            self._on_stderr(errand)
            self._finish(errand, link.stderr[-1] if link.stderr else "the connection ended")

    def _on_stderr(self, errand: _Errand) -> None:
        while errand.link.stderr_open:
            lines = errand.link.read_stderr()
            if lines is None:
                self._close_stderr(errand)
            elif not lines:
                return

    def _close_stderr(self, errand: _Errand) -> None:
        if errand.link.stderr_open:
            errand.link.stderr_open = False
            self._selector.unregister(errand.link.stream.stderr)

    def _finish(self, errand: _Errand, failure: str = "") -> None:
        errand.done = True
        self._selector.unregister(errand.link.channel.receive_fd)
        self._close_stderr(errand)
        if failure:
            errand.link.stream.kill()
            self._say_unreached(errand.link.host, failure)

    def _say_unreached(self, host: HostEntry, why: str) -> None:
        self._notice(
            f"host {host.name} could not be reached a second time to see whether anything of the job is left there "
            f"({why}); unless its agent was killed, it ends its workers by itself"
        )


def describe_left(host: HostEntry, pids: Sequence[int]) -> str:
    """What an agent could not end."""
    return (
        f"processes {', '.join(map(str, pids))} on {host.name} cannot be killed: the system keeps them, probably for a "
        "device or file system that does not answer"
    )
