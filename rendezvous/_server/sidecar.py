"""The rendezvous server as an agent's sidecar, in a process of its own (``-m hvdgloo.rendezvous._server.sidecar``).

Where workers cannot reach the launcher (kubectl from a laptop), the server must run where they can. The agent starts
this process and exchanges messages with it (``hvdgloo.rendezvous._sidecar``): the first one on standard input has
everything, including the secret; those on standard output tell where it listens and then, whenever that changes, which
workers have registered. A further message on standard input asks for the latter; the answer has its number, and is true
after the question. The end of standard input is the order to end.
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

_LOCK = threading.Lock()  # so that a later message was true later
_BETWEEN = 0.1  # seconds; a thousand workers that register together make a few messages, not a thousand
_READ = 64 * 1024


def arrivals(server: RendezvousServer) -> Arrived:
    """Return the state of a start, for a launcher."""
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
    # One write, so that messages of two threads stay whole. If their reader is gone, standard input ends as well.
    try:
        os.write(1, FROM_SERVER.frame(message))
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
