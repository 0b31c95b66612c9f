"""Which hosts an elastic job may use: what lists them, and what a list means.

A discovery is any object with ``find_available_hosts_and_slots()``; Horovod's are such objects. ``HostManager`` asks it
again and again, and believes it with care: a host must be missing from two successive good answers before it counts as
removed, since a script that prints half of its list once must not end a job. A host that is added counts at once. The
order of the list is kept: it is the order in which hosts are filled.
"""

from __future__ import annotations

import errno
import math
import os
import random
import re
import selectors
import shutil
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdgloo._platform.spelling import in_one_line
from hvdgloo.errors import ConfigError, LaunchError
from hvdgloo.rendezvous._elastic.hosts import cooldown_time
from hvdgloo.runner.job.hostlist import parse_line
from hvdgloo.runner.job.outcome import describe_status
from hvdgloo.runner.job.spec import Discovery, HostEntry

MAX_OUTPUT = 1 << 20
"""Bytes that a script may print: room for 10,000 hosts and more, and not for a loop that never ends."""

_SHELL = "/bin/sh"
_SHELL_S = re.compile(r"[\s|&;<>()$`\"'*?#={}]")  # what a shell does something with

LINES_SHOWN = 5
"""Last lines of a script's standard error that a message has."""


class DiscoveryError(LaunchError):
    """Hosts could not be determined; the text says why, and has what the script said last."""


class HostDiscovery(ABC):
    """The base of discoveries, as in Horovod."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int | None]:
        """Hosts and their slots, in the order in which they are to be filled; see ``Discovery``."""

    def interrupt(self) -> None:  # noqa: B027 - most have nothing to end
        """End what it has started to answer a question that is being asked; called on another thread."""


class FixedHosts(HostDiscovery):
    """Hosts that are known.

    Args:
        host_slots: hosts and slots.
    """

    def __init__(self, host_slots: Mapping[str, int | None]) -> None:
        self._host_slots = dict(host_slots)

    def set(self, host_slots: Mapping[str, int | None]) -> None:
        """From now on these are the hosts."""
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int | None]:
        return dict(self._host_slots)


class ProgramDiscovery(HostDiscovery):
    """Hosts that a program prints, which is ended with all that it has started when nobody needs the answer."""

    _running: subprocess.Popen[bytes] | None = None

    def interrupt(self) -> None:
        process = self._running
        if process is not None:
            _kill(process)

    def _output_of(self, command: Sequence[str], timeout: float, what: str) -> str:
        """See ``output_of``."""

        def started(process: subprocess.Popen[bytes]) -> None:
            self._running = process

        try:
            return output_of(command, timeout, what, started)
        finally:
            self._running = None


def script_command(script: str) -> list[str]:
    """The argv of a discovery script: the file or program of that name, or else a command line for a shell."""
    path = os.path.abspath(os.path.expanduser(script))
    if os.path.exists(path):
        return [path]
    if _SHELL_S.search(script):
        return [_SHELL, "-c", script]
    return [shutil.which(script) or path]


class HostDiscoveryScript(ProgramDiscovery):
    """Hosts that a command prints, one a line: ``host`` or ``host:slots``. Blank lines are ignored.

    Args:
        discovery_script: the path of an executable, or a command line, which a shell reads.
        slots: of hosts on lines without slots; None leaves them to the hosts.
        timeout: seconds that it may take.
    """

    def __init__(self, discovery_script: str, slots: int | None = 1, *, timeout: float = 10.0) -> None:
        self._script = discovery_script
        self._slots = slots
        self._timeout = timeout

    def find_available_hosts_and_slots(self) -> dict[str, int | None]:
        """What it prints now. Of a host that is listed twice the last slots count, in its first place.

        Raises:
            DiscoveryError: it cannot be executed, fails, takes too long, prints too much, or prints what is no host.
        """
        hosts: dict[str, int | None] = {}
        for number, line in enumerate(self._execute_discovery_script().splitlines(), 1):
            if line.strip():
                try:
                    host = parse_line(line.strip(), f"line {number}")
                except ConfigError as error:
                    raise DiscoveryError(f"{self._what}: {in_one_line(str(error))[:300]}") from None
                hosts[address(host)] = self._slots if host.slots is None else host.slots
        return hosts

    def _execute_discovery_script(self) -> str:
        """Its standard output; raises DiscoveryError."""
        return self._output_of(script_command(self._script), self._timeout, self._what)

    @property
    def _what(self) -> str:
        return f"host discovery script {self._script}"


def address(host: HostEntry) -> str:
    """A host as discoveries name it: ``h1``, or ``user@h1`` where a user was given."""
    if not host.user:
        return host.name
    return f"{host.user}@[{host.name}]" if ":" in host.name else f"{host.user}@{host.name}"


def host_entry(name: str, slots: int | None) -> HostEntry:
    """The inverse of ``address``.

    Raises:
        ConfigError: it is not the name of a host.
    """
    host = parse_line(name, "host discovery")
    if host.slots is not None:
        raise ConfigError(f"host discovery: {name!r} is not the name of a host: its slots are given separately")
    return replace(host, slots=slots)


def output_of(
    command: Sequence[str],
    timeout: float,
    what: str,
    started: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> str:
    """What a command prints. It is ended, and with it all that it has started, when its time is over.

    Args:
        command: program and arguments. As in a shell, a script without a first line that names its interpreter is one
            of the shell's.
        timeout: seconds that it may take.
        what: begins the text of an error.
        started: receives its process.

    Raises:
        DiscoveryError: it cannot be executed, fails, takes too long, or prints too much; with the end of what it has
            written to its standard error.
    """
    deadline = time.monotonic() + timeout
    output, errors = bytearray(), bytearray()

    def error(why: str) -> DiscoveryError:
        lines = [line.rstrip() for line in errors.decode("utf-8", "replace").split("\n") if line.strip()]
        return DiscoveryError(
            f"{what}: {why}" + "".join(f"\n    {in_one_line(line)[:200]}" for line in lines[-LINES_SHOWN:])
        )

    try:
        try:
            process = _begun(command)
        except OSError as failure:
            if failure.errno != errno.ENOEXEC:
                raise
            process = _begun([_SHELL, *command])
    except OSError as failure:
        raise error(f"it cannot be executed: {failure.strerror}") from None
    try:
        started(process)
        if not _listen(process, output, errors, deadline):
            raise error(f"it prints more than {MAX_OUTPUT} bytes")
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise error(f"it has not ended within {timeout:g} s") from None
    finally:
        _end(process)
    if status:
        raise error(f"it {describe_status(status)}")
    try:
        return output.decode("utf-8")
    except UnicodeDecodeError:
        raise error("what it prints is not UTF-8") from None


def _begun(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that its children can be ended with it
    )


def _listen(process: subprocess.Popen[bytes], output: bytearray, errors: bytearray, deadline: float) -> bool:
    """Collect what a process prints until both of its streams end; of its standard error only the end is kept.

    Returns:
        False if it prints too much.

    Raises:
        subprocess.TimeoutExpired: the streams have not ended by the deadline.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, output)
        selector.register(process.stderr, selectors.EVENT_READ, errors)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(process.args, 0)
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                key.data.extend(data)
                if len(output) > MAX_OUTPUT:
                    return False
                del errors[: -(1 << 14)]
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a script and what it has started, and forget it."""
    _kill(process)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a script and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended, and has left nothing behind


@dataclass(frozen=True)
class Listing:
    """What is to be believed after a discovery was asked again.

    Attributes:
        hosts: names and slots, in order; see ``Discovery``.
        changed: whether they are others than before.
        notice: a line for the user; empty if there is nothing new to say.
    """

    hosts: tuple[tuple[str, int | None], ...]
    changed: bool
    notice: str = ""


_Answer = dict[str, int | None]


class HostManager:
    """Asks a discovery, and believes it with care.

    Args:
        discovery: any object with ``find_available_hosts_and_slots()``.
    """

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery
        self._answers: tuple[_Answer, _Answer] | None = None  # the last good one, and the one before
        self._hosts: tuple[tuple[str, int | None], ...] = ()
        self._trouble = ""

    @property
    def asked(self) -> bool:
        """Whether it has answered before."""
        return self._answers is not None

    @property
    def current_hosts(self) -> tuple[tuple[str, int | None], ...]:
        """Names and slots that were believed last, in order."""
        return self._hosts

    def update_available_hosts(self) -> Listing:
        """Ask once more. It takes as long as the discovery does: not for a thread that others wait for.

        Raises:
            DiscoveryError: the first answer is none; nothing should be started then. Later ones are a notice.
        """
        try:
            answer = self._ask()
        except DiscoveryError as error:
            if self._answers is None:
                raise
            return self._failed(str(error))
        back = self._trouble
        self._trouble = ""
        before = answer if self._answers is None else self._answers[0]
        self._answers = answer, before
        # What either of the last two answers has: it takes two to remove a host, or a slot. One that lacks hosts does
        # not say in which place they would be.
        names = answer if before.keys() <= answer.keys() else {**before, **answer}
        hosts = tuple((name, _more(answer.get(name, 0), before.get(name, 0))) for name in names)
        changed, self._hosts = hosts != self._hosts, hosts
        return Listing(hosts, changed, "hosts can be discovered again" if back else "")

    def interrupt(self) -> None:
        """Nobody needs the answer to the question that is being asked; called on another thread."""
        if isinstance(self._discovery, HostDiscovery):
            self._discovery.interrupt()

    def _ask(self) -> _Answer:
        try:
            answer = dict(self._discovery.find_available_hosts_and_slots())
        except DiscoveryError:
            raise
        except Exception as error:
            raise DiscoveryError(f"host discovery: {type(error).__name__}: {error}") from error
        known = dict(self._hosts)
        for name, slots in answer.items():
            if not isinstance(name, str) or not name or not (slots is None or (type(slots) is int and slots > 0)):
                raise DiscoveryError(f"host discovery: {name!r:.100}: {slots!r:.50} is not a host with its slots")
            if name not in known:
                try:
                    host_entry(name, slots)
                except ConfigError as error:
                    raise DiscoveryError(in_one_line(str(error))[:300]) from None
        return answer

    def _failed(self, text: str) -> Listing:
        notice = "" if text == self._trouble else f"{text}\nThe job goes on with the hosts that were listed before"
        self._trouble = text
        return Listing(self._hosts, False, notice)


def _more(now: int | None, before: int | None) -> int | None:
    """The higher number of slots; the newer one where either leaves it to the host."""
    if now is None or before is None:
        return before if now == 0 else now
    return max(now, before)


class HostState:
    """Whether one host is left out, for integrations that were written for Horovod: a job of ours keeps its own books.

    Args:
        cooldown_range: the shortest and the longest time in seconds for which it is; None for ever.
    """

    def __init__(self, cooldown_range: Sequence[float] | None = None) -> None:
        self._cooldown = None if cooldown_range is None else (cooldown_range[0], cooldown_range[1])
        self._event = threading.Event()
        self._times = 0
        self._until = -math.inf

    def get_event(self) -> threading.Event:
        """Set once the host is left out: whoever waits for its workers need not wait any longer."""
        return self._event

    def set_event(self) -> None:
        """Wake those who wait."""
        self._event.set()

    def blacklist(self) -> None:
        """Leave it out from now on, for longer each time."""
        if self.is_blacklisted():
            return
        self._times += 1
        self._until = math.inf
        if self._cooldown is not None:
            self._until = time.monotonic() + cooldown_time(self._times, self._cooldown, random.random())
        self.set_event()

    def whitelist(self) -> None:
        """Use it again, as if nothing had happened lately."""
        self._until = -math.inf
        self._event = threading.Event()

    def is_blacklisted(self) -> bool:
        """Whether it is left out."""
        return time.monotonic() < self._until

    def is_resurrected(self) -> bool:
        """Whether it was left out, and its time is over."""
        return self._until != -math.inf and not self.is_blacklisted()
