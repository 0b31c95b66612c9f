"""The start of control connections: the admission of peers, and the refusal of others at no cost for the former."""

from __future__ import annotations

import errno
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from hvdgloo._net import handshake as connect
from hvdgloo._net.frame_mac import FrameMac
from hvdgloo._net.handshake import Handshake, Link, listen
from hvdgloo._net.proofs import prove
from hvdgloo.errors import ConnectError

HELLO = struct.Struct("!8sIII16s")
Accepted = dict[int, Link]


def describe(rank: int) -> str:
    return f"rank {rank} (h{rank})"


class Meeting:
    """Rank 0's side in a thread, on loopback."""

    def __init__(self, size: int, timeout: float, handshake: Handshake, settings: dict[str, Any]) -> None:
        self.listener = listen("127.0.0.1", None)
        self.address, self.port = self.listener.getsockname()[:2]
        self.sockets: list[socket.socket] = []
        self.links: list[Link] = []
        self._pool = ThreadPoolExecutor(8)
        self.accepted: Future[Accepted] = self._pool.submit(
            handshake.accept_all, self.listener, range(1, size), settings, timeout, describe
        )

    def join(self, rank: int, handshake: Handshake, timeout: float = 10.0) -> Future[dict[str, Any]]:
        def connect() -> dict[str, Any]:
            link, settings = handshake.connect(self.address, self.port, rank, timeout, describe)
            self.sockets.append(link.sock)
            self.links.append(link)
            return settings

        return self._pool.submit(connect)

    def raw(self, data: bytes = b"") -> socket.socket:
        sock = socket.create_connection((self.address, self.port), 10)
        self.sockets.append(sock)
        sock.sendall(data)
        return sock

    def close(self) -> None:
        self._pool.shutdown()  # first: who is about to join adds another socket
        for sock in self.sockets:
            sock.close()
        if self.accepted.exception() is None:
            for link in self.accepted.result().values():
                link.sock.close()
        self.listener.close()


@pytest.fixture
def meeting() -> Iterator[Callable[..., Meeting]]:
    meetings: list[Meeting] = []

    def make(size: int = 2, timeout: float = 10.0, handshake: Handshake | None = None, **settings: Any) -> Meeting:
        meetings.append(Meeting(size, timeout, handshake or RIGHT, settings))
        return meetings[-1]

    yield make
    for made in meetings:
        made.close()


RIGHT = Handshake(b"secret", 3, 1)
WRONG = {
    "secret": Handshake(b"another", 3, 1),
    "epoch": Handshake(b"secret", 4, 1),
    "generation": Handshake(b"secret", 3, 2),
    "purpose": Handshake(b"secret", 3, 1, "shared memory connection"),
}


def ended(sock: socket.socket) -> bool:
    """True once the peer has closed the connection."""
    sock.settimeout(10)
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_every_rank_is_let_in_and_told_the_settings(meeting: Callable[..., Meeting]) -> None:
    m = meeting(4, threshold=7, name="x")
    joined = [m.join(rank, RIGHT) for rank in (3, 1, 2)]
    accepted = m.accepted.result(10)
    assert sorted(accepted) == [1, 2, 3]
    told = [future.result(10) for future in joined]
    assert all(abs(settings.pop("clock_offset")) < 5 for settings in told)  # one clock, and a busy machine
    assert told == [{"threshold": 7, "name": "x"}] * 3
    for link in accepted.values():
        assert link.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_connections_belong_to_their_ranks(meeting: Callable[..., Meeting]) -> None:
    m = meeting(3)
    for rank in (2, 1):
        m.join(rank, RIGHT).result(10)
    accepted = m.accepted.result(10)
    for rank, sock in zip((2, 1), m.sockets, strict=True):
        sock.sendall(bytes([rank]))
        assert accepted[rank].sock.recv(1) == bytes([rank])


def test_alone_no_rank_is_waited_for(meeting: Callable[..., Meeting]) -> None:
    assert meeting(1).accepted.result(5) == {}


@pytest.mark.parametrize("what", WRONG)
def test_a_stranger_is_refused_and_the_right_one_let_in(what: str, meeting: Callable[..., Meeting]) -> None:
    m = meeting(2)
    with pytest.raises(ConnectError, match=r"rank 1 \(h1\) could not connect to rank 0 \(h0\) at 127.0.0.1") as caught:
        m.join(1, WRONG[what]).result(10)
    assert (caught.value.rank, caught.value.address) == (0, "127.0.0.1")
    assert not m.accepted.done()
    m.join(1, RIGHT).result(10)
    assert list(m.accepted.result(10)) == [1]


def test_a_member_does_not_talk_to_a_listener_without_the_secret(meeting: Callable[..., Meeting]) -> None:
    """It notices before it proves anything itself."""
    m = meeting(2, timeout=1.0, handshake=WRONG["secret"])
    with pytest.raises(ConnectError, match="does not know this job's secret"):
        m.join(1, RIGHT).result(10)


def test_no_secret_in_any_text(meeting: Callable[..., Meeting]) -> None:
    secret = b"s3cr3t-of-the-job"
    m = meeting(2, timeout=0.3, handshake=Handshake(secret, 0, 0))
    with pytest.raises(ConnectError) as member:
        m.join(1, RIGHT).result(10)
    with pytest.raises(ConnectError) as coordinator:
        m.accepted.result(10)
    for error in (member.value, coordinator.value):
        assert "s3cr3t" not in str(error)
        assert "s3cr3t" not in repr(vars(error))


@pytest.mark.parametrize("rank", [0, 2, 7, (1 << 32) - 1])
def test_a_rank_out_of_range_is_refused(rank: int, meeting: Callable[..., Meeting]) -> None:
    m = meeting(2)
    with pytest.raises(ConnectError, match="closed during the handshake"):
        m.join(rank, RIGHT).result(10)
    m.join(1, RIGHT).result(10)
    assert list(m.accepted.result(10)) == [1]


def test_a_rank_that_comes_twice_keeps_its_first_connection(meeting: Callable[..., Meeting]) -> None:
    m = meeting(3)
    m.join(1, RIGHT).result(10)
    first = m.sockets[-1]
    with pytest.raises(ConnectError):
        m.join(1, RIGHT).result(10)
    m.join(2, RIGHT).result(10)
    accepted = m.accepted.result(10)
    accepted[1].sock.sendall(b"!")
    first.settimeout(10)
    assert first.recv(1) == b"!"


def test_a_replayed_handshake_proves_nothing(meeting: Callable[..., Meeting]) -> None:
    """Data that was overheard in one handshake does not open another one."""
    seen = bytearray()

    class Spy(Handshake):
        def introduce(self, sock: socket.socket, *rest: Any) -> Any:
            class Recording:
                def sendall(self, data: bytes) -> None:
                    seen.extend(data)
                    sock.sendall(data)

                def __getattr__(self, name: str) -> Any:
                    return getattr(sock, name)

            return super().introduce(Recording(), *rest)  # type: ignore[arg-type]

    m = meeting(2)
    m.join(1, Spy(b"secret", 3, 1)).result(10)
    assert list(m.accepted.result(10)) == [1]
    assert len(seen) == HELLO.size + 32
    again = meeting(2)
    assert ended(again.raw(bytes(seen)))
    assert not again.accepted.done()
    again.join(1, RIGHT).result(10)
    again.accepted.result(10)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"\x7f\xff\xff\xff", "too long"),
        (b"\0\0\0\2{}", "not an answer to a handshake"),
        (b"\0\0\0\x03\x92\xa0\x80", "Expected `float`"),
        (b"\0\0\0\x09more", "closed"),
        (b"\0\0\0\x02{}" + bytes(16), "the answer of rank 0 has a wrong signature"),
    ],
    ids=["too long", "JSON", "no clock", "cut off", "not signed"],
)
def test_an_answer_that_is_none_fails_the_connection(
    answer: bytes, problem: str, meeting: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has proved itself, and then says something else than its settings."""

    class Odd(Handshake):
        def introduce(self, sock: socket.socket, *rest: Any) -> Any:
            pieces = bytearray(answer)
            proof = 16 + 32
            if len(answer) in (6, 7):  # else it would be refused for its tag
                monkeypatch.setattr(FrameMac, "check", lambda *_: None)
                pieces += bytes(16)

            class Replacing:
                def recv(self, count: int) -> bytes:
                    nonlocal proof
                    if proof:
                        piece = sock.recv(min(count, proof))
                        proof -= len(piece)
                    else:
                        piece = bytes(pieces[:count])
                        del pieces[:count]
                    return piece

                def __getattr__(self, name: str) -> Any:
                    return getattr(sock, name)

            return super().introduce(Replacing(), *rest)  # type: ignore[arg-type]

    with pytest.raises(ConnectError, match=problem):
        meeting(2).join(1, Odd(b"secret", 3, 1)).result(10)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: somewhere.example\r\nUser-Agent: a scanner\r\n\r\n",
        b"\0" * 100,
        HELLO.pack(b"hvdgloo3", 3, 1, 1, b"n" * 16) + b"\0" * 32,
    ],
    ids=["http", "zeros", "guessed proof"],
)
def test_garbage_is_refused(data: bytes, meeting: Callable[..., Meeting]) -> None:
    m = meeting(2)
    sock = m.raw(data)
    assert ended(sock)
    m.join(1, RIGHT).result(10)
    assert list(m.accepted.result(10)) == [1]


def test_an_earlier_protocol_is_not_answered(meeting: Callable[..., Meeting]) -> None:
    """Its proofs would be taken for a stranger's, who does not know the secret."""
    m = meeting(2)
    sock = m.raw(HELLO.pack(b"hvdgloo1", 3, 1, 1, b"n" * 16))
    sock.settimeout(10)
    assert sock.recv(1) == b""
    m.join(1, RIGHT).result(10)
    m.accepted.result(10)


def test_who_connects_and_goes_costs_nothing(meeting: Callable[..., Meeting]) -> None:
    m = meeting(2)
    for data in (b"", b"hvdgloo3"):
        m.raw(data).close()
    m.join(1, RIGHT).result(10)
    m.accepted.result(10)


def test_silent_clients_keep_no_rank_waiting(meeting: Callable[..., Meeting]) -> None:
    """A port scanner's open connection must not hold up the start of a job that is complete."""
    m = meeting(3)
    silent = [m.raw(), m.raw(b"hvdgloo3"), m.raw(HELLO.pack(b"hvdgloo2", 3, 1, 2, b"n" * 16))]
    begin = time.monotonic()
    for rank in (1, 2):
        m.join(rank, RIGHT)
    assert sorted(m.accepted.result(10)) == [1, 2]
    assert time.monotonic() - begin < 2.0
    for sock in silent:
        assert ended(sock)


def test_a_client_that_drips_is_cut_off(meeting: Callable[..., Meeting]) -> None:
    """The handshake has one deadline, not one for each piece."""
    m = meeting(2, handshake=Handshake(b"secret", 3, 1, proof_timeout=0.3))
    sock = m.raw()
    sock.settimeout(0.05)
    begin = time.monotonic()
    cut_off = False
    for byte in HELLO.pack(b"hvdgloo3", 3, 1, 1, b"n" * 16):
        try:
            sock.sendall(bytes([byte]))
            cut_off = sock.recv(1) == b""
        except TimeoutError:
            continue
        except OSError:
            cut_off = True
        if cut_off:
            break
    assert cut_off
    assert time.monotonic() - begin < 1.5
    m.join(1, RIGHT).result(10)
    m.accepted.result(10)


def test_more_silent_clients_than_there_are_slots(meeting: Callable[..., Meeting]) -> None:
    """The oldest silent visitor gives way, long before its time is over."""
    m = meeting(3, handshake=Handshake(b"secret", 3, 1, most_visitors=20, grace=0.05))
    silent = [m.raw() for _ in range(60)]
    begin = time.monotonic()
    for rank in (1, 2):
        m.join(rank, RIGHT).result(10)
    m.accepted.result(10)
    assert time.monotonic() - begin < 2.0  # each of them would have had 5 s
    assert all(map(ended, silent))


def test_200_silent_clients_do_not_delay_the_start(meeting: Callable[..., Meeting]) -> None:
    m = meeting(2)
    for number in range(200):
        m.raw(HELLO.pack(b"hvdgloo3", 3, 1, 1, b"n" * 16) if number % 2 else b"")
    begin = time.monotonic()
    m.join(1, RIGHT).result(10)
    m.accepted.result(10)
    assert time.monotonic() - begin < 1.0


def test_a_visitor_has_a_moment_however_many_come(meeting: Callable[..., Meeting]) -> None:
    """A member whose hello takes a while is not sent away by strangers that come after it."""
    m = meeting(2, handshake=Handshake(b"secret", 3, 1, most_visitors=4))
    member, nonce = m.raw(), b"n" * 16
    for _ in range(20):
        m.raw()
    member.sendall(HELLO.pack(b"hvdgloo3", 3, 1, 1, nonce))
    theirs = connect.receive_exactly(member, 48, time.monotonic() + 10)[:16]
    member.sendall(prove(RIGHT._key, "member", *RIGHT._agreed(1, nonce, theirs, b"")))
    assert list(m.accepted.result(10)) == [1]


class _Exhausted:
    """A listener in a process that may have no more than a few descriptors."""

    def __init__(self, listener: socket.socket, sockets: list[socket.socket], most: int) -> None:
        self._listener, self._accepted, self._most = listener, sockets, most
        self.refused = 0

    def accept(self) -> tuple[socket.socket, Any]:
        if sum(sock.fileno() >= 0 for sock in self._accepted) >= self._most:
            self.refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        sock, peer = self._listener.accept()
        self._accepted.append(sock)
        return sock, peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_no_descriptors_are_left() -> None:
    """Strangers give their descriptors back to members."""
    hurried = Handshake(b"secret", 3, 1, grace=0.05)
    accepted: list[socket.socket] = []
    with listen("127.0.0.1", None) as listener, socket.socket() as foreign, ThreadPoolExecutor(3) as pool:
        exhausted = _Exhausted(listener, accepted, 3)
        accepted.append(foreign)
        waiting = pool.submit(hurried.accept_all, exhausted, range(1, 3), {}, 10.0, describe)  # type: ignore[arg-type]
        port = listener.getsockname()[1]
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
        first = pool.submit(RIGHT.connect, "127.0.0.1", port, 1, 10.0, describe).result(10)[0]
        second = pool.submit(RIGHT.connect, "127.0.0.1", port, 2, 10.0, describe).result(10)[0]
        links = waiting.result(10)
        assert sorted(links) == [1, 2]
        assert exhausted.refused >= 1
        for sock in [*strangers, first.sock, second.sock, *(link.sock for link in links.values())]:
            sock.close()


def test_who_could_not_be_accepted_is_not_called_dead() -> None:
    accepted: list[socket.socket] = []
    with listen("127.0.0.1", None) as listener, socket.socket() as foreign:
        accepted.append(foreign)
        exhausted = _Exhausted(listener, accepted, 1)
        with (
            socket.create_connection(("127.0.0.1", listener.getsockname()[1])),
            pytest.raises(ConnectError, match=r"from rank 1.*\. No more files could be opened"),
        ):
            RIGHT.accept_all(exhausted, [1], {}, 0.2, describe)  # type: ignore[arg-type]


def test_descriptors_come_back_while_no_client_is_there_to_be_sent_away() -> None:
    accepted: list[socket.socket] = []
    with listen("127.0.0.1", None) as listener, socket.socket() as foreign, ThreadPoolExecutor(2) as pool:
        accepted.append(foreign)
        exhausted = _Exhausted(listener, accepted, 1)
        waiting = pool.submit(RIGHT.accept_all, exhausted, [1], {}, 10.0, describe)  # type: ignore[arg-type]
        joining = pool.submit(RIGHT.connect, "127.0.0.1", listener.getsockname()[1], 1, 10.0, describe)
        deadline = time.monotonic() + 10
        while not exhausted.refused:
            assert time.monotonic() < deadline
        foreign.close()
        for link in (joining.result(10)[0], *waiting.result(10).values()):
            link.sock.close()
        assert exhausted.refused < 1000  # it does not ask without a pause


def test_messages_after_the_handshake_are_authenticated_in_each_direction(meeting: Callable[..., Meeting]) -> None:
    m = meeting(3)
    for rank in (1, 2):
        m.join(rank, RIGHT).result(10)
    accepted = m.accepted.result(10)
    tags = set()
    for rank, theirs in zip((1, 2), m.links, strict=True):
        mine = accepted[rank]
        for sender, receiver in ((mine, theirs), (theirs, mine)):
            tags.add(tag := sender.sending.tag(b"message"))
            receiver.receiving.check(b"message", tag, "it")
    assert len(tags) == 4  # no key is used twice


def test_a_member_that_dies_right_after_its_proof_is_still_a_connection(
    meeting: Callable[..., Meeting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss is then noticed and named by the engine; a closed socket would be an unexplained error there."""
    proven = threading.Event()
    gone = threading.Event()
    original = Handshake.admit

    def admit(self: Handshake, *args: Any) -> Any:
        admitted = yield from original(self, *args)
        proven.set()
        assert gone.wait(10)
        return admitted

    monkeypatch.setattr(Handshake, "admit", admit)
    m = meeting(2, filler="x")
    sock, nonce = m.raw(HELLO.pack(b"hvdgloo3", 3, 1, 1, b"n" * 16)), b"n" * 16
    theirs = connect.receive_exactly(sock, 48, time.monotonic() + 10)[:16]
    sock.sendall(prove(RIGHT._key, "member", *RIGHT._agreed(1, nonce, theirs, b"")))
    assert proven.wait(10)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
    sock.close()
    gone.set()
    assert ended(m.accepted.result(10)[1].sock)


def test_the_deadline_names_who_is_missing(meeting: Callable[..., Meeting]) -> None:
    """Pain 14, 20."""
    m = meeting(4, timeout=0.3)
    m.join(2, RIGHT).result(10)
    with pytest.raises(ConnectError, match=r"waited 0.3 s on 127.0.0.1 port \d+ .* rank 1 \(h1\), rank 3 \(h3\)\. "):
        m.accepted.result(10)
    assert ended(m.sockets[0])  # who had come is not left hanging


def test_silent_clients_do_not_extend_the_deadline(meeting: Callable[..., Meeting]) -> None:
    m = meeting(2, timeout=0.3)
    m.raw()
    begin = time.monotonic()
    with pytest.raises(ConnectError):
        m.accepted.result(10)
    assert time.monotonic() - begin < 2.0


def test_there_is_no_listener() -> None:
    with listen("127.0.0.1", None) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectError, match=rf"127.0.0.1 port {port}: .*refused"):
        RIGHT.connect("127.0.0.1", port, 1, 5.0, describe)


def test_a_listener_that_never_answers_is_given_up_at_the_deadline() -> None:
    with listen("127.0.0.1", None) as listener:
        begin = time.monotonic()
        with pytest.raises(ConnectError, match="timed out"):
            RIGHT.connect("127.0.0.1", listener.getsockname()[1], 1, 0.3, describe)
        assert time.monotonic() - begin < 3.0


class TestPorts:
    def test_the_first_free_port_of_a_range(self) -> None:
        """Pain 12."""
        with listen("127.0.0.1", None) as one:
            port = one.getsockname()[1]
            with listen("127.0.0.1", (port, port + 50)) as other:
                assert port < other.getsockname()[1] <= port + 50

    def test_a_range_that_is_taken(self) -> None:
        with listen("127.0.0.1", None) as one:
            port = one.getsockname()[1]
            with pytest.raises(ConnectError, match=rf"port {port} of 127.0.0.1: .*HVDGLOO_PORT_RANGE") as caught:
                listen("127.0.0.1", (port, port))
            assert caught.value.address == "127.0.0.1"

    def test_an_address_of_another_host(self) -> None:
        with pytest.raises(ConnectError, match=r"cannot listen on any port of 192\.0\.2\.1: "):
            listen("192.0.2.1", None)

    def test_the_chosen_address_alone(self) -> None:
        with listen("127.0.0.1", None) as listener:
            assert listener.getsockname()[0] == "127.0.0.1"
