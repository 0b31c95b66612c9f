"""What is done to sockets that others own, and may close at any time."""

from __future__ import annotations

import socket

from hvdgloo._backends.sockets import Ends, shut_down


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
