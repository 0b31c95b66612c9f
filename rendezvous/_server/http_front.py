"""The server's front: sockets, request heads and threads, around the connections' HTTP parser and WSGI gateway.

On its own, cheroot hands a connection to a thread of a fixed pool as soon as it is accepted, and the thread then waits
for the client to send something. A client that opens connections and sends little would thus occupy all threads, which
a job's long polls need. Here one thread owns the quiet connections, and four rules hold:

* A connection takes a thread only when a whole request head has arrived (or is too long to be one). So clients that are
  slow or silent cost a descriptor each; when descriptors become scarce, the connection that has been quiet longest is
  closed.
* Requests that all workers make at a start are answered by the front's own thread once they have arrived completely: to
  hand each of thousands of small requests to another thread costs more than to answer it. That thread never waits. A
  request that must wait for other workers is put aside as a generator, and the rest of an answer that the client does
  not read yet is left to the pool. Encrypted connections are served by the pool alone.
* Only a request whose signature was verified may make its thread wait: for the body, within a deadline, or in a long
  poll. Meanwhile this module watches the connection, and reports a client that hangs up.
* A request that is refused with its body unread ends the connection: the refusal is sent, further input is discarded
  for a moment (closing at once would make the kernel drop the refusal), and then it is closed.

An answer without an end is written by another owner: once its head has been sent, the connection is handed over.

The pool's threads are created when they are needed, up to a limit that its caller sets.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from cheroot import server as cheroot_server

from hvdgloo._net.event_loop import EventLoop
from hvdgloo._net.tls import TLS_HELLO, Tls, pending, shake_hands
from hvdgloo.rendezvous._server.http_connection import Gateway, HttpConnection, refusal
from hvdgloo.rendezvous._server.pauses import Pause, PausedRequests
from hvdgloo.rendezvous._server.service import Entrance
from hvdgloo.rendezvous._server.streams import MAX_HEAD, WRITE_TIMEOUT
from hvdgloo.rendezvous._server.thread_pool import ThreadPool

logger = logging.getLogger(__name__)

LINGER_TIMEOUT = 2.0
_STOP_GRACE = 0.5
_MOST_DISCARDED = 64 * 1024 * 1024
_ACCEPTS_AT_ONCE = 64


class Front(cheroot_server.HTTPServer):
    """A server of an application on several listening sockets.

    It is cheroot's server only as far as its parser and gateway require; threads and sockets are this class's own.

    Args:
        application: finds the HttpConnection, for ``watch``, as ``environ["hvdgloo.connection"]``.
        listeners: bound sockets, listening or not; closed by ``stop``.
        threads: maximum number of threads; long polls must stay below it.
        max_connections: maximum number of connections; above it the one that has been quiet longest is closed.
        max_body: maximum size of a request's body, in bytes.
        head_timeout: seconds within which a request's head must be whole.
        tls: encrypts all connections, if given.
        dead_after: seconds after which a client that is cut off counts as gone, even with unacknowledged data; None
            leaves that case to the kernel.
        name: name of the server and its threads.
    """

    max_request_header_size = MAX_HEAD

    def __init__(
        self,
        application: Entrance,
        listeners: Sequence[socket.socket],
        *,
        threads: int,
        max_connections: int,
        max_body: int,
        head_timeout: float,
        tls: Tls | None = None,
        dead_after: float | None = None,
        name: str = "hvdgloo-rendezvous",
    ) -> None:
        address = listeners[0].getsockname()
        super().__init__(address[:2] if isinstance(address, tuple) else ("localhost", 0), Gateway, server_name=name)
        # cheroot keeps every server there forever.
        logging.statistics.pop(f"Cheroot HTTPServer {id(self)}", None)  # type: ignore[attr-defined]
        self.software = name
        self.ready = False
        self.max_request_body_size = max_body
        self.wsgi_app = application
        self.pool = ThreadPool(name, threads)
        self.max_connections = max_connections
        self._head_timeout = head_timeout
        self._dead_after = dead_after
        self._tls = tls
        self._listeners = list(listeners)
        self._loop = EventLoop()
        self._selector = self._loop.selector
        # Guards the selector and the tables below: pool threads give connections back.
        self._lock = threading.Lock()
        self._connections: set[HttpConnection] = set()
        # Quiet connections by the reason, longest quiet first; those with a deadline, together with it.
        self._reading: OrderedDict[HttpConnection, float] = OrderedDict()
        self._idle: OrderedDict[HttpConnection, float] = OrderedDict()
        self._lingering: OrderedDict[HttpConnection, float] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._accept_again = 0.0
        self._paused: PausedRequests[HttpConnection] = PausedRequests(self._wake)

    # The life of the server.

    def start(self) -> None:
        """Listen, and serve on its own threads."""
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(1024)
        self._listen()
        self.ready = True
        started = threading.Event()
        name = f"{self.software}-front"
        self._thread = threading.Thread(target=self._run, args=(started,), name=name, daemon=True)
        self._thread.start()
        started.wait(10)

    def stop(self) -> None:
        """Close everything within a second; answers in progress are completed if that is quick."""
        if not self.ready:
            return
        self.ready = False
        self._loop.wake_up.wake()
        if self._thread is not None:
            self._thread.join(5)
        self.pool.stop(_STOP_GRACE)
        with self._lock:
            connections, self._connections = self._connections, set()
            for connection in connections:
                connection.close()
        if self.pool.alive:  # their sockets are closed now, so they end
            self.pool.stop(_STOP_GRACE)
        for listener in self._listeners:
            listener.close()
        self._loop.close()

    # What pool threads call.

    @contextmanager
    def watch(self, connection: HttpConnection, on_hang_up: Callable[[], None]) -> Iterator[None]:
        """Call ``on_hang_up`` if the client disconnects while a pool thread waits for something else."""
        with self._lock:
            connection.on_hang_up = on_hang_up
            connection.socket.setblocking(False)  # the front looks whether the client has gone, and must not wait
            self._register(connection)
        try:
            with self.pool.waiting():
                yield
        finally:
            with self._lock:
                connection.on_hang_up = None
                self._unregister(connection)

    def put_conn(self, connection: HttpConnection) -> None:
        """Take back a connection that stays open after a request."""
        connection.rfile.feed(pending(connection.socket))
        if connection.rfile.has_data() and connection.rfile.has_head():
            with self._lock:
                self._forget(connection)
            self._dispatch(connection)
            return
        begun = connection.rfile.has_data()
        with self._lock:
            if connection in self._connections:
                # A peer that has not proved to be a client of this run of the server keeps its connection for a moment.
                table = self._reading if begun or connection.on_close is None else self._idle
                table[connection] = time.monotonic() + self._head_timeout
                connection.socket.setblocking(False)
                self._register(connection)
        if begun or connection.on_close is None:
            self._loop.wake_up.wake()  # for its deadline

    def error_log(self, msg: str = "", level: int = 20, traceback: bool = False) -> None:
        logger.log(level, "%s", msg, exc_info=traceback)

    def close_connection(self, connection: HttpConnection) -> None:
        """Close a connection that was handed over."""
        self._close(connection)

    @property
    def can_add_keepalive_connection(self) -> bool:
        return bool(self.ready)

    def _serve(self, connection: HttpConnection) -> None:
        """Serve one request, on a thread of the pool."""
        keep = False
        try:
            keep = connection.communicate()
        except OSError as error:
            logger.debug("connection from %s: %s", connection.remote_addr, error)
        except Exception:
            logger.exception("a request could not be served")
        self._after(connection, keep)

    def _after(self, connection: HttpConnection, keep: bool) -> None:
        """Keep or close a connection after a request was answered."""
        if connection.hand_over is not None and self.ready:
            connection.hand_over(connection)
        elif keep and self.ready:
            self.put_conn(connection)
        elif connection.must_linger and self.ready:
            self._linger(connection)
        else:
            self._close(connection)

    def _linger(self, connection: HttpConnection) -> None:
        try:
            connection.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(connection)
            return
        with self._lock:
            if connection in self._connections:
                connection.socket.setblocking(False)
                self._lingering[connection] = time.monotonic() + LINGER_TIMEOUT
                self._register(connection)
        self._loop.wake_up.wake()

    # The front's own thread.

    def _run(self, started: threading.Event) -> None:
        started.set()
        while self.ready:
            try:
                self._loop.turn(self._next())
                self._resume()
                self._expire(time.monotonic())
            except Exception:  # one connection's failure must not end the service
                logger.exception("the rendezvous server's front")
        until = time.monotonic() + _STOP_GRACE
        while self._paused and time.monotonic() < until:  # the service has let all go, one after the other
            self._resume()
            time.sleep(0.001 if self._paused else 0)

    def _wake(self) -> None:
        """Have the front's thread look for requests to resume, unless it is the one that calls this."""
        if threading.current_thread() is not self._thread:
            self._loop.wake_up.wake()

    def _next(self) -> float:
        """Return the time at which the next thing expires."""
        with self._lock:
            deadlines = [next(iter(table.values())) for table in (self._reading, self._lingering) if table]
        if self._accept_again:
            deadlines.append(self._accept_again)
        if self._paused.deadline is not None:
            deadlines.append(self._paused.deadline)
        return min(deadlines, default=time.monotonic() + 60.0)

    def _listen(self) -> None:
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def _readable(self, connection: HttpConnection) -> None:
        if not connection.greeted and not self._greet(connection):
            return
        with self._lock:
            if not connection.registered:
                return  # a pool thread has taken it back in the meantime
            if connection.on_hang_up is not None:
                self._peek(connection)
                return
            try:
                data = connection.socket.recv(64 * 1024)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if connection in self._lingering:
                connection.discarded += len(data)
                if not data or connection.discarded > _MOST_DISCARDED:
                    self._drop(connection)
                return
            connection.rfile.feed(data)
            if not data or connection.rfile.starts_with(TLS_HELLO):
                self._drop(connection)
                return
            if not connection.rfile.has_head():
                if self._idle.pop(connection, None) is not None:
                    self._reading[connection] = time.monotonic() + self._head_timeout
                return
            here = self._tls is None and connection.rfile.has_small_request()
            if here:
                self._reading.pop(connection, None)
                self._idle.pop(connection, None)
            else:
                self._forget(connection)
        if here:
            connection.begin()
            self._go_on(connection)
        else:
            self._dispatch(connection)

    def _go_on(self, connection: HttpConnection) -> None:
        """Continue with a request that was served on this thread as far as possible without waiting."""
        if connection.pause is not None:
            self._park(connection, connection.pause)
            return
        try:
            sent = connection.wfile.flush()
        except OSError as error:
            logger.debug("connection from %s: %s", connection.remote_addr, error)
            self._close(connection)
            return
        if sent:
            self._after(connection, connection.keep)
            return
        with self._lock:
            self._forget(connection)
        self.pool.submit(lambda: self._send_rest(connection))

    def _send_rest(self, connection: HttpConnection) -> None:
        """Send the rest of an answer, on a thread of the pool."""
        try:
            connection.flush_patiently()
        except OSError as error:
            logger.debug("connection from %s: %s", connection.remote_addr, error)
            self._close(connection)
        else:
            self._after(connection, connection.keep)

    def _park(self, connection: HttpConnection, pause: Pause) -> None:
        """Put a request aside until its pause is over."""
        with self._lock:
            connection.on_hang_up = pause.hang_up
            self._register(connection)
        self._paused.put(connection, pause)

    def _resume(self) -> None:
        """Resume all requests whose pauses are over."""
        for connection, released in self._paused.over():
            with self._lock:
                connection.on_hang_up = None
            connection.resume(released)
            self._go_on(connection)

    def _greet(self, connection: HttpConnection) -> bool:
        """Continue a connection's TLS handshake; return whether it is complete.

        It costs a signature, which is computed without the lock: until then only this thread uses the connection.
        """
        if not connection.registered:
            return False  # it had to give way to another
        try:
            connection.greeted = shake_hands(connection.socket)
        except OSError as error:
            if getattr(error, "reason", "") == "HTTP_REQUEST":
                self._say_encrypted(connection)
            self._close(connection)
        return connection.greeted

    def _dispatch(self, connection: HttpConnection) -> None:
        connection.socket.settimeout(WRITE_TIMEOUT)
        self.pool.submit(lambda: self._serve(connection))

    @staticmethod
    def _gone(connection: HttpConnection) -> bool:
        try:
            return not connection.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _peek(self, connection: HttpConnection) -> None:
        """Look at a readable watched connection: its client hung up, or sends its next request early."""
        callback = connection.on_hang_up
        gone = self._gone(connection)
        self._unregister(connection)
        if gone and callback is not None:
            callback()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            full = len(self._connections) >= self.max_connections
            if full and not self._are_quiet():
                self._pause()
                return
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM) and not self._evict():
                    self._pause()
                    return
                continue
            if full:
                self._evict()  # only now, since connections may stay until another one needs the room
            self._welcome(sock, address)

    def _welcome(self, sock: socket.socket, address: Any) -> None:
        sock.setblocking(False)
        near = sock.family == socket.AF_UNIX  # and so neither TCP nor encrypted
        try:
            if not near:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(sock, self._dead_after)
            if self._tls is not None and not near:
                sock = self._tls.accepted(sock)
        except OSError:
            sock.close()  # reset already
            return
        connection = HttpConnection(self, self.pool.waiting, sock, ("", 0) if near else address)
        connection.greeted = near or self._tls is None
        with self._lock:
            self._connections.add(connection)
            self._reading[connection] = time.monotonic() + self._head_timeout
            self._register(connection)

    def _are_quiet(self) -> bool:
        """Tell whether there is a connection that could give way to another."""
        with self._lock:
            return any((self._lingering, self._reading, self._idle))

    def _evict(self) -> bool:
        """Close the connection that has been quiet longest: strangers first, then clients that were served."""
        with self._lock:
            for table in (self._lingering, self._reading, self._idle):
                if table:
                    self._drop(next(iter(table)))
                    return True
        return False

    def _pause(self) -> None:
        """Stop accepting for a moment, since connections that are being served use up the descriptors."""
        self._accept_again = time.monotonic() + 0.05
        for listener in self._listeners:
            self._selector.unregister(listener)

    def _expire(self, now: float) -> None:
        if self._accept_again and now >= self._accept_again:
            self._accept_again = 0.0
            self._listen()
        with self._lock:
            while self._lingering and next(iter(self._lingering.values())) <= now:
                self._drop(next(iter(self._lingering)))
            while self._reading and next(iter(self._reading.values())) <= now:
                connection = next(iter(self._reading))
                self._say_too_slow(connection)
                self._drop(connection)

    @staticmethod
    def _say_encrypted(connection: HttpConnection) -> None:
        """Tell a client that speaks HTTP without TLS, in plain HTTP, that it must use TLS."""
        reason = "this server uses TLS: set HVDGLOO_TLS=required for every process of the job"
        try:
            socket.socket.recv(connection.socket, MAX_HEAD)  # or closing it would make the kernel drop the answer
            socket.socket.send(connection.socket, refusal("400 Bad Request", reason))
        except OSError:
            pass  # it has gone

    def _say_too_slow(self, connection: HttpConnection) -> None:
        if not connection.rfile.has_data():
            return
        reason = f"no whole request head within {self._head_timeout:g} s"
        try:
            connection.socket.send(refusal("408 Request Timeout", reason))
        except OSError:
            pass  # it does not read either

    # The selector and the tables; called with the lock held, except _close.

    def _register(self, connection: HttpConnection) -> None:
        if not connection.registered and connection.socket.fileno() >= 0:
            self._selector.register(connection.socket, selectors.EVENT_READ, partial(self._readable, connection))
            connection.registered = True

    def _unregister(self, connection: HttpConnection) -> None:
        if connection.registered:
            connection.registered = False
            self._selector.unregister(connection.socket)

    def _forget(self, connection: HttpConnection) -> None:
        """Remove a connection from the quiet ones."""
        self._unregister(connection)
        for table in (self._reading, self._idle, self._lingering):
            table.pop(connection, None)

    def _drop(self, connection: HttpConnection) -> None:
        self._forget(connection)
        self._connections.discard(connection)
        connection.close()

    def _close(self, connection: HttpConnection) -> None:
        with self._lock:
            self._drop(connection)


def keep_alive(sock: socket.socket, dead_after: float | None) -> None:
    """Have the kernel notice that a peer is cut off, where its timing can be set.

    Args:
        dead_after: within so many seconds (at least 4), even while the peer owes an acknowledgement; None: within two
            minutes, unless it owes one.
    """
    probes, seconds = 4, 120.0 if dead_after is None else dead_after
    interval = max(1, round(seconds / (2 * probes)))
    idle = max(1, round(seconds) - probes * interval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", idle), ("TCP_KEEPINTVL", interval), ("TCP_KEEPCNT", probes)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    # No keep-alive probe is sent to a peer with unacknowledged data.
    if dead_after is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * dead_after))
