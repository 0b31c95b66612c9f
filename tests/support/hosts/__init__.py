"""Real hosts on one machine, for tests of what happens between hosts.

Every host has network, PID, mount, IPC and UTS namespaces of its own: its own host name, addresses, /proc, /dev/shm,
boot id, home folder and sshd (port 22, own host key), and a first process that reaps orphans. Networks are bridges that
stand in a namespace of the bed's own, so any number of beds have the same addresses side by side. The file system is
otherwise this machine's, as if it were shared among them. Needs root; ``available()`` says what is missing.

    with Bed(["h1", "h2", HostSpec("h3", ipv6=True, loopback_name=True)]) as bed:
        bed["h1"].run(["ssh", "h2", "hostname"]).stdout           # "h2\n": a CompletedProcess with text
        job = bed["h1"].popen([sys.executable, "-m", "hvdgloo.runner", "-H", "h1:1,h2:1", "true"])
        job.send_signal(signal.SIGKILL)                            # reaches the process itself
        bed["h2"].processes()                                      # psutil.Process of all but init and sshd
        bed["h2"].sessions()                                       # the processes of sshd's sessions
        bed["h2"].listening()                                      # {("10.77.0.11", 40123), ...} without sshd's
        bed["h2"].shared_memory()                                  # names in its /dev/shm
        bed["h2"].cut(); bed["h2"].reconnect()                          # pull its cables; plug them in again
        bed["h2"].power_off()                                      # everything on it is gone at once
        bed.block("h1", "h2"); bed.block("h2", "h1", reject=True)  # one-way firewalls: drop, or answer by ICMP
        bed["h2"].address, bed["h2"].addresses                     # "10.77.0.11", all of them

Fixtures (tests/conftest.py): ``bed`` is shared by a module's tests, hosts h1, h2, h3; ``make_bed(specs, ...)`` makes
special ones.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

from tests.support import warm
from tests.support.hosts.firewall import everything_to, opening_connections_to
from tests.support.hosts.plan import HostPlan, HostSpec, Nic, Plan, as_data, make_plan
from tests.support.launching import clean_environment, run_command, wait_for

__all__ = ["Bed", "Host", "HostProcess", "HostSpec", "Nic", "available"]

_LISTENING = "0A"
_KEEPER = Path(__file__).with_name("keeper.py")
_CHECKOUT = Path(__file__).parents[3]


@cache
def available() -> str:
    """Return the reason why there can be no bed here; empty if there can."""
    if sys.platform != "linux":
        return "network namespaces are a feature of Linux"
    if os.geteuid() != 0:
        return "not root"
    for program in ("ip", "nsenter", "ssh", "ssh-keygen", "/usr/sbin/sshd"):
        if shutil.which(program) is None:
            return f"no {program} (apt-get install iproute2 openssh-server)"
    try:
        with Bed(["h1"]) as bed:
            bed["h1"].run(["true"], check=True)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"namespaces are refused here: {error}"
    return ""


class HostProcess(subprocess.Popen[str]):
    """A process inside a host. Signals reach itself, and not the nsenter that stands between."""

    @property
    def inner(self) -> psutil.Process | None:
        """The process itself; None before it has been started and after its end."""
        try:
            children = psutil.Process(self.pid).children()
        except psutil.NoSuchProcess:
            return None
        return children[0] if children else None

    def send_signal(self, sig: int) -> None:
        inner = self.inner
        if inner is not None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended just now
                inner.send_signal(sig)
        elif self.poll() is None:
            super().send_signal(sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Host:
    """One host of a bed."""

    def __init__(self, bed: Bed, plan: HostPlan, init: int) -> None:
        self._bed = bed
        self.plan = plan
        self.name = plan.spec.name
        self.init = init
        self.on = True
        self._started: list[HostProcess] = []

    @property
    def address(self) -> str:
        """The address at which others reach it: its first NIC's first address."""
        return self.plan.address

    @property
    def addresses(self) -> tuple[str, ...]:
        """All addresses at which some network reaches it."""
        return tuple(address for card in self.plan.cards for address in card.addresses)

    def launcher(self) -> list[str]:
        """``hvdgloo-run``, as the beginning of a command on this host: a warm one, if the host sees this machine's
        /tmp, where the stand-in for it is.
        """
        return [sys.executable, "-m", "hvdgloo.runner"] if self.plan.spec.private_tmp else warm.launcher()

    def mac(self, nic: str) -> str:
        """A card's hardware address."""
        return self.run(["cat", f"/sys/class/net/{nic}/address"], check=True).stdout.strip()

    @property
    def home(self) -> str:
        """Root's home folder on it."""
        return f"/run/bed/{self.name}"

    def path(self, path: str) -> Path:
        """Return the path by which this process accesses a file of the host's own."""
        return Path(f"/proc/{self.init}/root") / path.lstrip("/")

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user who is logged in there."""
        return {**clean_environment(), "HOME": self.home, "USER": "root", "LOGNAME": "root"}

    # Processes.

    def popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = _CHECKOUT,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = subprocess.PIPE,
        stderr: int | IO[Any] | None = subprocess.PIPE,
        new_session: bool = True,
    ) -> HostProcess:
        """Start a process on the host, with text streams. ``env`` adds to what a user there has."""
        process = HostProcess(
            self.enter(argv, cwd=cwd),
            env={**self.environment, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=new_session,
        )
        self._started.append(process)
        return process

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = _CHECKOUT,
        input: str | None = None,
        timeout: float = 30.0,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the host to its end; on a time-out it is killed."""
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        with self.popen(argv, env=env, cwd=cwd, stdin=stdin) as process:
            try:
                out, err = process.communicate(input, timeout=timeout)
            except BaseException:
                process.kill()
                raise
        self._started.remove(process)
        done = subprocess.CompletedProcess(list(argv), process.returncode, out, err)
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)} on {self.name}: status {done.returncode}, {err.strip()}")
        return done

    def enter(self, argv: Sequence[str], *, cwd: str | Path = "/") -> list[str]:
        """The command that runs ``argv`` on the host when it is run on this machine as root."""
        return ["nsenter", "--target", str(self.init), "-n", "-u", "-p", "-m", "-i", f"--wdns={cwd}", "--", *argv]

    def processes(self) -> list[psutil.Process]:
        """All living processes but the first one and sshd with its sessions."""
        return [process for process in self._inhabitants() if not _is_sshd(process)]

    def sessions(self) -> list[psutil.Process]:
        """sshd's processes for the connections that are open."""
        sshd = {process.pid: process for process in self._inhabitants() if _is_sshd(process)}
        return [process for process in sshd.values() if _parent(process) in sshd]

    def is_empty(self) -> bool:
        """Tell whether only the first process and sshd live there, at a glance and without naming any."""
        if not self.on:
            return True
        # The host's own /proc has but its own processes, where this machine's has all processes.
        for name in os.listdir(f"/proc/{self.init}/root/proc"):
            if not name.isdigit() or name == "1":
                continue
            try:
                status = self.path(f"/proc/{name}/stat").read_bytes()
            except OSError:
                continue  # it has just ended
            command, _, rest = status.partition(b"(")[2].rpartition(b")")
            if not command.startswith(b"sshd") and not rest.startswith(b" Z"):
                return False
        return True

    def _inhabitants(self) -> Iterator[psutil.Process]:
        if not self.on:
            return
        try:
            own = os.readlink(f"/proc/{self.init}/ns/pid")
        except OSError:
            return
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != self.init):
            try:
                if os.readlink(f"/proc/{pid}/ns/pid") == own:
                    process = psutil.Process(pid)
                    if process.status() != psutil.STATUS_ZOMBIE:
                        yield process
            except (OSError, psutil.NoSuchProcess):
                continue  # it has just ended, or is the machine's own first process

    def kill(self, process: psutil.Process, signum: int = signal.SIGKILL) -> None:
        """Send a signal, if the process has not just ended."""
        try:
            process.send_signal(signum)
        except psutil.NoSuchProcess:
            pass

    # What else is there.

    def listening(self) -> set[tuple[str, int]]:
        """TCP addresses and ports on which something but sshd listens."""
        if not self.on:
            return set()
        # By way of the first process: any other that looked could be taken for one of the job's.
        tables = (Path(f"/proc/{self.init}/net/{name}").read_text() for name in ("tcp", "tcp6"))
        rows = [line.split() for table in tables for line in table.splitlines()[1:]]
        found = {_end_point(row[1]) for row in rows if row[3] == _LISTENING}
        return {(address, port) for address, port in found if port != 22}

    def shared_memory(self) -> set[str]:
        """Names in /dev/shm, and identifiers of System V segments."""
        if not self.on:
            return set()
        sysv = self.path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        return {entry.name for entry in self.path("/dev/shm").iterdir()} | {line.split()[1] for line in sysv}

    def sshd_log(self) -> str:
        return self.path(f"{self.home}/sshd.log").read_text()

    # Accidents.

    def cut(self) -> None:
        """Pull its network cables: it hears and says nothing more, and keeps its addresses."""
        self._bed.switch([f"link set {card.port} down" for card in self.plan.cards])

    def reconnect(self) -> None:
        """Plug them in again, and wait until the switches have noticed."""
        self._bed.switch([f"link set {card.port} up" for card in self.plan.cards])
        for card in self.plan.cards:
            wait_for(partial(self._forwards, card.port), what=f"{card.port} to forward")

    def _forwards(self, port: str) -> bool:
        return "state forwarding" in self._bed.switch([f"link show {port}"])

    def power_off(self) -> None:
        """End everything on it at once; its addresses do not answer any more."""
        self.cut()
        self.on = False
        try:
            first = psutil.Process(self.init)
            first.kill()
            first.wait(10)
        except psutil.NoSuchProcess:
            pass

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                super(HostProcess, process).kill()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            process.wait()


class Bed:
    """Some hosts and the networks between them. A context manager.

    Args:
        hosts: names, or specifications of hosts that are special.
        routed: a router joins the networks, if there are several; without one they are apart.
    """

    def __init__(self, hosts: Sequence[str | HostSpec], *, routed: bool = False) -> None:
        self.plan: Plan = make_plan(
            [HostSpec(host) if isinstance(host, str) else host for host in hosts], routed=routed
        )
        self._keeper: subprocess.Popen[str] | None = None
        self._hosts: dict[str, Host] = {}
        self._blocks = 0

    def __enter__(self) -> Bed:
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", str(_KEEPER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd="/",
        )
        try:
            inits = self._ask(as_data(self.plan))["inits"]
            self._hosts = {
                plan.spec.name: Host(self, plan, init) for plan, init in zip(self.plan.hosts, inits, strict=True)
            }
            self._ask({"switches": self.plan.switch_commands(inits)})
        except BaseException:
            self.close()
            raise
        return self

    def _ask(self, message: Mapping[str, object]) -> dict[str, Any]:
        assert self._keeper is not None
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        try:
            self._keeper.stdin.write(json.dumps(message) + "\n")
            self._keeper.stdin.flush()
            answer = self._keeper.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError("the bed did not come up; what its keeper wrote is above")
        return dict(json.loads(answer))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    @property
    def names(self) -> list[str]:
        return list(self._hosts)

    def block(self, source: str, target: str, *, reject: bool = False) -> None:
        """From now on ``source`` cannot open connections to ``target``; the other direction stays as it is.

        Args:
            reject: it is told so (ICMP: administratively prohibited), instead of waiting until its patience ends.
        """
        for card in self[target].plan.cards:
            for address in card.addresses:
                for port in (card.port for card in self[source].plan.cards):
                    reject_as = self[target].mac(card.name) if reject else None
                    self._block(port, address, opening_connections_to(address), reject_as)

    def part(self, one: str, other: str) -> None:
        """From now on nothing passes between two hosts, in either direction; both reach all others."""
        for source, target in ((one, other), (other, one)):
            for address in self[target].addresses:
                for port in (card.port for card in self[source].plan.cards):
                    self._block(port, address, everything_to(address), None)

    def unite(self) -> None:
        """End all that ``block`` and ``part`` have begun."""
        for host in self:
            for port in (card.port for card in host.plan.cards):
                if "ingress" in self._in_switches(["tc", "qdisc", "show", "dev", port]):
                    self._in_switches(["tc", "qdisc", "del", "dev", port, "ingress"])

    def _block(self, port: str, address: str, program: str, reject_as: str | None) -> None:
        self._blocks += 1
        number = self._blocks
        protocol = "ipv6" if ":" in address else "ip"
        picked = ["protocol", protocol, "prio", str(number), "bpf", "bytecode", program]
        if "ingress" not in self._in_switches(["tc", "qdisc", "show", "dev", port]):
            self._in_switches(["tc", "qdisc", "add", "dev", port, "ingress"])
        # Where they lead to, they are not forwarded; or a card with the target's hardware address takes them in.
        self.switch(
            [f"link add to{number} type veth peer name at{number} {f'address {reject_as}' if reject_as else ''}"]
        )
        if reject_as:
            self._in_switches(["sysctl", "-qw", f"net.ipv4.conf.at{number}.forwarding=1"])
            self._in_switches(["sysctl", "-qw", f"net.ipv4.conf.at{number}.rp_filter=0"])
            family = "-6" if ":" in address else "-4"
            self._in_switches(["ip", family, "rule", "add", "iif", f"at{number}", "pref", "0", "prohibit"])
        self.switch([f"link set to{number} up", f"link set at{number} up"])
        redirect = ["action", "mirred", "egress", "redirect", "dev", f"to{number}"]
        self._in_switches(["tc", "filter", "add", "dev", port, "parent", "ffff:", *picked, *redirect])

    def switch(self, commands: Sequence[str]) -> str:
        """``ip`` commands where the switches stand, and what they print."""
        return self._in_switches(["ip", "-details", "-batch", "-"], "".join(f"{command}\n" for command in commands))

    def _in_switches(self, argv: Sequence[str], text: str = "") -> str:
        assert self._keeper is not None
        enter = ["nsenter", "--target", str(self._keeper.pid), "-n", "--"]
        done = run_command([*enter, *argv], input=text, timeout=10)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """End everything. Also happens by itself when this process ends, in whatever way."""
        for host in self._hosts.values():
            host.on = False
        if self._keeper is not None:
            for stream in (self._keeper.stdin, self._keeper.stdout):
                if stream is not None:
                    stream.close()
            try:
                self._keeper.wait(10)
            except subprocess.TimeoutExpired:
                self._keeper.kill()  # its hosts die with it, at the system's hands
                self._keeper.wait()
            self._keeper = None
        for host in self._hosts.values():
            host.close()


def _end_point(text: str) -> tuple[str, int]:
    """An address and a port as /proc/net/tcp has them: words of the machine's byte order in hexadecimal digits."""
    digits, port = text.split(":")
    words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)


def _is_sshd(process: psutil.Process) -> bool:
    try:
        return process.name().startswith("sshd")
    except psutil.NoSuchProcess:
        return False


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0
