"""The hosts that an elastic job may use: the discoveries that list them, and the reading of a list.

A discovery is any object with ``find_available_hosts_and_slots()``, as in Horovod. ``HostManager`` calls it repeatedly
and is cautious: a host must be missing from two successive good answers before it counts as removed, because a script
that prints half of its list once must not end a job. An added host counts at once. The order of the list is kept: it is
the order in which hosts are filled.
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
"""Maximum size of a script's output, in bytes: enough for more than 10,000 hosts, but not for an endless loop."""

_SHELL = "/bin/sh"
_SHELL_S = re.compile(r"[\s|&;<>()$`\"'*?#={}]")  # what a shell does something with

LINES_SHOWN = 5
"""Number of lines of a script's standard error, the last ones, in a message."""


class DiscoveryError(LaunchError):
    """Hosts could not be determined. The text has the reason and the script's last lines."""


class HostDiscovery(ABC):
    """The base class of discoveries, as in Horovod."""

    @abstractmethod
    def find_available_hosts_and_slots(self) -> dict[str, int | None]:
        """Return hosts and their slots, in the order in which they are to be filled; see ``Discovery``."""

    def interrupt(self) -> None:  # noqa: B027 - most have nothing to end
        """End what a running call has started, because its answer is no longer needed. Called on another thread."""


class FixedHosts(HostDiscovery):
    """A fixed list of hosts.

    Args:
        host_slots: hosts and slots.
    """

    def __init__(self, host_slots: Mapping[str, int | None]) -> None:
        self._host_slots = dict(host_slots)

    def set(self, host_slots: Mapping[str, int | None]) -> None:
        """Replace the hosts."""
        self._host_slots = dict(host_slots)

    def find_available_hosts_and_slots(self) -> dict[str, int | None]:
        return dict(self._host_slots)


class ProgramDiscovery(HostDiscovery):
    """A discovery by a program, which is ended with all its children once its answer is no longer needed."""

    _running: subprocess.Popen[bytes] | None = None

    def interrupt(self) -> None:
        process = self._running
        if process is not None:
            _kill(process)

    def _output_of(self, command: Sequence[str], timeout: float, what: str) -> str:
        """Run ``output_of``, and remember the process meanwhile."""

        def started(process: subprocess.Popen[bytes]) -> None:
            self._running = process

        try:
            return output_of(command, timeout, what, started)
        finally:
            self._running = None


def script_command(script: str) -> list[str]:
    """Return the argv of a discovery script: the file or program of that name, otherwise a command line for a shell."""
    path = os.path.abspath(os.path.expanduser(script))
    if os.path.exists(path):
        return [path]
    if _SHELL_S.search(script):
        return [_SHELL, "-c", script]
    return [shutil.which(script) or path]


class HostDiscoveryScript(ProgramDiscovery):
    """A discovery by a command that prints one host per line: ``host`` or ``host:slots``. Blank lines are ignored.

    Args:
        discovery_script: the path of an executable, or a command line for a shell.
        slots: slots of hosts on lines without a number; None lets the hosts decide.
        timeout: seconds that the command may take.
    """

    def __init__(self, discovery_script: str, slots: int | None = 1, *, timeout: float = 10.0) -> None:
        self._script = discovery_script
        self._slots = slots
        self._timeout = timeout

    def find_available_hosts_and_slots(self) -> dict[str, int | None]:
        """Return the hosts that the command prints now. A host that is listed twice has its first place and its last
        slots.

        Raises:
            DiscoveryError: the command cannot be executed, fails, takes too long, prints too much, or prints a line
                that is not a host.
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
        """Return the standard output of the command; may raise DiscoveryError."""
        return self._output_of(script_command(self._script), self._timeout, self._what)

    @property
    def _what(self) -> str:
        return f"host discovery script {self._script}"


def address(host: HostEntry) -> str:
    """Return a host's name as discoveries list it: ``h1``, or ``user@h1`` if a user was given."""
    if not host.user:
        return host.name
    return f"{host.user}@[{host.name}]" if ":" in host.name else f"{host.user}@{host.name}"


def host_entry(name: str, slots: int | None) -> HostEntry:
    """Return the entry for a name; the inverse of ``address``.

    Raises:
        ConfigError: the name is not the name of a host.
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
    """Run a command and return its output. When its time is over, it is ended together with its children.

    Args:
        command: program and arguments. As in a shell, a script whose first line names no interpreter is run by the
            shell.
        timeout: seconds that the command may take.
        what: the beginning of an error's text.
        started: receives the process.

    Raises:
        DiscoveryError: the command cannot be executed, fails, takes too long, or prints too much; the text includes the
            last lines of its standard error.
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
            raise error(f"it printed more than {MAX_OUTPUT} bytes")
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise error(f"it did not end within {timeout:g} s") from None
    finally:
        _end(process)
    if status:
        raise error(f"it {describe_status(status)}")
    try:
        return output.decode("utf-8")
    except UnicodeDecodeError:
        raise error("its output is not UTF-8") from None


def _begun(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that its children can be ended with it
    )


def _listen(process: subprocess.Popen[bytes], output: bytearray, errors: bytearray, deadline: float) -> bool:
    """Collect the output of a process until both of its streams end; of its standard error, only the end is kept.

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
    """End a script and its children, and release them."""
    _kill(process)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a script and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended, and has left nothing behind


@dataclass(frozen=True)
class Listing:
    """The hosts that count after another call of a discovery.

    Attributes:
        hosts: names and slots, in order; see ``Discovery``.
        changed: True if they differ from the previous ones.
        notice: a line for the user; empty if there is no news.
    """

    hosts: tuple[tuple[str, int | None], ...]
    changed: bool
    notice: str = ""


_Answer = dict[str, int | None]


class HostManager:
    """A cautious user of a discovery.

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
        """True once the discovery has answered."""
        return self._answers is not None

    @property
    def current_hosts(self) -> tuple[tuple[str, int | None], ...]:
        """Current names and slots, in order."""
        return self._hosts

    def update_available_hosts(self) -> Listing:
        """Call the discovery once more. This blocks for as long as the discovery does.

        Raises:
            DiscoveryError: the first call failed; nothing should be started then. A later failure is a notice.
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
        # The union of the last two answers: it takes two of them to remove a host, or a slot. An answer that lacks
        # hosts leaves their places open.
        names = answer if before.keys() <= answer.keys() else {**before, **answer}
        hosts = tuple((name, _more(answer.get(name, 0), before.get(name, 0))) for name in names)
        changed, self._hosts = hosts != self._hosts, hosts
        return Listing(hosts, changed, "hosts can be discovered again" if back else "")

    def interrupt(self) -> None:
        """End a running call, because its answer is no longer needed. Called on another thread."""
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
    """Return the higher number of slots; the newer one if either leaves the number to the host."""
    if now is None or before is None:
        return before if now == 0 else now
    return max(now, before)


class HostState:
    """The state of one host, left out or not, for integrations that were written for Horovod. Our own jobs do not use
    it.

    Args:
        cooldown_range: the shortest and the longest time in seconds for which a host is left out; None for ever.
    """

    def __init__(self, cooldown_range: Sequence[float] | None = None) -> None:
        self._cooldown = None if cooldown_range is None else (cooldown_range[0], cooldown_range[1])
        self._event = threading.Event()
        self._times = 0
        self._until = -math.inf

    def get_event(self) -> threading.Event:
        """Return the event that is set once the host is left out, so that nothing waits for its workers any longer."""
        return self._event

    def set_event(self) -> None:
        """Set the event."""
        self._event.set()

    def blacklist(self) -> None:
        """Leave the host out from now on, for longer each time."""
        if self.is_blacklisted():
            return
        self._times += 1
        self._until = math.inf
        if self._cooldown is not None:
            self._until = time.monotonic() + cooldown_time(self._times, self._cooldown, random.random())
        self.set_event()

    def whitelist(self) -> None:
        """Use the host again, as if it had not failed."""
        self._until = -math.inf
        self._event = threading.Event()

    def is_blacklisted(self) -> bool:
        """Tell whether the host is left out."""
        return time.monotonic() < self._until

    def is_resurrected(self) -> bool:
        """Tell whether the host was left out, and its time is over."""
        return self._until != -math.inf and not self.is_blacklisted()
