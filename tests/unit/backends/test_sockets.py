"""Operations on sockets that others own, and may close at any time."""

from __future__ import annotations

import os
import select
import socket

import pytest

from hvdgloo._backends import sockets
from hvdgloo._backends.sockets import Connections, Ends, encode_address, shut_down
from tests.support.threads import Task


def test_a_connection_is_ended_for_both_of_its_ends() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
        listener.accept()[0] as far,
    ):
        shut_down(near.fileno(), lambda found: found == (near.getsockname(), listener.getsockname()))
        assert far.recv(1) == b""
        assert near.recv(1) == b""


def test_what_is_not_wanted_is_left_alone() -> None:
    """A listener of Gloo's that is shut down ends the process: its accept() fails in a thread of Gloo's."""
    asked: list[Ends] = []

    def wanted(found: Ends) -> bool:
        asked.append(found)
        return found[1] is not None

    with socket.create_server(("127.0.0.1", 0)) as another:
        shut_down(another.fileno(), wanted)
        assert asked == [(another.getsockname(), None)]
        with socket.create_connection(another.getsockname()) as client, another.accept()[0] as accepted:
            client.sendall(b"x")
            assert accepted.recv(1) == b"x"


def test_a_descriptor_that_has_been_closed_is_passed_over() -> None:
    with socket.socket() as gone:
        number = gone.fileno()
    shut_down(number, lambda found: found != (None, None))


def connections_of(*listeners: socket.socket) -> Connections:
    """The connections of a group whose ranks listen here; the first listener is this rank's."""
    made = Connections(b"size" + encode_address(listeners[0].getsockname()))
    made.learn(b"size" + encode_address(listener.getsockname()) for listener in listeners[1:])
    return made


def test_a_connection_that_is_closed_while_it_is_looked_at_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo closes it as soon as the peer has gone."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
        listener.accept()[0] as far,
    ):
        group, number, look = connections_of(listener), near.fileno(), sockets.ends

        def ends(descriptor: int) -> Ends:
            found = look(descriptor)
            if descriptor == number:
                near.close()
            return found

        monkeypatch.setattr(sockets, "ends", ends)
        for descriptor in (listener.fileno(), far.fileno()):
            os.set_inheritable(descriptor, True)
        group.keep_to_this_process()
        assert near.fileno() == -1
        assert not os.get_inheritable(listener.fileno())
        assert not os.get_inheritable(far.fileno())


def test_no_event_of_its_own_connections_comes_when_they_have_parted() -> None:
    """And of those only: there may be other ranks in this process, which are not as far yet."""
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
        socket.create_server(("127.0.0.1", 0)) as third,
        socket.create_connection(third.getsockname()) as others,
        third.accept()[0],
        socket.create_connection(second.getsockname()) as made,
        second.accept()[0] as made_with,
        socket.create_connection(first.getsockname()) as came_from,
        first.accept()[0] as came,
        socket.create_connection(first.getsockname()),
        first.accept()[0] as once,
        select.epoll() as epoll,
    ):
        for each in (first, made, came):
            epoll.register(each, select.EPOLLIN)
        epoll.register(once, 0)  # as after its only event: Gloo will not look at it any more
        parting = Task(connections_of(first, second, third).part)
        for peer in (made_with, came_from):
            peer.settimeout(10)
            assert peer.recv(1) == b""
        for each in (made, came):  # as Gloo's thread does when it sees that they have ended
            assert parting.thread.is_alive()
            epoll.unregister(each)
        parting.result()
        assert sockets.ends(others.fileno()) == (others.getsockname(), third.getsockname())
