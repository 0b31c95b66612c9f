"""The rendezvous server in a process of its own beside an agent (``-m hvdgloo.rendezvous._server.sidecar``).

Where workers cannot reach the launcher (kubectl from a laptop), the server has to run where they can. The agent starts
this process and talks to it in lines of JSON: the first line on standard input says everything, secret included; the
lines on standard output say where it listens, and then, whenever that changes, who has come. A further line on standard
input asks for the same, and is returned with the answer, which was true after the question was asked. The end of
standard input is the order to end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous._server.server import RendezvousServer

_LOCK = threading.Lock()  # so that what is said later was true later
_BETWEEN_LINES = 0.1  # seconds; a thousand workers that come together make a few lines, not a thousand


def arrivals(server: RendezvousServer) -> dict[str, Any]:
    """What a launcher wants to know about a start: how many have come, which ranks have not, and why it failed."""
    epoch = server.status()["epochs"][-1]
    return {"arrived": epoch["arrived"], "missing": epoch["missing_ranks"], "failure": server.last_failure}


def main() -> int:
    """Serve until standard input ends."""
    request = json.loads(sys.stdin.buffer.readline() or b"{}")
    if not request:
        return 1
    try:
        server = RendezvousServer(
            secret=bytes.fromhex(request["secret"]),
            hosts=[(name, slots) for name, slots in request["hosts"]],
            bind=request["bind"],
            port_range=None if request["port_range"] is None else tuple(request["port_range"]),
            start_timeout=request["start_timeout"],
        ).start()
    except ConfigError as error:
        _say({"error": str(error)})
        return 1
    _say({"endpoints": server.endpoints})
    threading.Thread(target=_tell, args=(server,), name="hvdgloo-beside", daemon=True).start()
    for line in sys.stdin.buffer:
        with _LOCK:
            _say({**arrivals(server), "asked": json.loads(line)})
    server.stop()
    return 0


def _tell(server: RendezvousServer) -> None:
    seen = -1
    last: dict[str, Any] = {}
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
            pause.wait(_BETWEEN_LINES)


def _say(message: dict[str, Any]) -> None:
    # One write, so that lines of two threads stay whole. If they have lost their reader, standard input ends as well.
    try:
        os.write(1, json.dumps(message).encode("ascii") + b"\n")
    except OSError:
        pass


if __name__ == "__main__":
    sys.exit(main())
