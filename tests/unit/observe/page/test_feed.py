"""Live events: all readers get the same, each encoded once, and no reader is waited for."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import pytest

from hvdgloo._observe.page import feed as feed_module
from hvdgloo._observe.page.feed import Feed
from hvdgloo.rendezvous._server.http_connection import HttpConnection
from tests.support.observed import SimulatedJob
from tests.support.rendezvous import until

PATIENCE = 30.0


class Stream:
    """A connection that was handed over, from both ends."""

    def __init__(self) -> None:
        self.socket, self.client = socket.socketpair()
        self.client.settimeout(PATIENCE)
        self.file = self.client.makefile("rb")

    def close(self) -> None:
        self.socket.close()

    def event(self) -> tuple[str, str, Any]:
        """Kind, id and data of the next event."""
        fields: dict[str, str] = {}
        while "data" not in fields:
            line = self.file.readline().decode()
            assert line, "the stream is over"
            name, _, value = line.rstrip("\n").partition(": ")
            fields[name] = value
        return fields["event"], fields.get("id", ""), json.loads(fields["data"])


class Crowd:
    """A feed and its readers."""

    def __init__(self, job: SimulatedJob) -> None:
        self.feed = Feed(job.observatory, lambda connection: cast("Stream", connection).close())
        self.streams: list[Stream] = []

    def join(self, *, controls: bool = False, last: str = "") -> Stream:
        stream = Stream()
        self.streams.append(stream)
        assert self.feed.reserve()
        self.feed.join(cast("HttpConnection", stream), controls=controls, last=last)
        return stream

    def close(self) -> None:
        self.feed.stop("the test is over")
        for stream in self.streams:
            stream.file.close()
            stream.client.close()
            stream.close()


@pytest.fixture
def job() -> SimulatedJob:
    job = SimulatedJob(ranks=4)
    job.advance(3)
    return job


@pytest.fixture
def crowd(job: SimulatedJob) -> Iterator[Crowd]:
    with closing(Crowd(job)) as crowd:
        yield crowd


def test_a_snapshot_comes_first_and_then_what_changes(job: SimulatedJob, crowd: Crowd) -> None:
    reader = crowd.join()
    kind, _, snapshot = reader.event()
    assert (kind, snapshot["ranks"]["rank"]) == ("snapshot", [0, 1, 2, 3])
    job.advance()
    kind, _, update = reader.event()
    assert kind == "update"
    assert update["job"]["steps"] > snapshot["job"]["steps"]
    assert "settings" not in update  # which have not changed


def test_a_hundred_readers_get_the_same_which_is_encoded_once(
    job: SimulatedJob, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = [crowd.join() for _ in range(100)]
    for reader in readers:
        reader.event()
    encoded = []
    monkeypatch.setattr(feed_module, "encode", lambda value: encoded.append(value) or b"{}")
    job.advance(2)
    assert len({reader.event()[:2] for reader in readers}) == 1
    assert len({reader.event()[:2] for reader in readers}) == 1
    assert len(encoded) == 2


def test_each_reader_is_told_what_they_may_do(crowd: Crowd) -> None:
    one, other = crowd.join(controls=True), crowd.join()
    assert one.event()[2]["job"]["control"] is True
    assert other.event()[2]["job"]["control"] is False


def test_who_comes_back_is_told_what_they_have_missed(job: SimulatedJob, crowd: Crowd) -> None:
    reader = crowd.join()
    _, last, _ = reader.event()
    job.advance(2)
    again = crowd.join(last=last)
    assert [again.event()[0], again.event()[0]] == ["update", "update"]


@pytest.mark.parametrize("last", ["", "00000000-1", "x", "-1", "00000000-99999999999"])
def test_who_comes_back_from_somewhere_else_gets_a_snapshot(crowd: Crowd, last: str) -> None:
    assert crowd.join(last=last).event()[0] == "snapshot"


def test_who_comes_back_too_late_gets_a_snapshot(job: SimulatedJob, crowd: Crowd) -> None:
    _, last, _ = crowd.join().event()
    job.advance(130)
    assert crowd.join(last=last).event()[0] == "snapshot"


def test_who_does_not_keep_up_is_cut_off_and_others_are_not(
    job: SimulatedJob, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "MOST_BEHIND", 20_000)
    monkeypatch.setattr(feed_module, "_TURN", 0.01)
    slow, quick = Stream(), crowd.join()
    crowd.streams.append(slow)
    slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    crowd.feed.reserve()
    crowd.feed.join(cast("HttpConnection", slow), controls=False, last="")
    quick.event()
    for _ in range(10):
        job.advance(10)
        events = [quick.event() for _ in range(10)]
    assert slow.socket.fileno() == -1
    assert crowd.feed.watchers == 1
    assert len({id for _, id, _ in events}) == 10


def test_who_hangs_up_makes_room(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MOST_READERS", 1)
    reader = crowd.join()
    reader.event()
    assert not crowd.feed.reserve()
    reader.file.close()
    reader.client.close()
    until(crowd.feed.reserve, "a place that is free", PATIENCE)
    assert crowd.feed.watchers == 1


def test_what_readers_say_means_nothing(job: SimulatedJob, crowd: Crowd) -> None:
    reader = crowd.join()
    reader.event()
    reader.client.sendall(b"GET / HTTP/1.1\r\n\r\n")
    job.advance()
    assert reader.event()[0] == "update"


def test_the_end_is_shown(job: SimulatedJob, crowd: Crowd) -> None:
    reader = crowd.join()
    reader.event()
    job.observatory.ended(1, "rank 3 was killed")
    crowd.feed.stop("the job is over")
    events = []
    while (event := reader.event())[0] != "end":
        events.append(event)
    assert events[-1][0] == "snapshot"
    assert events[-1][2]["job"]["message"] == "rank 3 was killed"
    assert event[2] == {"reason": "the job is over"}
    assert reader.file.read() == b"\n"
    assert not crowd.feed.reserve()


def test_who_takes_nothing_does_not_hold_up_the_end(job: SimulatedJob) -> None:
    crowd = Crowd(job)
    stream = Stream()
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with closing(crowd), closing(stream.client):
        crowd.feed.reserve()
        crowd.feed.join(cast("HttpConnection", stream), controls=False, last="")
        crowd.feed.stop("over")
        assert stream.socket.fileno() == -1
        stream.file.close()


def test_a_fault_of_ours_ends_connections_and_not_the_feed(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(feed_module, "encode", lambda _: 1 / 0)
        crowd.join()
        until(lambda: crowd.feed.watchers == 0, "the connection's end", PATIENCE)
    assert "ZeroDivisionError" in caplog.text
    assert crowd.join().event()[0] == "snapshot"


@pytest.mark.parametrize("digits", ["9" * 5000, "9" * 400, "\u00b2", ""])
def test_an_impossible_last_event_is_none(job: SimulatedJob, crowd: Crowd, digits: str) -> None:
    reader = crowd.join(last=f"{crowd.feed._life}-{digits}")
    assert reader.event()[0] == "snapshot"


def test_who_cannot_join_gives_the_place_back(job: SimulatedJob, crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(after: int | None) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(job.observatory, "subscribe", fails)
    with pytest.raises(RuntimeError):
        crowd.join()
    assert crowd.feed.watchers == 0
