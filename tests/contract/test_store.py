"""The promises of every Store, over MemoryStore and HttpStore."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Iterator

import pytest

from hvdgloo.errors import RendezvousTimeoutError
from hvdgloo.rendezvous import MemoryStore, RendezvousClient, RendezvousServer, Store
from tests.support.rendezvous import SECRET, until
from tests.support.threads import Task

AWKWARD_KEYS = [
    "0/3",
    "a//b",  # torch's prefixes make these
    "/a",
    "a/",
    "//",
    "...",
    ".hidden/.x",
    "a b",
    "a+b",
    "100%",
    "%2F",
    "%252F",
    "?timeout=3&op=set",
    "#fragment",
    "key;param",
    "ключ/鍵/🔑",
    "ÿ",
    "\\..\\",
    "'\"<>",
    "a" * 1024,
]


@pytest.fixture(scope="module")
def client() -> Iterator[RendezvousClient]:
    with RendezvousServer(secret=SECRET, size=1) as server, RendezvousClient(server.endpoint, SECRET) as client:
        yield client


@pytest.fixture(params=["memory", "http"])
def store(request: pytest.FixtureRequest) -> Store:
    if request.param == "memory":
        return MemoryStore()
    client: RendezvousClient = request.getfixturevalue("client")
    return client.store(f"scope/{uuid.uuid4()}")


def test_set_and_get(store: Store) -> None:
    store.set("key", b"value")
    assert store.get("key", timeout=1) == b"value"


def test_the_last_value_counts(store: Store) -> None:
    store.set("key", b"one")
    store.set("key", b"two")
    assert store.get("key", timeout=0) == b"two"


@pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)), b"\r\n\r\n", b"x" * 3_000_000], ids=len)
def test_values_are_bytes_and_stay_so(store: Store, value: bytes) -> None:
    store.set("key", value)
    assert store.get("key", timeout=5) == value
    assert store.get_many(["key", "key"], timeout=5) == [value, value]


@pytest.mark.parametrize("key", AWKWARD_KEYS)
def test_keys_mean_what_they_say(store: Store, key: str) -> None:
    store.set(key, b"1")
    store.set(key + "x" if len(key) < 1024 else key[1:], b"2")
    assert store.get(key, timeout=1) == b"1"
    assert store.get_many([key], timeout=1) == [b"1"]
    assert store.delete(key)


def test_all_awkward_keys_differ(store: Store) -> None:
    items = {key: key.encode() for key in AWKWARD_KEYS}
    store.set_many(items)
    assert store.get_many(AWKWARD_KEYS, timeout=1) == list(items.values())


@pytest.mark.parametrize(
    "key", ["", ".", "..", "a/../b", "a/.", "../../etc/passwd", "a\nb", "\0", "a" * 1025, "\ud800"]
)
def test_what_is_no_key(store: Store, key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        store.set(key, b"")
    with pytest.raises(ValueError, match="key"):
        store.get(key, timeout=0)
    with pytest.raises(ValueError, match="key"):
        store.set_many({"good": b"", key: b""})
    with pytest.raises(ValueError, match="key"):
        store.get_many(["good", key], timeout=0)
    with pytest.raises(ValueError, match="key"):
        store.delete(key)
    with pytest.raises(RendezvousTimeoutError):
        store.get("good", timeout=0)  # nothing of the bad set_many was stored


def test_get_waits_for_set(store: Store) -> None:
    waiting = Task(lambda: store.get("late", timeout=10))
    store.set("other", b"")
    store.set("late", b"here")
    assert waiting.result() == b"here"


def test_get_many_waits_for_all_in_order(store: Store) -> None:
    keys = [f"0/{rank}" for rank in range(5)]
    waiting = [Task(lambda: store.get_many(keys, timeout=10)) for _ in range(3)]
    for rank in (3, 0, 4, 1):
        store.set(f"0/{rank}", b"%d" % rank)
    assert all(task.thread.is_alive() for task in waiting)
    store.set("0/2", b"2")
    for task in waiting:
        assert task.result() == [b"0", b"1", b"2", b"3", b"4"]


def test_a_key_that_is_deleted_while_others_are_awaited(store: Store) -> None:
    store.set("a", b"old")
    waiting = Task(lambda: store.get_many(["a", "b"], timeout=10))
    until(lambda: waiting.thread.is_alive(), "the wait")
    assert store.delete("a")
    store.set("b", b"b")
    store.set("a", b"new")
    assert waiting.result() in ([b"new", b"b"], [b"old", b"b"])


def test_a_wait_ends_at_its_deadline_and_names_what_is_missing(store: Store) -> None:
    store.set("0/0", b"")
    started = time.monotonic()
    with pytest.raises(RendezvousTimeoutError, match=r"2 keys \(0/1, 0/2\) were not set within 0\.3 s"):
        store.get_many(["0/0", "0/1", "0/2"], timeout=0.3)
    assert 0.29 < time.monotonic() - started < 2
    with pytest.raises(RendezvousTimeoutError, match="key nothing was not set within 0 s"):
        store.get("nothing", timeout=0)


def test_many_missing_keys_make_no_long_message(store: Store) -> None:
    with pytest.raises(RendezvousTimeoutError) as caught:
        store.get_many([f"key{number}" for number in range(1000)], timeout=0)
    assert len(str(caught.value)) < 500


def test_set_many_is_seen_as_a_whole(store: Store) -> None:
    waiting = Task(lambda: store.get("a", timeout=10))
    store.set_many({"a": b"1", "b": b"2"})
    assert waiting.result() == b"1"
    assert store.get("b", timeout=0) == b"2"


def test_nothing_at_all(store: Store) -> None:
    store.set_many({})
    assert store.get_many([], timeout=0) == []


def test_delete(store: Store) -> None:
    assert not store.delete("key")
    store.set("key", b"")
    assert store.delete("key")
    assert not store.delete("key")
    with pytest.raises(RendezvousTimeoutError):
        store.get("key", timeout=0)


def test_a_value_is_not_the_callers_own_buffer(store: Store) -> None:
    buffer = bytearray(b"before")
    store.set("key", buffer)  # type: ignore[arg-type]
    buffer[:] = b"after!"
    assert store.get("key", timeout=0) == b"before"


class Explodes:
    loaded = False

    def __reduce__(self) -> tuple[object, ...]:
        return setattr, (Explodes, "loaded", True)


def test_nothing_is_unpickled(store: Store) -> None:
    """Pain 30."""
    payload = pickle.dumps(Explodes())
    store.set("pickle", payload)
    assert store.get("pickle", timeout=0) == payload
    assert store.get_many(["pickle"], timeout=0) == [payload]
    assert not Explodes.loaded
