"""Messages between launcher and agent, as values and as bytes.

They share one byte stream in each direction (a pipe, or ssh's equivalent), framed and encoded like all messages between
processes: see ``hvdgloo._net.framing`` and ``hvdgloo._net.codec``. The agent starts with a preamble, because login
shells like to print greetings: bytes before it are passed on as ``Noise``, to be shown and not parsed.

This module is pure: nothing here reads or writes. Environments travel only inside frames, so that no secret is ever on
a command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, Union

import msgspec

from hvdgloo._net import codec
from hvdgloo._net.framing import FrameDecoder, Mac
from hvdgloo.errors import LaunchError

PROTOCOL = 7
"""Version of the frames, raised when their meaning changes; launcher and agent must agree."""

PREAMBLE = b"\0hvdgloo agent: frames follow\n"  # none of its suffixes is also a prefix of it
LAST_WORDS = "hvdgloo-agent: "
"""Beginning of a line that an agent's watchdog writes to standard error about the agent's end. It is not a frame,
because the agent may have left an unfinished frame in the stream."""

MAX_FRAME = 64 * 1024 * 1024
CHUNK = 64 * 1024
"""Maximum number of bytes of output, input or results in one frame."""

STDOUT, STDERR = 1, 2

_UNSEEN = {"data", "env", "key", "observations"}
"""Fields that may contain secrets, or large values. Frames appear in tracebacks and logs; these fields do not."""


class Frame(codec.Message, frozen=True, tag=True):
    """The base class of all frames: on the wire, a frame's name comes first."""

    def __repr__(self) -> str:
        seen = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in _UNSEEN)
        return f"{type(self).__name__}({', '.join(seen)})"


Target: TypeAlias = tuple[int, str, int]
"""Fields of ``hvdgloo.runner.network.probe.ProbeTarget``: number of a host, address, port."""

# From the launcher to an agent.


class Require(Frame, frozen=True):
    """Requirements of the workers on this host. The answer is ``Lacking``.

    Attributes:
        cwd: their working directory.
        files: files that must exist; relative paths start in ``cwd``.
        programs: programs that must exist; names without a slash are looked up in ``search_path`` (empty: the host's
            own).
        outputs: files that will be written.
    """

    cwd: str
    files: Sequence[str] = ()
    programs: Sequence[str] = ()
    search_path: str = ""
    outputs: Sequence[str] = ()


class Start(Frame, frozen=True):
    """The first frame: the common part of all of this host's workers.

    Attributes:
        agent_id: carried in ``HVDGLOO_AGENT_ID`` by every process that the agent starts for the job.
        env: the environment to which each ``Spawn`` adds.
        cwd: working directory of the workers.
        heartbeat_timeout: seconds of the agent's silence after which the launcher considers it lost.
        launcher_timeout: seconds of the launcher's silence after which the agent considers it lost; 0 if only the end
            of the stream counts, as it does if both are on one host.
        grace: seconds between SIGTERM and SIGKILL when the launcher is lost.
        inherit: add ``env``, which comes from another host, to the agent's own environment.
        elastic: the job survives its workers. A worker's leftovers are ended with it, and SIGTERM to the agent means
            that the host is to be given back.
        workers: number of workers that will be spawned; 0 if not yet known.
    """

    agent_id: str
    env: Mapping[str, str]
    cwd: str
    heartbeat_timeout: float
    launcher_timeout: float
    grace: float
    inherit: bool = False
    elastic: bool = False
    workers: int = 0


class Blob(Frame, frozen=True):
    """A piece of the file that workers spawned with ``task`` may read: the function of ``hvdgloo.run.run``."""

    data: bytes


class Spawn(Frame, frozen=True):
    """Start one worker.

    Attributes:
        number: identifies the worker from now on, and is never reused in the job. In a job of fixed size it is the
            rank; in an elastic one the rank changes.
        argv: the program and its arguments; a ``task`` gets two additional descriptor numbers (Blob's file, result
            file).
        env: added to the environment of ``Start``.
        stdin: give it a pipe fed by ``Stdin`` frames, instead of /dev/null.
        task: the worker reads a function from the first descriptor and writes its result to the second.
    """

    number: int
    argv: Sequence[str]
    env: Mapping[str, str]
    stdin: bool = False
    task: bool = False


class Stdin(Frame, frozen=True):
    """Input for a worker; empty at its end. The next one is sent after ``StdinTaken``."""

    number: int
    data: bytes


class Credit(Frame, frozen=True):
    """Confirmation of this many bytes of a worker's output; an agent reads at most WINDOW ahead."""

    number: int
    amount: int


class Signal(Frame, frozen=True):
    """Pass a signal on to the workers, and change nothing else."""

    signum: int


class Stop(Frame, frozen=True):
    """Send ``signum`` to the workers' process groups, and SIGKILL after ``grace`` seconds. A second Stop may shorten
    that."""

    signum: int
    grace: float


class StopWorker(Frame, frozen=True):
    """A ``Stop`` for one worker, which may have ended already. The others go on."""

    number: int
    signum: int
    grace: float


class Suspend(Frame, frozen=True):
    """The launcher is about to be stopped (Ctrl-Z) or has been resumed: its silence in between means nothing."""

    suspended: bool


class Examine(Require, frozen=True):
    """Collect facts about this host for ``hvdgloo-run doctor``; no job is started. The answer is ``Examined``."""


class Finish(Frame, frozen=True):
    """End every process that is left of the job, which is over; send ``Cleared`` and exit."""


class Survey(Frame, frozen=True):
    """Report this host's addresses, and prepare to prove this host's identity at each of them.

    Attributes:
        host: its number among the job's hosts.
        key: the key of all proofs.
        rules: the user's rules for this host's addresses (``hvdgloo.runner.network.interfaces``).
        listen: other hosts will try to reach this one.
        port_range: first and last port that may be used.
    """

    host: int
    key: bytes
    rules: Sequence[str]
    listen: bool
    port_range: tuple[int, int] | None


class Probe(Frame, frozen=True):
    """Try these addresses, each for ``timeout`` seconds."""

    targets: Sequence[Target]
    timeout: float


class ProbesEnd(Frame, frozen=True):
    """Stop sending and answering probes, because addresses have been chosen."""


class Relay(Frame, frozen=True):
    """Listen at this host's loopback for its workers, and relay their connections. The answer is ``Relaying``.

    Attributes:
        port_range: first and last port that may be used.
    """

    port_range: tuple[int, int] | None


class Observe(Frame, frozen=True):
    """Collect workers' reports from now on, and pass them on, because the job has observers. May be sent again.

    Attributes:
        host: measure the host, too.
    """

    host: bool


class TraceSteps(Frame, frozen=True):
    """Have the workers trace their next steps. The answers are ``Tracing`` and, for each worker, ``Traced``.

    Attributes:
        number: number of this request within the job.
        steps: number of steps that each worker traces.
    """

    number: int
    steps: int


class Sweep(Frame, frozen=True):
    """End the processes that the lost agent of a job may have left on this host, send ``Cleared`` and exit. Sent
    instead of ``Start``.

    Attributes:
        agent_id: the lost agent's.
        grace: seconds between SIGTERM and SIGKILL.
    """

    agent_id: str
    grace: float


# From an agent to the launcher.


class Hello(Frame, frozen=True):
    """The first frame: the identity of agent and host.

    Attributes:
        protocol, version: must equal the launcher's.
        hostname, identity: the host's (see ``hvdgloo.rendezvous._host_identity``).
        pid: the agent's.
        cores: number of cores that this process may use, given affinity and control groups.
        machine_cores: number of cores of the machine; 0 if not known.
        gpus: number of visible GPUs.
        port: a free port, kept from other jobs, for ``MASTER_PORT``.
        loopback: the address at which the host reaches itself.
    """

    protocol: int
    version: str
    hostname: str
    identity: str
    pid: int
    cores: int
    gpus: int
    port: int
    machine_cores: int = 0
    loopback: str = "127.0.0.1"


class Examined(Frame, frozen=True):
    """Facts that an agent has collected about its host.

    Attributes:
        facts: the fields of ``hvdgloo.runner.agent.facts.Facts``.
        asked, answered: this host's clock when the request came and when the answer left, in seconds since 1970.
    """

    facts: Mapping[str, Any]
    asked: float
    answered: float


class Surveyed(Frame, frozen=True):
    """A host's addresses.

    Attributes:
        addresses: the fields of ``hvdgloo.runner.network.interfaces.Address``, for each.
        ports: address to the port on which the agent listens for probes.
        failures: address to the reason why nothing listens there.
        port: held for ``MASTER_PORT``, within the range.
        port_failure: the reason if there is no such port.
    """

    addresses: Sequence[tuple[str, str, int, bool]]
    ports: Mapping[str, int]
    failures: Mapping[str, str]
    port: int
    port_failure: str = ""


class Probed(Frame, frozen=True):
    """Results of probes: each target, and the fields of ``network.probe``'s Answer with the outcome last."""

    answers: Sequence[tuple[Target, tuple[str, int, str, str]]]


class Relaying(Frame, frozen=True):
    """The port of the agent's loopback address on which it listens for its workers, or the reason for a failure."""

    port: int
    failure: str = ""


class RelayOpen(Frame, frozen=True):
    """A worker has connected; this number identifies its connection from now on."""

    connection: int


class Lacking(Frame, frozen=True):
    """Missing requirements: the working directory itself, or things in it.

    Attributes:
        unwritable: files that cannot be written, each with the reason.
        machine: what the host itself lacks, and the remedy.
    """

    directory: str = ""
    things: Sequence[str] = ()
    unwritable: Sequence[str] = ()
    machine: str = ""


class Spawned(Frame, frozen=True):
    """A worker runs as this process of its host (in the process namespace of its agent)."""

    number: int
    pid: int


class SpawnFailed(Frame, frozen=True):
    """A worker could not be started. ``status`` is a shell's exit status: 127 not found, 126 not executable."""

    number: int
    reason: str
    status: int


class Output(Frame, frozen=True):
    """Output of a worker, or of a process that it started, to STDOUT or STDERR. More may follow after ``Exited``.

    Each byte counts against the worker's WINDOW until ``Credit`` is given for it.
    """

    number: int
    stream: int
    data: bytes


class StdinTaken(Frame, frozen=True):
    """A worker's standard input has accepted all of the last ``Stdin``; the next may be sent."""

    number: int


class Result(Frame, frozen=True):
    """A piece of a task's result. All pieces precede its ``Exited``."""

    number: int
    data: bytes


class Exited(Frame, frozen=True):
    """A worker has ended: ``status`` is its exit status, or minus the signal that ended it.

    Output may still follow: from background processes, and bytes that the launcher has not given credit for yet.

    Attributes:
        account: the kernel's part in it, in words (see ``MemoryWatch``), or the error that the worker recorded.
        overdue: it had not ended within the time that a ``Stop`` gave it, and was killed.
    """

    number: int
    status: int
    account: str = ""
    overdue: bool = False


class Observed(Frame, frozen=True):
    """Reports of workers, and measurements of their host; at most one such frame a second.

    Attributes:
        observations: encoded samples; see ``hvdgloo._observe.samples``.
    """

    observations: Sequence[bytes]


class Tracing(Frame, frozen=True):
    """The number of workers that were asked for a trace; ``number`` is from ``TraceSteps``."""

    number: int
    workers: int


class Traced(Frame, frozen=True):
    """A piece of a rank's trace; the ``last`` one completes it."""

    number: int
    rank: int
    data: bytes
    last: bool


class ForeignMpi(Frame, frozen=True):
    """This host's first worker uses mpi4py, without hvdgloo and without a launcher of MPI's."""


class Leaving(Frame, frozen=True):
    """The agent of an elastic job was asked to end: its host is to be given back, and its workers should leave.

    The agent continues until ``Finish``.
    """


class Dying(Frame, frozen=True):
    """The agent ends its workers on its own, for this reason."""

    reason: str


class Cleared(Frame, frozen=True):
    """The last frame: nothing of the job is left on this host, except the processes ``left`` that survived SIGKILL."""

    left: Sequence[int] = ()


# In both directions.


class RelayData(Frame, frozen=True):
    """Bytes of a relayed connection, within the sender's window (``hvdgloo.runner.protocol.relay``)."""

    connection: int
    data: bytes


class RelayCredit(Frame, frozen=True):
    """The number of bytes of a connection that have been written: as many more may be sent."""

    connection: int
    amount: int


class RelayClose(Frame, frozen=True):
    """A connection has ended on this side; data sent before still counts."""

    connection: int


class Beat(Frame, frozen=True):
    """A heartbeat, without content."""


KINDS: tuple[type[Frame], ...] = (
    Require, Start, Blob, Spawn, Stdin, Credit, Signal, Stop, Suspend, Finish,
    Hello, Lacking, Spawned, SpawnFailed, Output, StdinTaken, Result, Exited, Dying, Cleared,
    Beat, Examine, Examined,
    Survey, Probe, ProbesEnd, Surveyed, Probed, Sweep, StopWorker, Leaving,
    Relay, Relaying, RelayOpen, RelayData, RelayCredit, RelayClose,
    Observe, Observed, TraceSteps, Tracing, Traced, ForeignMpi,
)  # fmt: skip
_CODEC: codec.Codec[Frame] = codec.Codec(Union[KINDS], "frame")


class Noise(msgspec.Struct, frozen=True):
    """Bytes that came before the preamble, or after a stream that never had one."""

    data: bytes


def encode(frame: Frame) -> bytearray:
    """Return the bytes of one frame."""
    return _CODEC.frame(frame)


class Decoder:
    """A decoder from bytes to frames, however the bytes were split.

    Args:
        preamble: the bytes that precede the first frame; empty if there are none.
        mac: checks the tags that follow frames; None if there are no tags.
    """

    def __init__(self, preamble: bytes = b"", mac: Mac | None = None) -> None:
        self._preamble = preamble
        self._buffer = bytearray()  # until the preamble has been seen
        self._sealed = mac is not None
        self._frames = FrameDecoder(MAX_FRAME, "a frame", mac)

    @property
    def opened(self) -> bool:
        """True once the preamble has been seen."""
        return not self._preamble

    @property
    def pending(self) -> bool:
        """True if the beginning of a frame has arrived, but not its rest."""
        return bool(self._buffer) or self._frames.pending

    def feed(self, data: bytes | memoryview) -> list[Frame | Noise]:
        """Return all frames that these bytes complete.

        Raises:
            LaunchError: the bytes are not frames of this protocol.
        """
        items: list[Frame | Noise] = []
        if self._preamble:
            self._buffer += data
            noise = self._take_noise()
            if noise:
                items.append(Noise(noise))
            if self._preamble:
                return items
            data = bytes(self._buffer)
            self._buffer.clear()
        try:
            bodies = self._frames.feed(data)
        except ValueError as error:
            if self._sealed:
                raise LaunchError(str(error)) from error
            raise LaunchError(
                "the stream between launcher and agent contains something that is not a frame; "
                "does anything in the remote shell's start-up files write to standard output in the background?"
            ) from error
        try:
            items += map(_CODEC.decode, bodies)
        except ValueError as error:
            raise LaunchError(
                f"a frame between launcher and agent cannot be read ({error}); "
                "is the same version of hvdgloo installed on all hosts?"
            ) from error
        return items

    def _take_noise(self) -> bytes:
        position = self._buffer.find(self._preamble)
        if position >= 0:
            noise = bytes(self._buffer[:position])
            del self._buffer[: position + len(self._preamble)]
            self._preamble = b""
            return noise
        # The preamble's beginning may be at the end of what has arrived.
        keep = next(
            (n for n in range(min(len(self._preamble), len(self._buffer)), 0, -1)
             if self._buffer.endswith(self._preamble[:n])),
            0,
        )  # fmt: skip
        noise = bytes(self._buffer[: len(self._buffer) - keep])
        del self._buffer[: len(noise)]
        return noise
