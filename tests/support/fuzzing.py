"""Malformed inputs for everything that reads what others have written.

``TARGETS`` are the readers. Each input follows from the target's name, a seed and a number, so one that does harm can
be reproduced from these three; ``Harmful`` says how. The suite tries some of each kind
(``tests/unit/benchmarks/test_fuzz.py``), and ``benchmarks/fuzz.py`` as many as there is time for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, TypeVar, cast
from unittest.mock import patch

from hvdgloo._engine import messages
from hvdgloo._net import handshake
from hvdgloo._net.proofs import NONCE_BYTES, PROOF_BYTES
from hvdgloo.config import Config, settings, unknown_variables
from hvdgloo.errors import AuthenticationError, ConfigError, HvdglooError, LaunchError
from hvdgloo.rendezvous import RendezvousServer
from hvdgloo.rendezvous._elastic import messages as elastic
from hvdgloo.rendezvous._elastic.events import Gone, Rules
from hvdgloo.rendezvous._membership.admission import NotAcceptedError
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from hvdgloo.rendezvous._server.epochs import NotYet
from hvdgloo.rendezvous._server.pauses import Steps
from hvdgloo.runner.cli import config_file
from hvdgloo.runner.cli.flags import build_parser
from hvdgloo.runner.cli.main import command_line, split_all
from hvdgloo.runner.inbound.hello import TaskHello, admit, introduce
from hvdgloo.runner.job import hostlist
from hvdgloo.runner.network import probe
from hvdgloo.runner.protocol import frames
from hvdgloo.types import Collective, DType, ReduceOp, TensorSpec
from tests.support.rendezvous import SECRET, RawClient, info

T = TypeVar("T")

SLOWEST = 5.0
"""Seconds of processor time that reading one input may take."""


@dataclass(frozen=True)
class Target:
    """Something that reads.

    Attributes:
        make: an input; its representation must say all about it.
        reading: gives, for as long as its context lasts, a function that reads an input, and raises if that does harm.
        some: how many inputs take about a second.
    """

    make: Callable[[Random], Any]
    reading: Callable[[], AbstractContextManager[Callable[[Any], None]]]
    some: int


class Harmful(AssertionError):  # noqa: N818 - an input, not an error
    """An input that did harm; the cause is what it has raised."""

    def __init__(self, name: str, seed: int, number: int, given: object, error: BaseException) -> None:
        super().__init__(
            f"{name}: {type(error).__name__}: {error}\ninput: {given!r}\n"
            f"again: python benchmarks/fuzz.py --target {name} --seed {seed} --only {number}"
        )


def fuzz(name: str, seed: int, numbers: Iterable[int], until: float = float("inf")) -> int:
    """Have a target read inputs; returns how many it has read.

    Args:
        numbers: which ones.
        until: a time on the monotonic clock to stop at.

    Raises:
        Harmful: one has raised what it must not, or has taken too long.
    """
    target, read = TARGETS[name], 0
    with target.reading() as reader:
        for number in numbers:
            if time.monotonic() >= until:
                break
            given = target.make(Random(f"{name} {seed} {number}"))
            began = time.process_time()  # whatever else the machine does meanwhile
            try:
                reader(given)
                taken = time.process_time() - began
                assert taken < SLOWEST, f"it took {taken:.1f} s of processor time"
            except Exception as error:
                raise Harmful(name, seed, number, given, error) from error
            read += 1
    return read


# How inputs are made.

ODD_TEXTS = (
    "", " ", "\0", "\n", "\r\n", "\t", "\x1b[2J", "\x85", "\u2028", "\ud800", "\udcff", "é", "٣", "²", "\uff11",
    "-", "--", "-1", "+1", "0", "00", "1_000", "0x10", "1e3", "1e400", "-0.0", "nan", "inf", "True", "null", "~", "%s",
    "{}", "${HOME}", "`id`", "$(id)", "'", '"', "\\", "/", "..", "#", ":", ",", ";", "=", "[", "]", "@", "*", "&", "!",
    "9" * 30, "9" * 5000, "x" * 300,
)  # fmt: skip
"""Texts that readers have stumbled over."""


def odd_text(random: Random, words: Sequence[str]) -> str:
    """Some words and odd texts in a row."""
    return "".join(
        random.choice(words if random.random() < 0.7 else ODD_TEXTS) for _ in range(random.choice((1, 1, 1, 2, 3, 5)))
    )


def mutated(random: Random, data: bytes) -> bytes:
    """The bytes with a few of them changed, cut out, repeated or put in."""
    changed = bytearray(data)
    for _ in range(random.choice((0, 1, 1, 1, 2, 4, 16))):
        at = random.randrange(len(changed) + 1)
        length = random.choice((1, 1, 2, 4, 8, 40))
        kind = random.randrange(6)
        if kind == 0:
            del changed[at : at + length]
        elif kind == 1:
            changed[at:at] = random.randbytes(length)
        elif kind == 2:
            changed[at:at] = changed[at : at + length] * random.choice((1, 2, 100))
        elif kind == 3:
            changed[at : at + length] = random.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * length
        elif kind == 4:
            changed[at : at + 1] = random.choice(
                (b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\x7f")
            )
        elif changed:
            changed[at % len(changed)] ^= 1 << random.randrange(8)
    return bytes(changed)


def pieces(random: Random, data: bytes) -> list[bytes]:
    """The same bytes as they may arrive."""
    cuts = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((0, 1, 3, 10))))
    return [data[begin:end] for begin, end in itertools.pairwise((0, *cuts, len(data)))]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _one_line(error: HvdglooError) -> None:
    """Check that an error about an input has one line, however the input looks."""
    text = str(error)
    assert len(text.splitlines()) == 1, f"an error of several lines: {text!r}"
    assert text.isprintable() or not any(ord(letter) < 32 for letter in text), f"control characters: {text!r}"


# Frames between launcher and agents.

_FRAMES: tuple[frames.Frame, ...] = (
    frames.Require("/somewhere", ("a", "b"), ("python",), "/bin"),
    frames.Start("job.0", {"A": "1", "B": "\udcff"}, "/", 30.0, 30.0, 3.0, inherit=True),
    frames.Blob(bytes(range(256))),
    frames.Spawn(3, ["python", "train.py"], {"RANK": "3"}, stdin=True),
    frames.Output(3, frames.STDOUT, b"epoch 1\n" * 20),
    frames.Exited(3, -9, account="the kernel ended it"),
    frames.Sweep("job.1", 3.0),
    frames.Cleared([1, 2, 3]),
    frames.Beat(),
)


def _stream_of_frames(random: Random) -> tuple[bytes, list[bytes]]:
    preamble = random.choice((b"", frames.PREAMBLE))
    whole = preamble + b"".join(frames.encode(random.choice(_FRAMES)) for _ in range(random.randrange(1, 4)))
    return preamble, pieces(random, mutated(random, whole))


def _read_frames(given: tuple[bytes, list[bytes]]) -> None:
    preamble, stream = given
    decoder = frames.Decoder(preamble)
    with contextlib.suppress(LaunchError):
        for piece in stream:
            for frame in decoder.feed(piece):
                assert isinstance(frame, (frames.Frame, frames.Noise)), frame


# Control messages, and others that are encoded like them.

_REQUEST = messages.Request(
    "gradient/fc.weight",
    Collective.ALLREDUCE,
    (TensorSpec(DType.FLOAT32, (3, 4), "cpu"),),
    ReduceOp.SUM,
    1.0,
    0.5,
    -1,
    0,
    (),
)
_MESSAGES: tuple[messages.Message, ...] = (
    messages.Submit((1, 2, 3, 9), (_REQUEST,), b"payload", False),
    messages.Execute((7, 8, messages.Response(_REQUEST, ((1, 2),), "", 0)), (4,), ((0, b"x"),)),
    messages.Resend((5, 6)),
    messages.Failed("it broke"),
    messages.Stacks('File "train.py", line 3'),
    messages.Abort("PeerLostError", "rank 1 was lost", 1),
    messages.Ping(),
)
_OTHERS: tuple[tuple[Callable[[bytes], object], bytes], ...] = (
    (handshake._ANSWER.decode, handshake._ANSWER.encode(handshake._Answer(1.5, {"shm_segment": 1, "list": [1, "a"]}))),
)


def _control_message(random: Random) -> tuple[int, bytes]:
    kind = random.randrange(2 * len(_OTHERS))
    if kind < len(_OTHERS):
        return kind, mutated(random, _OTHERS[kind][1])
    return kind, mutated(random, messages.encode(random.choice(_MESSAGES)))


def _read_control_message(given: tuple[int, bytes]) -> None:
    kind, data = given
    with contextlib.suppress(ValueError):
        if kind < len(_OTHERS):
            _OTHERS[kind][0](data)
        else:
            messages.encode(messages.decode(data))


# Probes.

_PROBE_KEY, _NONCE = probe.probe_key(SECRET), bytes(16)
_TARGET = probe.ProbeTarget(1, "10.0.0.1", 4711)


def _probe(random: Random) -> tuple[bytes, bytes]:
    asked = probe.question(_PROBE_KEY, _NONCE, _TARGET)
    reply = probe.answer(_PROBE_KEY, asked, 1, "10.0.0.1")
    assert reply is not None
    return tuple(mutated(random, data).ljust(len(data), b"\0")[: len(data)] for data in (asked, reply))  # type: ignore[return-value]


def _read_probe(given: tuple[bytes, bytes]) -> None:
    asked, reply = given
    real = probe.question(_PROBE_KEY, _NONCE, _TARGET)
    known = probe.answer(_PROBE_KEY, asked, 1, "10.0.0.1")
    assert (known is not None) == (asked == real), "only who knows the secret is answered"
    verdict = probe.judge(_PROBE_KEY, _NONCE, _TARGET, reply, "10.0.0.2")
    if reply != probe.answer(_PROBE_KEY, real, 1, "10.0.0.1"):
        assert verdict.outcome is probe.ProbeResult.STRANGER


# Agents that come by themselves.


class _Said:
    """A socket on which one side has said all that it will ever say."""

    def __init__(self, data: bytes) -> None:
        self.heard = b""
        self._rest = data

    family = socket.AF_INET

    def setsockopt(self, *_: int) -> None: ...

    def settimeout(self, _: float) -> None: ...

    def recv(self, count: int) -> bytes:
        piece, self._rest = self._rest[:count], self._rest[count:]
        return piece

    def send(self, data: bytes) -> int:
        self.heard += data
        return len(data)

    def sendall(self, data: bytes) -> None:
        self.heard += data


def _meet(data: bytes) -> tuple[TaskHello | None, bytes]:
    """Return a launcher's verdict on a task that sends this, and its answer."""
    sock = _Said(data)
    try:
        with patch.object(handshake, "new_nonce", lambda: bytes(NONCE_BYTES)):
            next(admit(SECRET, cast("socket.socket", sock)))
    except StopIteration as done:
        return cast("TaskHello", done.value[1]), sock.heard
    except (AuthenticationError, EOFError):
        pass
    return None, sock.heard


@cache
def _good_arrival() -> bytes:
    told = _meet(handshake._HELLO.pack(handshake._MAGIC, bytes(handshake._CLAIM.size), bytes(NONCE_BYTES)))[1]
    sock = _Said(told)
    with contextlib.suppress(EOFError), patch.object(handshake, "new_nonce", lambda: bytes(NONCE_BYTES)):
        introduce(SECRET, cast("socket.socket", sock), TaskHello(3, "1.0", "3.11"), float("inf"))
    return sock.heard


def _arrival(random: Random) -> bytes:
    return mutated(random, _good_arrival())


def _read_arrival(given: bytes) -> None:
    good = _good_arrival()
    came, told = _meet(given)
    assert (came is not None) == given.startswith(good), "only who knows the secret is let in"
    assert len(told) in (0, NONCE_BYTES + PROOF_BYTES), "a stranger is told a number and a proof, and no more"


# Hosts.

_HOST_WORDS = (
    "h1", "h2", "user@h3", "10.0.0.1", "[fd00::1]", "fd00::1", ":4", ":0", " slots=4", " max_slots=8", " slots = 2",
    ",", " ", "\n", "# a comment\n", "slots", "=", "%eth0", "node-[1-3]", "a.b.c", "-oProxyCommand=x", "\r\n",
)  # fmt: skip


def _hosts(random: Random) -> tuple[str, bytes]:
    text = "".join(odd_text(random, _HOST_WORDS) for _ in range(random.randrange(1, 8)))
    data = text.encode("utf-8", "surrogatepass")
    return text, data if random.random() < 0.8 else mutated(random, data)


@contextmanager
def _reading_hosts() -> Iterator[Callable[[tuple[str, bytes]], None]]:
    def read(given: tuple[str, bytes]) -> None:
        text, data = given
        path.write_bytes(data)
        for parse, source in ((hostlist.parse_hosts, text), (hostlist.read_hostfile, str(path))):
            try:
                found = parse(source)
            except ConfigError as error:
                _one_line(error)
                continue
            for host in found:
                assert host.name, found
                assert host.slots is None or host.slots >= 1, found
                for part in (host.name, host.user):
                    assert not part.startswith("-"), found
                    assert not any(letter.isspace() or ord(letter) < 33 for letter in part), found

    with _folder() as folder:
        path = folder / "hosts"
        yield read


# Configuration files.

_YAML_WORDS = (
    *sorted({setting.yaml.partition(".")[0] for setting in settings().values() if setting.yaml}),
    *sorted({setting.yaml.rpartition(".")[2] for setting in settings().values() if setting.yaml}),
    "hosts", "np", "verbose", "controller", "gloo", "true", "false", "1", "2.5", "a: b", "? ", "- ", "{", "}", "[", "]",
    "&a ", "*a", "<<: ", "!!python/object/apply:os.system ", "!!binary ", "|", ">", "---", "...", "%YAML 1.1", "# x",
    "2001-01-01", "0o7", "0b1", "1:30", ".inf", ".nan",
)  # fmt: skip


def _yaml(random: Random) -> bytes:
    if random.random() < 0.02:
        deep = random.choice((100, 3000, 100_000))
        return (random.choice("[{") * deep).encode() if random.random() < 0.5 else ("- " * deep + "a").encode()
    lines = []
    for _ in range(random.randrange(1, 6)):
        indent = random.choice(("", "", "  ", "  ", "    ", "\t"))
        mark = random.choice((": ", ": ", ": ", ":", ":\n  ", " "))
        lines.append(indent + odd_text(random, _YAML_WORDS) + mark + odd_text(random, _YAML_WORDS))
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return data if random.random() < 0.8 else mutated(random, data)


@contextmanager
def _reading_yaml() -> Iterator[Callable[[bytes], None]]:
    parser = build_parser()

    def read(given: bytes) -> None:
        path.write_bytes(given)
        try:
            content = config_file.read(str(path), parser)
        except ConfigError as error:
            _one_line(error)
            return
        assert all(isinstance(value, str) for value in content.environ.values()), content
        with contextlib.suppress(ConfigError):
            Config.from_env(content.environ)

    with _folder() as folder:
        path = folder / "config.yaml"
        yield read


# Command lines.


def _command_line(random: Random) -> list[str]:
    flags = list(_parser().values)
    words = (*flags, "train.py", "true", "doctor", "--", "2", "0.5", "h1:1", "localhost:2", "a=b", "=", "timeline", "/")
    return [odd_text(random, words) for _ in range(random.randrange(1, 8))]


_PARSERS: list[Any] = []


def _parser() -> Any:
    if not _PARSERS:
        _PARSERS.append(build_parser())
    return _PARSERS[0]


def _read_command_line(given: list[str]) -> None:
    parser = _parser()
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
        try:
            flags, command, doctor = split_all(given, parser.values)
            command_line(parser, parser.given(flags), command, doctor=doctor)
        except SystemExit as ended:
            if ended.code != 0:  # as it is for --help
                raise
        except ConfigError:
            pass  # which is printed


# The environment.

_VALUES = (
    "1",
    "0",
    "0.5",
    "true",
    "auto",
    "gloo",
    "shm",
    "h1:4711",
    "[::1]:80",
    "127.0.0.1",
    "2000-3000",
    "/tmp/x",
    "debug",
)


def _environment(random: Random) -> dict[str, str]:
    known = [name for setting in settings().values() for name in (setting.env, *setting.fallback)]
    names = [random.choice(known) if random.random() < 0.9 else "HVDGLOO_" + odd_text(random, known) for _ in range(4)]
    return {name: odd_text(random, _VALUES) for name in names}


def _read_environment(given: Mapping[str, str]) -> None:
    for line in unknown_variables(given):
        assert line
    try:
        Config.from_env(given)
    except ConfigError as error:
        _one_line(error)


# Requests to the rendezvous service.

_TARGETS = ("/v1/kv/scope/key", "/v1/kv/scope", "/v1/epochs/0/workers", "/v1/status", "/metrics", "/", "/v1/hello")
_QUERIES = (
    "",
    "?timeout=0",
    "?timeout=0.01",
    "?timeout=nan",
    "?timeout=-1",
    "?timeout=1e9",
    "?x",
    "?timeout=0&timeout=1",
)
_METHODS = ("GET", "PUT", "POST", "DELETE", "HEAD", "OPTIONS", "get", "BREW", "CONNECT")
_BODIES = (
    b"",
    b"value",
    b"\x80\x04N.",
    b"{}",
    b"[]",
    b"null",
    json.dumps(info(rank=0).to_dict()).encode(),
    b"9" * 5000,
)


@dataclass(frozen=True)
class _Asked:
    """A request before it is signed: signatures, and so the bytes sent, differ from server to server.

    Attributes:
        head_seed: of the mutation of the signed head; None to leave it as it is.
        headers: added to the head.
    """

    method: str
    target: str
    body: bytes
    head_seed: int | None
    headers: tuple[tuple[str, str], ...]


def _request(random: Random) -> _Asked:
    target = random.choice(_TARGETS)
    if random.random() < 0.3:
        target += "/" + random.choice(("%00", "%2F", "%ff", "..", "é", "a" * 300, "//", "%", "x/y/z", "-1", "9" * 40))
    headers = []
    if random.random() < 0.3:
        name = random.choice(
            ("Content-Length", "Transfer-Encoding", "Expect", "Connection", "Host", "Authorization", "X")
        )
        headers.append(
            (
                name,
                random.choice(("0", "-1", "+5", "5, 5", "9" * 20, "chunked", "100-continue", "close", "", "x" * 9000)),
            )
        )
    return _Asked(
        random.choice(_METHODS[:4] if random.random() < 0.8 else _METHODS),
        target + random.choice(_QUERIES),
        mutated(random, random.choice(_BODIES)),
        random.randrange(1 << 30) if random.random() < 0.4 else None,
        tuple(headers),
    )


class _Errors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@contextmanager
def _asking() -> Iterator[Callable[[_Asked], None]]:
    """A server, which is to serve the next client as if nothing had happened."""
    errors, logger = _Errors(), logging.getLogger("hvdgloo")

    def ask(asked: _Asked) -> None:
        target = asked.target.encode("utf-8").decode("latin-1")
        head = client.head(asked.method, target, asked.body)
        extra = "".join(f"{name}: {value}\r\n" for name, value in asked.headers).encode("latin-1")
        head = head[:-2] + extra + b"\r\n"
        if asked.head_seed is not None:
            head = mutated(Random(asked.head_seed), head)
        with socket.create_connection((client.host, client.port), timeout=SLOWEST) as sock:
            with contextlib.suppress(ConnectionError):  # refused before everything was sent
                sock.sendall(head + asked.body)
                sock.shutdown(socket.SHUT_WR)
            for status in _statuses(sock):
                assert status < 500 or status in (501, 505), status
        assert client.request("PUT", "/v1/kv/fuzz/alive", b"yes") == (204, b"")
        assert not errors.texts, errors.texts

    with RendezvousServer(secret=SECRET, hosts=[("h", 2)]) as server:
        client = RawClient(server.endpoint, server.status()["run"])
        logger.addHandler(errors)
        try:
            yield ask
        finally:
            logger.removeHandler(errors)


def _statuses(sock: socket.socket) -> Iterator[int]:
    """The status of each answer until the server closes the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := sock.recv(1 << 16):
            received += piece
    for line in bytes(received).split(b"\r\n"):
        if line.startswith(b"HTTP/1."):
            yield int(line.split()[1])


# What workers of an elastic job say.


def _elastic_message(random: Random) -> tuple[int, str, bytes]:
    worker, odd = f"w{random.randrange(3)}", random.random() < 0.05
    client = "another" if odd else worker
    told = info(host_identity=worker, pid=7 if odd else 1, rank=random.choice((None, 0, 1))).to_dict()
    place = elastic.CurrentEpoch(random.randrange(4), random.randrange(4), random.randrange(1, 4), True, told)
    kind = random.randrange(40)
    if kind > 1:
        kind = kind % 3 + 2
    data = b""
    if kind == 2:
        after, serial = random.randrange(-1, 4), random.randrange(-1, 4)
        accused = [random.randrange(4) for _ in range(random.randrange(3))]
        data = elastic.REGISTER.encode(
            elastic.Register(worker, after, random.random() < 0.7, serial, "", "", accused, random.random(), told)
        )
    elif kind == 3:
        what = random.choice(list(elastic.Progress))
        data = elastic.REPORT.encode(elastic.Report(worker, what, random.randrange(-1, 4), place))
    elif kind == 4:
        data = elastic.LISTEN.encode(elastic.Listen(worker, random.randrange(-1, 9), random.choice((None, place))))
    return kind, client, mutated(random, data) if random.random() < 0.3 else data


@contextlib.contextmanager
def _telling() -> Iterator[Callable[[tuple[int, str, bytes]], None]]:
    """A job without a launcher, which hears all of them; after its end, or a restart of its server, another one.

    What it hears is, by number: 0 a restart; 1 that the worker of this client has gone; 2 to 4 its messages.
    """
    rules = Rules(size=2, smallest=1, launched=False)
    epochs = ElasticEpochs(rules)

    def wait(steps: Steps[bytes | NotYet] | Steps[bytes]) -> None:
        with contextlib.suppress(StopIteration):
            next(steps)
            steps.send(False)

    def read(given: tuple[int, str, bytes]) -> None:
        nonlocal epochs
        kind, client, data = given
        with contextlib.suppress(ValueError, NotAcceptedError):
            if kind == 1:
                epochs.feed(Gone(client, None, "has lost its connection"))
            elif kind == 2:
                wait(epochs.ask(client, elastic.REGISTER.decode(data), timeout=0))
            elif kind == 3:
                epochs.report(client, elastic.REPORT.decode(data))
            elif kind == 4:
                wait(epochs.news(client, elastic.LISTEN.decode(data), timeout=0))
        if kind == 0 or epochs.status()["elastic"]["phase"] in ("over", "failed"):
            epochs = ElasticEpochs(rules)

    yield read


TARGETS: dict[str, Target] = {
    "frames": Target(_stream_of_frames, lambda: nullcontext(_read_frames), 8000),
    "control": Target(_control_message, lambda: nullcontext(_read_control_message), 20000),
    "probes": Target(_probe, lambda: nullcontext(_read_probe), 10000),
    "arrivals": Target(_arrival, lambda: nullcontext(_read_arrival), 4000),
    "hosts": Target(_hosts, _reading_hosts, 800),
    "yaml": Target(_yaml, _reading_yaml, 100),
    "commands": Target(_command_line, lambda: nullcontext(_read_command_line), 60),
    "environment": Target(_environment, lambda: nullcontext(_read_environment), 250),
    "requests": Target(_request, _asking, 500),
    "elastic": Target(_elastic_message, _telling, 5000),
}
