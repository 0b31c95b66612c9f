"""What launcher and agent say to each other, as values and as bytes.

They share one byte stream in each direction (a pipe, or what ssh makes of one). A frame is a fixed head, a JSON object
with the frame's fields, and raw bytes if it carries any. The agent opens with a preamble, because login shells like to
print greetings: what comes before it is passed on as ``Noise``, to be shown and not parsed.

This module is pure: nothing here reads or writes. Environments travel inside frames and nowhere else, so that no secret
is ever on a command line.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdgloo.errors import LaunchError

PROTOCOL = 1
"""Raised when frames change their meaning; launcher and agent must agree."""

PREAMBLE = b"\0hvdgloo agent: frames follow\n"  # none of its suffixes is also a prefix of it
MAX_FRAME = 64 * 1024 * 1024
CHUNK = 64 * 1024
"""The maximum number of bytes of output, input or results in one frame."""

STDOUT, STDERR = 1, 2

_HEAD = struct.Struct("!BII")  # kind, bytes of JSON, bytes of data


@dataclass(frozen=True)
class Frame:
    """The base of all frames. A field called ``data`` is sent raw, all others as JSON."""


# From the launcher to an agent.


@dataclass(frozen=True)
class Require(Frame):
    """What workers will need on this host. The answer is ``Lacking``.

    Attributes:
        cwd: their working directory.
        files: relative ones are in ``cwd``.
        programs: likewise, or looked up in ``search_path`` (empty: the host's own).
    """

    cwd: str
    files: Sequence[str] = ()
    programs: Sequence[str] = ()
    search_path: str = ""


@dataclass(frozen=True)
class Start(Frame):
    """The first frame: what all of this host's workers have in common.

    Attributes:
        job_id: carried by every process of the job in ``HVDGLOO_JOB_ID``.
        env: the environment to which each ``Spawn`` adds.
        cwd: working directory of the workers.
        heartbeat_timeout: seconds of silence after which the other side counts as dead.
        grace: seconds between SIGTERM and SIGKILL when the launcher is lost.
        inherit: add ``env``, which comes from another host, to the agent's own environment.
    """

    job_id: str
    env: Mapping[str, str] = field(repr=False)
    cwd: str
    heartbeat_timeout: float
    grace: float
    inherit: bool = False


@dataclass(frozen=True)
class Blob(Frame):
    """A piece of the file that workers spawned with ``task`` may read: the function of ``hvdgloo.run.run``."""

    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Spawn(Frame):
    """Start one worker.

    Attributes:
        rank: identifies it from now on.
        argv: the program and its arguments; a ``task`` gets two additional descriptor numbers (Blob's file, result
            file).
        env: added to the environment of ``Start``.
        stdin: give it a pipe fed by ``Stdin`` frames, instead of /dev/null.
        task: it reads a function from the first descriptor and leaves its result in the second.
    """

    rank: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    stdin: bool = False
    task: bool = False


@dataclass(frozen=True)
class Stdin(Frame):
    """Input for a worker; empty at its end. The next one is sent after ``StdinTaken``."""

    rank: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Credit(Frame):
    """This many bytes of a worker's output have been dealt with; an agent reads no further than WINDOW ahead."""

    rank: int
    amount: int


@dataclass(frozen=True)
class Signal(Frame):
    """Pass a signal on to the workers, and change nothing else."""

    signum: int


@dataclass(frozen=True)
class Stop(Frame):
    """Send ``signum`` to the workers' process groups, and SIGKILL after ``grace`` seconds. Another may speed it up."""

    signum: int
    grace: float


@dataclass(frozen=True)
class Suspend(Frame):
    """The launcher is about to be stopped (Ctrl-Z) or has been resumed: its silence in between means nothing."""

    suspended: bool


@dataclass(frozen=True)
class Examine(Require):
    """Look around on this host, for ``hvdgloo-run doctor``; no job is started. The answer is ``Examined``."""


@dataclass(frozen=True)
class Finish(Frame):
    """The job is over: end every process that is left of it, say ``Bye`` and exit."""


@dataclass(frozen=True)
class Survey(Frame):
    """Report this host's addresses, and get ready to prove being this host at each of them.

    Attributes:
        host: its number among the job's hosts.
        key: the key of all proofs, in hexadecimal digits.
        rules: the user's, for this host's addresses (``hvdgloo.runner.network.interfaces``).
        listen: others will try to reach it.
        port_range: first and last port that may be used.
    """

    host: int
    key: str = field(repr=False)
    rules: Sequence[str]
    listen: bool
    port_range: Sequence[int] | None


@dataclass(frozen=True)
class Probe(Frame):
    """Try these addresses (number of a host, address, port), each for ``timeout`` seconds."""

    targets: Sequence[Sequence[Any]]
    timeout: float


@dataclass(frozen=True)
class ProbesEnd(Frame):
    """The choice has been made: send and answer no more probes."""


@dataclass(frozen=True)
class Serve(Frame):
    """Start a rendezvous server beside the agent, and keep it until the job is over.

    Attributes:
        job_id: as in ``Start``.
        request: what ``hvdgloo.rendezvous._server.sidecar`` is told.
    """

    job_id: str
    request: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True)
class AskServed(Frame):
    """Who has come to the rendezvous server beside the agent? The ``Served`` that answers contains ``asked``."""

    asked: int


@dataclass(frozen=True)
class Sweep(Frame):
    """Instead of ``Start``: end what the lost agent of a job may have left on this host, say ``Bye`` and exit.

    Attributes:
        grace: seconds between SIGTERM and SIGKILL.
    """

    job_id: str
    grace: float


# From an agent to the launcher.


@dataclass(frozen=True)
class Hello(Frame):
    """The first frame: who is there.

    Attributes:
        protocol, version: must equal the launcher's.
        hostname, identity: of the host (see ``hvdgloo.rendezvous._identity``).
        pid: of the agent.
        cores: those that this process may use, given affinity and control groups.
        machine_cores: all those of the machine; 0 if that is not known.
        gpus: those that are visible.
        port: a free one, kept from other jobs, for ``MASTER_PORT``.
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


@dataclass(frozen=True)
class Examined(Frame):
    """What an agent has found on its host.

    Attributes:
        facts: the fields of ``hvdgloo.runner.agent.facts.Facts``.
        asked, answered: this host's clock when the question came and when the answer left, in seconds since 1970.
    """

    facts: Mapping[str, Any]
    asked: float
    answered: float


@dataclass(frozen=True)
class Surveyed(Frame):
    """A host's addresses.

    Attributes:
        addresses: the fields of ``hvdgloo.runner.network.interfaces.Address``, for each.
        ports: address to the port on which it listens for probes.
        failures: address to the reason why nothing listens there.
        port: held for ``MASTER_PORT``, within the range.
        port_failure: why there is none.
    """

    addresses: Sequence[Sequence[Any]]
    ports: Mapping[str, int]
    failures: Mapping[str, str]
    port: int
    port_failure: str = ""


@dataclass(frozen=True)
class Probed(Frame):
    """Probes' results: the fields of ``network.probe``'s ProbeTarget, and those of Answer with the outcome last."""

    answers: Sequence[Sequence[Sequence[Any]]]


@dataclass(frozen=True)
class Served(Frame):
    """A message of the rendezvous server beside the agent; with ``error`` in it, the last one."""

    message: Mapping[str, Any]


@dataclass(frozen=True)
class Lacking(Frame):
    """What is missing of what was required: the working directory itself, or things in it."""

    directory: str = ""
    things: Sequence[str] = ()


@dataclass(frozen=True)
class Spawned(Frame):
    """A worker runs as this process of its host (in the process namespace of its agent)."""

    rank: int
    pid: int


@dataclass(frozen=True)
class SpawnFailed(Frame):
    """A worker could not be started. ``status`` is what a shell would exit with: 127 not found, 126 not executable."""

    rank: int
    reason: str
    status: int


@dataclass(frozen=True)
class Output(Frame):
    """What a worker, or a process that it started, has written to STDOUT or STDERR. More may come after ``Exited``.

    Each byte counts against the worker's WINDOW until ``Credit`` is given for it.
    """

    rank: int
    stream: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class StdinTaken(Frame):
    """A worker's standard input has taken all of the last ``Stdin``, and the next may be sent."""

    rank: int


@dataclass(frozen=True)
class Result(Frame):
    """A piece of what a ``task`` left behind. All pieces come before its ``Exited``."""

    rank: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Exited(Frame):
    """A worker has ended: ``status`` is its exit status, or minus the signal that ended it.

    Output may still follow: that of background processes, and what the launcher has given no credit for yet.
    """

    rank: int
    status: int
    out_of_memory: bool = False


@dataclass(frozen=True)
class Dying(Frame):
    """The agent ends its workers without having been told to, for this reason."""

    reason: str


@dataclass(frozen=True)
class Bye(Frame):
    """The last frame: nothing of the job is left on this host, except the processes ``left`` that withstood SIGKILL."""

    left: Sequence[int] = ()


# In both directions.


@dataclass(frozen=True)
class Beat(Frame):
    """Carries nothing, to show that the sender lives."""


KINDS: tuple[type[Frame], ...] = (
    Require, Start, Blob, Spawn, Stdin, Credit, Signal, Stop, Suspend, Finish,
    Hello, Lacking, Spawned, SpawnFailed, Output, StdinTaken, Result, Exited, Dying, Bye,
    Beat, Examine, Examined,
    Survey, Probe, ProbesEnd, Serve, Surveyed, Probed, Served, Sweep, AskServed,
)  # fmt: skip
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class Noise:
    """Bytes that came before the preamble, or after a stream that never had one."""

    data: bytes


def encode(frame: Frame) -> bytes:
    """The bytes of one frame."""
    fields = {f.name: getattr(frame, f.name) for f in dataclasses.fields(frame)}
    data: bytes = fields.pop("data", b"")
    # Environments may contain any bytes: as surrogates they survive JSON's escapes.
    text = json.dumps(fields, separators=(",", ":")).encode("ascii")
    return _HEAD.pack(_NUMBERS[type(frame)], len(text), len(data)) + text + data


class Decoder:
    """Bytes in, frames out, however the bytes were split.

    Args:
        preamble: what precedes the first frame; empty if frames follow at once.
    """

    def __init__(self, preamble: bytes = b"") -> None:
        self._preamble = preamble
        self._buffer = bytearray()

    @property
    def opened(self) -> bool:
        """Whether the preamble has been seen."""
        return not self._preamble

    def feed(self, data: bytes) -> list[Frame | Noise]:
        """Everything that these bytes complete.

        Raises:
            LaunchError: they are not frames of this protocol.
        """
        self._buffer += data
        items: list[Frame | Noise] = []
        if self._preamble:
            noise = self._take_noise()
            if noise:
                items.append(Noise(noise))
            if self._preamble:
                return items
        while (frame := self._take_frame()) is not None:
            items.append(frame)
        return items

    def rest(self) -> bytes:
        """What remains when the stream has ended: noise, or the beginning of a frame."""
        return bytes(self._buffer)

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

    def _take_frame(self) -> Frame | None:
        if len(self._buffer) < _HEAD.size:
            return None
        number, text_length, data_length = _HEAD.unpack_from(self._buffer)
        if number >= len(KINDS) or text_length + data_length > MAX_FRAME:
            raise LaunchError(
                "the stream between launcher and agent holds something that is no frame; "
                "does anything in the remote shell's start-up files write to standard output in the background?"
            )
        end = _HEAD.size + text_length + data_length
        if len(self._buffer) < end:
            return None
        text = bytes(self._buffer[_HEAD.size : _HEAD.size + text_length])
        data = bytes(self._buffer[_HEAD.size + text_length : end])
        del self._buffer[:end]
        return _build(KINDS[number], text, data)


def _build(kind: type[Frame], text: bytes, data: bytes) -> Frame:
    try:
        fields = json.loads(text)
        if any(f.name == "data" for f in dataclasses.fields(kind)):
            fields["data"] = data
        return kind(**fields)
    except (ValueError, TypeError) as error:
        raise LaunchError(
            f"a {kind.__name__} frame between launcher and agent cannot be read ({error}); "
            "is the same version of hvdgloo installed on all hosts?"
        ) from error
