"""The start-up of all hosts' agents: commands are started, judged when they end, and tried again.

``gathering`` decides whom and when; this carries it out, for the supervisor, which owns loop and streams. A host has
started when its agent has said hello, is of our version, and has found there what workers will need.

What comes from a host before that is held back: its login shell's greetings are shown once the agent can be used, and
ssh's own words not at all if a line of ours says the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hvdgloo.errors import LaunchError
from hvdgloo.runner.console.progress import Missing, Step, describe_missing
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.protocol.frames import PROTOCOL, Finish, Hello, Lacking, Require
from hvdgloo.runner.supervise.agent_link import Link
from hvdgloo.runner.supervise.retry_policy import Gathering
from hvdgloo.runner.transport.base import Spawner
from hvdgloo.runner.transport.failures import Cause, Diagnosis, Ending, other_version, preflight_failure
from hvdgloo.version import __version__

_HELD_BACK = 200  # lines kept of what comes before an agent can be used


class Streams(Protocol):
    """The supervisor, as a start-up needs it."""

    def connect(self, host: HostEntry) -> Link:
        """Start the command for a host, and listen to it."""

    def drop(self, link: Link) -> None:
        """End a command that has led to no agent that can be used, and forget it."""

    def get_on(self, link: Link, step: Step, detail: str = "") -> None:
        """A host has come to another step of its start."""

    def say(self, link: Link, lines: Sequence[str]) -> None:
        """Show what came from a host."""


class Starting:
    """One start-up.

    Args:
        required: what workers will need on a host; None if nothing is to be looked up.
        patient: hosts that fail are left out, and not the end of it.
    """

    def __init__(
        self,
        streams: Streams,
        spec: LaunchSpec,
        spawner: Spawner,
        hosts: Sequence[HostEntry],
        required: Callable[[HostEntry], Require] | None,
        *,
        patient: bool = False,
    ) -> None:
        self._streams = streams
        self._spec = spec
        self._spawner = spawner
        self._hosts = hosts
        self._required = required
        self._gathering = Gathering(hosts, time.monotonic(), patient=patient)

    def start_due(self, now: float) -> None:
        """Start the commands that are to be started now."""
        for host in self._gathering.due(now):
            link = self._streams.connect(host)
            attempts = self._gathering.attempts(host)
            again = f"attempt {attempts}, {self._gathering.last_failure(host)}" if attempts > 1 else ""
            self._streams.get_on(link, Step.CONNECTING, again)

    @property
    def next(self) -> float:
        """When something is to be done again if nothing happens until then."""
        return self._gathering.next

    def over(self, now: float) -> bool:
        """All are there; or it makes no sense any more."""
        return self._gathering.over(now)

    # What comes from hosts.

    def answered(self, link: Link) -> None:
        """Python runs there."""
        self._streams.get_on(link, Step.PYTHON)
        self._gathering.answered(link.host)

    def hello(self, link: Link, hello: Hello) -> None:
        """The agent is there."""
        if (hello.protocol, hello.version) != (PROTOCOL, __version__):
            self._reject(link, Diagnosis(Cause.VERSION, other_version(hello.version, self._spec.reach.python)))
            return
        link.hello = hello
        if self._required is None:
            self._take(link)
        else:
            link.channel.send(self._required(link.host))

    def lacking(self, link: Link, found: Lacking) -> None:
        """The agent has looked for what workers will need."""
        diagnosis = preflight_failure(found, self._spec.cwd)
        if diagnosis is None:
            self._take(link)
        else:
            self._reject(link, diagnosis)

    def ended(self, link: Link, status: int | None, now: float) -> None:
        """The command has ended before its agent could be used."""
        self._forget(link, self._spawner.diagnose(link.host, Ending(status, tuple(link.stderr))), now)

    def hold_back(self, link: Link, lines: Sequence[str]) -> None:
        """Lines that are no frames."""
        link.held_back += lines[: _HELD_BACK - len(link.held_back)]

    def _take(self, link: Link) -> None:
        assert link.hello is not None
        link.taken = True
        self._show_held_back(link)
        self._gathering.ready(link.host)
        self._streams.get_on(link, Step.READY, f"{link.hello.hostname}, agent is process {link.hello.pid}")

    def _reject(self, link: Link, diagnosis: Diagnosis) -> None:
        """An agent is there, but its host cannot be used."""
        link.channel.send(Finish())
        self._forget(link, diagnosis, time.monotonic())

    def _forget(self, link: Link, diagnosis: Diagnosis, now: float) -> None:
        self._streams.drop(link)
        if diagnosis.cause is Cause.OTHER or self._spec.verbose:
            self._show_held_back(link)  # the diagnosis says less
        again = self._gathering.failed(link.host, diagnosis, now)
        if again is not None:
            self._streams.get_on(link, Step.CONNECTING, diagnosis.text)

    def _show_held_back(self, link: Link) -> None:
        self._streams.say(link, link.held_back)
        link.held_back.clear()

    # What came of it.

    def check(self, links: Sequence[Link]) -> None:
        """Refuse a start-up that is not complete.

        Raises:
            UnusableHostsError: hosts failed.
            LaunchError: hosts did not come before the start timeout.
        """
        failed = self._gathering.error()
        if failed is not None:
            raise failed
        by_host = {link.host: link for link in links}
        absent = [
            Missing(
                host.name,
                link.step if link else Step.CONNECTING,
                _last_words(link) or self._gathering.known(host),
                ended=link is None and bool(self._gathering.known(host)),
            )
            for host in self._hosts
            if (link := by_host.get(host)) is None or not link.taken
        ]
        if absent:
            raise LaunchError(describe_missing(absent, self._spec.start_timeout))

    def reasons(self) -> dict[HostEntry, str]:
        """The hosts that failed, and why."""
        return self._gathering.reasons()


def _last_words(link: Link | None) -> str:
    return link.stderr[-1] if link is not None and link.stderr else ""
