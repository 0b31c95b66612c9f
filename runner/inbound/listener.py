"""The launcher's listener for agents that come by themselves, and the list of connected ones."""

from __future__ import annotations

import itertools
import logging
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from hvdgloo._net import ports
from hvdgloo._net.descriptors import OUT_OF_DESCRIPTORS, reserve_descriptors
from hvdgloo._net.event_loop import EventLoop
from hvdgloo._net.handshake import Link
from hvdgloo._net.visitors import Steps, Visitors
from hvdgloo.config import Config
from hvdgloo.errors import AuthenticationError, LaunchError, UnusableHostsError
from hvdgloo.rendezvous._auth import generate_secret
from hvdgloo.runner.inbound.hello import Reply, TaskHello, admit, reply
from hvdgloo.runner.inbound.stream import InboundStream
from hvdgloo.runner.inbound.task import Invitation
from hvdgloo.runner.job.outcome import Failure
from hvdgloo.runner.job.spec import HostEntry, HostProfile
from hvdgloo.runner.network import interfaces
from hvdgloo.runner.network.interfaces import InterfaceFilter
from hvdgloo.runner.worker.function_task import python_version
from hvdgloo.version import __version__

logger = logging.getLogger(__name__)

MOST_VISITORS = 256
"""Connections that have proved nothing yet and are heard at a time."""

_PATIENCE, _GRACE = 5.0, 1.0  # seconds that a visitor has for its proof; at the least, however many are waiting
_SETTLE = 5.0
"""Seconds for others to connect after an unusable one, so that one report has all of them."""

_TURN = 0.2  # seconds between two calls of what the waiting thread has to look after
_SHOWN = 16  # tasks that an error lists

_UNUSUAL = re.compile(r"[\s:,@\[\]/#]+")
"""Characters that cannot be in the name of a host."""


@dataclass(eq=False)
class _Task:
    """A connected task, whose agent waits for the job's beginning.

    Attributes:
        key: by which the job asks for its connection.
        elastic_name: by which an elastic job knows it, once it has asked.
        unusable: why it cannot take part; empty if it can.
        here: it has been told that it is in, and its connection is watched.
        taken: the job has its connection now.
    """

    key: int
    hello: TaskHello
    link: Link
    unusable: str = ""
    elastic_name: str = ""
    here: bool = False
    taken: bool = False


class TaskListener:
    """Listens for agents that other systems' tasks bring. A context manager: it listens until it is left.

    Args:
        count: tasks that are expected; their indices are 0 to count - 1. None for an elastic job: tasks may come and go
            as long as it runs, and a task that was lost may come again.
        what: the tasks in messages, in the plural: ``Spark tasks``.
        addresses: at which tasks reach this machine, best first: addresses of its own, or names that lead to it from
            where the tasks are. By default all of its own.
        port_range: first and last port that may be used; None for the setting, which is any by default.
        start_timeout: seconds within which all must connect.

    Attributes:
        secret: of the job.
        invitation: what each task must be told.

    Raises:
        ConfigError: on entering: no port is free, or this process may not have as many connections.
    """

    def __init__(
        self,
        count: int | None,
        *,
        what: str = "tasks",
        addresses: Sequence[str] = (),
        port_range: tuple[int, int] | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        self.secret = generate_secret()
        self.start_timeout = start_timeout
        self._count = count
        self._what = what
        self._addresses = addresses
        self._port_range = port_range
        self._tasks: dict[int, _Task] = {}  # by index; by a number of their own if tasks may come again
        self._numbers = itertools.count()
        self._entries: dict[str, HostEntry] = {}
        self._gone: dict[int, str] = {}
        self._changed = threading.Condition()  # guards what other threads read: tasks, reason
        self._reason = ""
        self._error: BaseException | None = None
        self._note: Callable[[Failure], None] | None = None
        self._closed = False
        self._begun = False  # all expected tasks have connected

    def __enter__(self) -> TaskListener:
        reserve_descriptors((self._count or 0) + MOST_VISITORS, "this process", f"connections of {self._what}")
        told, at = _endpoints(self._addresses)
        port_range = self._port_range or Config.from_env(only={"port_range"}).port_range
        self._listeners = ports.listen(at, port_range)
        port = self._listeners[0].getsockname()[1]
        self.invitation = Invitation(tuple((address, port) for address in told), self.secret)
        self._loop = EventLoop()
        self._visitors = Visitors(
            self._loop.selector,
            self._listeners,
            self._converse,
            self._refused,
            patience=_PATIENCE,
            most=MOST_VISITORS,
            grace=_GRACE,
        )
        self._thread = threading.Thread(target=self._run, name="hvdgloo-listener", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon(self._close)
        self._thread.join()
        self._loop.close()

    # What other threads call.

    @property
    def arrived(self) -> tuple[TaskHello, ...]:
        """The tasks that are here, in order of indices."""
        with self._changed:
            here = [task.hello for task in self._tasks.values() if task.here]
        return tuple(sorted(here, key=lambda hello: hello.index))

    @property
    def reason(self) -> str:
        """The failure outside of the job; empty if none is known."""
        with self._changed:
            return self._reason

    def fail(self, reason: str, error: BaseException | None = None) -> None:
        """Record a failure outside of the job: the other system has lost or ended tasks. The first reason counts.

        It ends the wait for tasks, or the job. Safe in any thread, at any time.

        Args:
            reason: in words that continue ``the job failed:``.
            error: its cause, where there is one.
        """
        with self._changed:
            if self._reason:
                return
            self._reason, self._error = reason, error
            note = self._note
            self._changed.notify_all()
        if note is not None:
            note(Failure(None, "", 1, reason))

    @contextmanager
    def passed_to(self, note: Callable[[Failure], None]) -> Iterator[None]:
        """Pass what goes wrong outside to ``note`` for a while, and also what has gone wrong before."""
        with self._changed:
            self._note = note
            reason = self._reason
        if reason:
            note(Failure(None, "", 1, reason))
        try:
            yield
        finally:
            with self._changed:
                self._note = None

    def await_reason(self, seconds: float) -> str:
        """Return the failure outside of the job, as soon as it is known; empty if none is within ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._reason, seconds)
            return self._reason

    def gather(
        self,
        *,
        least: int | None = None,
        remedy: str = "",
        on_arrival: Callable[[TaskHello], None] | None = None,
        poll: Callable[[], None] | None = None,
    ) -> tuple[TaskHello, ...]:
        """Wait until all tasks have connected.

        Args:
            least: the number of tasks to wait for, if not all; needed where tasks come and go.
            remedy: what to do if they do not, for the error.
            on_arrival: told of each one, in this thread.
            poll: called a few times a second, and before an error about what went wrong outside, in this thread; what
                it raises ends the wait.

        Returns:
            all of them, in order of indices.

        Raises:
            UnusableHostsError: some cannot be used, because they have another version of Python or of hvdgloo.
            LaunchError: they did not come in time, or something went wrong outside.
        """
        wanted = self._count if least is None else least
        assert wanted is not None, "an elastic job needs a least number of tasks"
        deadline = time.monotonic() + self.start_timeout
        told: set[int] = set()
        settled: float | None = None
        while True:
            if poll is not None:
                poll()
            with self._changed:
                if not self._reason and not self._complete(wanted):
                    self._changed.wait(max(0.0, min(_TURN, deadline - time.monotonic())))
                reason, error, complete = self._reason, self._error, self._complete(wanted)
                unusable = {g.hello.label: g.unusable for g in self._tasks.values() if g.unusable}
            for hello in self.arrived:
                if hello.index not in told and on_arrival is not None:
                    on_arrival(hello)
                told.add(hello.index)
            now = time.monotonic()
            if unusable and settled is None:
                settled = now + _SETTLE
            if unusable and (complete or reason or now >= min(deadline, settled or deadline)):
                raise _unusable(unusable, len(self.arrived), self._what)
            if reason:
                if poll is not None:
                    poll()  # it may know more since
                raise LaunchError(reason) from error
            if complete:
                self._begun = True
                return self.arrived
            if now >= deadline:
                raise LaunchError(self._describe_missing(wanted, remedy))

    def hosts(self) -> tuple[HostEntry, ...]:
        """Return an entry for each connected agent, in order of ranks: agents of one machine follow each other, and
        machines come in the order of their first tasks.

        Raises:
            LaunchError: a task that had come has gone again, and the job would be smaller than it was to be.
        """
        with self._changed:
            arrived, gone = self.arrived, self._describe_gone()
        if self._count is not None and len(arrived) < self._count:
            raise LaunchError(gone)
        return entries(arrived)

    def hand_over(self, key: int) -> InboundStream:
        """Return the connection of a waiting agent, which begins.

        Args:
            key: see ``HostProfile``.

        Raises:
            LaunchError: it has gone again, or the job has it already.
        """
        done = threading.Event()
        found: list[_Task] = []

        def take() -> None:
            task = self._tasks.get(key)
            if task is not None and task.here and not task.taken:
                self._loop.selector.unregister(task.link.sock)
                task.taken = True
                found.append(task)
            done.set()

        self._loop.call_soon(take)
        while not done.wait(_TURN) and self._thread.is_alive():
            pass  # the thread has ended once the listener was closed
        if not found:
            raise LaunchError("its task has ended, and only another one could bring another agent")
        task = found[0]
        return InboundStream(task.link, self.secret, lambda: self.reason, partial(self._ended, task))

    def find_available_hosts_and_slots(self) -> Mapping[str, int | None]:
        """Return the connected agents, for an elastic job: each is a host with one slot; see ``entry``."""
        with self._changed:
            here = [task for task in self._tasks.values() if task.here and not task.unusable]
            for task in here:
                if not task.elastic_name:
                    self._name(task)
            return {task.elastic_name: 1 for task in here}

    def entry(self, name: str) -> HostEntry:
        """Return the host for a name that ``find_available_hosts_and_slots`` has ever returned."""
        return self._entries[name]

    def _name(self, task: _Task) -> None:
        """Give an agent a name that no other one ever has, in a form that may be the name of a host."""
        hello = task.hello
        plain = _UNUSUAL.sub("-", f"{hello.host}({hello.name or f'task {hello.index}'})")
        task.elastic_name = plain if plain not in self._entries else f"{plain}#{task.key}"
        (found,) = entries([hello])
        hostnames = {each.machine: each.hostname for each in self._entries.values()}
        taken = set(hostnames.values()) - {hostnames.get(hello.machine)}
        numbered = (hello.host if n == 1 else f"{hello.host}-{n}" for n in itertools.count(1))
        hostname = hostnames.get(hello.machine) or next(each for each in numbered if each not in taken)
        assert found.profile is not None
        profile = replace(found.profile, hostname=hostname, key=task.key)
        self._entries[task.elastic_name] = HostEntry(task.elastic_name, 1, profile=profile)

    def _complete(self, wanted: int) -> bool:
        return sum(task.here for task in self._tasks.values()) >= wanted

    def _describe_missing(self, wanted: int, remedy: str) -> str:
        here = self.arrived
        came = "; ".join(f"task {a.index}: {a.label} from {a.address}" for a in here[:_SHOWN])
        if len(here) > _SHOWN:
            came += f"; and {len(here) - _SHOWN} more"
        missing = sorted(set(range(self._count or 0)) - {hello.index for hello in here})
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        with self._changed:
            gone = self._describe_gone()
        parts = [
            f"Timed out waiting for {self._what} to start: {len(here)} of {wanted} came within "
            f"{self.start_timeout:g} s" + (f" ({came})" if came else ""),
        ]
        if missing:
            parts.append(f"missing: task{'s' if len(missing) > 1 else ''} {shown}" + (f" ({gone})" if gone else ""))
        if self._visitors.exhausted:
            parts.append(OUT_OF_DESCRIPTORS)
        return "; ".join(parts) + (f". {remedy}" if remedy else "")

    def _describe_gone(self) -> str:
        """Describe tasks that connected and have left again."""
        return "; ".join(f"task {index} came and {why}" for index, why in self._gone.items())

    # The thread.

    def _run(self) -> None:
        try:
            while not self._closed:
                now = time.monotonic()
                self._visitors.keep_time(now)
                self._loop.turn(min(self._visitors.next, now + 60.0))
        except Exception as error:
            logger.exception("listening for %s has failed", self._what)
            self.fail(f"listening for {self._what} has failed: {error!r}", error)
            self._close()

    def _close(self) -> None:
        self._closed = True
        strangers = list(self._visitors)
        self._visitors.close()
        for sock in (*self._listeners, *strangers):
            sock.close()
        for task in self._tasks.values():
            if not task.taken:
                task.link.sock.close()

    def _converse(self, sock: socket.socket, listener: socket.socket) -> Steps:
        link, hello = yield from admit(self.secret, sock)
        hello = msgspec.structs.replace(hello, address=sock.getpeername()[0])
        refused = self._why_not(hello)
        if refused:
            yield from reply(link, Reply(refused))
            raise AuthenticationError(refused)
        key = hello.index if self._count is not None else next(self._numbers)
        task = _Task(key, hello, link, _why_unusable(hello))
        with self._changed:
            self._tasks[key] = task
        yield from reply(link, Reply())
        self._loop.call_soon(partial(self._watch, task))

    def _why_not(self, hello: TaskHello) -> str:
        """Return why a task that knows the secret is refused; empty if it is not."""
        index = hello.index
        if self._count is None:
            # Which task it is does not say which rank. An unusable one is reported while all are waited for; later
            # no report would name it, and it would only take a place from another.
            return _why_unusable(hello) if self._begun else ""
        if not 0 <= index < self._count:
            return f"task {index} has no place in a job of {self._count} {self._what}"
        there = self._tasks.get(index)
        if there is None:
            return ""
        if not there.taken and _attempt(there.hello) == _attempt(hello):
            self._replace(there)
            return ""
        again = f" (attempt {hello.attempt})" if hello.attempt else ""
        return (
            f"task {index}{again} came a second time, from {hello.label}, while {there.hello.label} takes part in "
            "the job as this task: there are never two of one rank"
        )

    def _replace(self, task: _Task) -> None:
        """Forget a connection that its task gave up, as the answer did not arrive in time: it connects again."""
        if task.here:
            self._on_left(task)
        else:
            self._forget(task, "was lost at once")

    def _watch(self, task: _Task) -> None:
        """Watch a task that was let in: nothing arrives from it until the job begins, except its end."""
        if self._closed or self._tasks.get(task.key) is not task:
            task.link.sock.close()
            return
        self._loop.selector.register(task.link.sock, selectors.EVENT_READ, partial(self._on_left, task))
        with self._changed:
            task.here = True
            self._gone.pop(task.hello.index, None)
            self._changed.notify_all()
        logger.info("%s connected from %s", task.hello.label, task.hello.address)

    def _on_left(self, task: _Task) -> None:
        if task.taken:
            return  # while this event was pending
        self._loop.selector.unregister(task.link.sock)
        task.link.sock.close()
        self._forget(task, f"has gone again ({task.hello.label})")

    def _ended(self, task: _Task) -> None:
        """Forget an agent whose connection the job has closed."""
        if self._count is None:
            self._forget(task, "has ended")

    def _refused(self, sock: socket.socket, peer: object, error: Exception) -> bool:
        logger.info("refused a connection from %s: %s", peer, error)
        for task in list(self._tasks.values()):
            if task.link.sock is sock:
                self._forget(task, "was lost at once")
        return True

    def _forget(self, task: _Task, why: str) -> None:
        with self._changed:
            if self._tasks.pop(task.key, None) is None:
                return
            self._gone[task.hello.index] = why
            self._changed.notify_all()


def entries(hellos: Sequence[TaskHello]) -> tuple[HostEntry, ...]:
    """See ``TaskListener.hosts``."""
    machines: dict[str, list[TaskHello]] = {}
    for hello in hellos:
        machines.setdefault(hello.machine, []).append(hello)
    labels = [hello.label for hello in hellos]
    names: list[str] = []  # of machines: two containers may have one
    found = []
    for key, same in machines.items():
        host = same[0].host
        names.append(host)
        hostname = host if names.count(host) == 1 else f"{host}-{names.count(host)}"
        for hello in same:
            label = hello.label
            if labels.count(label) > 1:
                label = f"{hello.host} ({hello.name}, task {hello.index})"
            profile = HostProfile(
                hostname, key, hello.cwd, hello.command, hello.path, hello.kept, hello.limits, hello.index
            )
            found.append(HostEntry(label, 1, profile=profile))
    return tuple(found)


def _attempt(hello: TaskHello) -> tuple[str, int, int]:
    """Return what identifies the process, and the attempt, by which a task is brought."""
    return hello.host, hello.pid, hello.attempt


def _why_unusable(hello: TaskHello) -> str:
    if hello.version != __version__:
        return f"it has hvdgloo {hello.version}, the launcher has {__version__}"
    if hello.python != python_version():
        return f"it has Python {hello.python}, the launcher has {python_version()}"
    return ""


def _unusable(reasons: dict[str, str], came: int, what: str) -> UnusableHostsError:
    lines = [f"{len(reasons)} of the {came} {what} that came cannot be used:"]
    lines += [f"  {label}: {reason}" for label, reason in reasons.items()]
    lines.append("functions and results can be exchanged only between the same versions; install these everywhere")
    return UnusableHostsError("\n".join(lines), hosts=reasons)


def _endpoints(wanted: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the addresses that tasks are told, and the addresses to listen at."""
    addresses = interfaces.own_addresses()
    own = [address.address for address in interfaces.candidates(addresses, InterfaceFilter())]
    loopback = [address.address for address in addresses if address.loopback]
    if not wanted:
        everywhere = [*own, *loopback]
        return everywhere, everywhere
    at: list[str] = []
    for name in wanted:
        try:
            found = [str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
        except OSError:
            found = []  # known only where the tasks are
        mine = [address for address in found if address in own or address in loopback]
        if not mine:
            return list(wanted), [*own, *loopback]  # something between them and us leads here
        at += mine
    return list(wanted), list(dict.fromkeys(at))
