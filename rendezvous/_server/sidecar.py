"""The rendezvous server in a process of its own beside an agent (``-m hvdgloo.rendezvous._server.sidecar``).

Where workers cannot reach the launcher (kubectl from a laptop), the server has to run where they can. The agent starts
this process and speaks with it in messages (``hvdgloo.rendezvous._sidecar``): the first one on standard input says
everything, secret included; those on standard output say where it listens, and then, whenever that changes, who has
come. A further message on standard input is a question for the same, and its number comes back with the answer: it
tells what is true after the question was asked. The end of standard input is the order to end.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import msgspec

from hvdgloo._net.framing import FrameDecoder
from hvdgloo._net.tls import Tls
from hvdgloo.errors import ConfigError, MissingDependencyError
from hvdgloo.rendezvous._server.server import RendezvousServer
from hvdgloo.rendezvous._sidecar import (
    FROM_SERVER,
    MAX_MESSAGE,
    TO_SERVER,
    Arrived,
    AskArrivals,
    FromServer,
    Listening,
    ServerFailed,
    ServerRequest,
)

_LOCK = threading.Lock()  # so that what is said later was true later
_BETWEEN = 0.1  # seconds; a thousand workers that come together make a few messages, not a thousand
_READ = 64 * 1024


def arrivals(server: RendezvousServer) -> Arrived:
    """What a launcher wants to know about a start: how many have come, which ranks have not, and why it failed."""
    epoch = server.status()["epochs"][-1]
    return Arrived(epoch["arrived"], epoch["missing_ranks"], server.last_failure)


def main() -> int:
    """Serve until standard input ends."""
    orders = _orders()
    request = next(orders, None)
    if not isinstance(request, ServerRequest):
        return 1
    try:
        server = RendezvousServer(
            secret=request.secret,
            hosts=request.hosts,
            bind=request.bind,
            port_range=request.port_range,
            start_timeout=request.start_timeout,
            tls=None if request.tls is None else Tls(*request.tls),
        ).start()
    except (ConfigError, MissingDependencyError) as error:
        _say(ServerFailed(str(error)))
        return 1
    _say(Listening(server.endpoints))
    threading.Thread(target=_tell, args=(server,), name="hvdgloo-beside", daemon=True).start()
    for order in orders:
        if isinstance(order, AskArrivals):
            with _LOCK:
                _say(msgspec.structs.replace(arrivals(server), asked=order.number))
    server.stop()
    return 0


def _orders() -> Iterator[ServerRequest | AskArrivals]:
    frames = FrameDecoder(MAX_MESSAGE)
    while data := os.read(0, _READ):
        yield from map(TO_SERVER.decode, frames.feed(data))


def _tell(server: RendezvousServer) -> None:
    seen = -1
    last: Arrived | None = None
    pause = threading.Event()
    while True:
        seen = server.wait_for_change(seen, timeout=3600.0)
        with _LOCK:
            now = arrivals(server)
            new = now != last
            if new:
                last = now
                _say(now)
        if new:
            pause.wait(_BETWEEN)


def _say(message: FromServer) -> None:
    # One write, so that lines of two threads stay whole. If they have lost their reader, standard input ends as well.
    try:
        os.write(1, FROM_SERVER.frame(message))
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
