"""The agent's part in probing the network: it reports addresses, answers probes and sends its own. If workers cannot
reach the launcher, it also runs the rendezvous server.

All of it runs in the agent's selector, and nothing here blocks.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import IO, Any

from hvdgloo._net import ports
from hvdgloo._net.framing import FrameDecoder
from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous._sidecar import (
    FROM_SERVER,
    MAX_MESSAGE,
    TO_SERVER,
    AskArrivals,
    FromServer,
    ServerFailed,
    ServerRequest,
)
from hvdgloo.runner.network import interfaces
from hvdgloo.runner.network.probe import Answer, ProbeListener, Prober, ProbeTarget
from hvdgloo.runner.processes import reaper
from hvdgloo.runner.processes.bootstrap import agent_environment
from hvdgloo.runner.protocol.frames import (
    CHUNK,
    AskServed,
    Frame,
    Probe,
    Probed,
    ProbesEnd,
    Serve,
    Served,
    Survey,
    Surveyed,
)

_BATCH_SECONDS = 0.02  # answers that arrive together are sent together


class HostDiscovery:
    """One host's part in the probing.

    Args:
        selector: the agent's.
        send: to the launcher.
        environ: the agent's own environment.

    Attributes:
        handlers: frame type to handler.
    """

    def __init__(
        self, selector: selectors.BaseSelector, send: Callable[[Frame], None], environ: Mapping[str, str]
    ) -> None:
        self._selector = selector
        self._send = send
        self._environ = environ
        self._port = ports.hold_free_port()
        self._key = b""
        self._listener: ProbeListener | None = None
        self._prober: Prober | None = None
        self._answers: list[tuple[ProbeTarget, Answer]] = []
        self._next_batch = 0.0
        self._server: _ServerBeside | None = None
        self.handlers: dict[type[Frame], Callable[[Any], None]] = {
            Survey: self._on_survey,
            Probe: self._on_probe,
            ProbesEnd: self._on_probes_end,
            Serve: self._on_serve,
            AskServed: self._on_ask_served,
        }

    @property
    def port(self) -> int:
        """The port held for ``MASTER_PORT``."""
        return self._port.port

    @property
    def deadline(self) -> float | None:
        """Latest time at which ``tick`` must be called."""
        times = [self._next_batch] if self._answers else []
        if self._prober is not None and self._prober.deadline is not None:
            times.append(self._prober.deadline)
        return min(times, default=None)

    def tick(self) -> None:
        """Give up probes that take too long, and send the results of others."""
        if self._prober is None:
            return
        self._prober.tick()
        now = time.monotonic()
        if self._answers and (self._prober.done or now >= self._next_batch):
            answers = [
                (astuple(target), (answer.source, answer.host, answer.detail, answer.outcome.value))
                for target, answer in self._answers
            ]
            self._send(Probed(answers))
            self._answers.clear()
            self._next_batch = now + _BATCH_SECONDS

    def close(self) -> None:
        """Release everything, because the job is over. May be called again."""
        self._on_probes_end(ProbesEnd())
        if self._server is not None:
            self._server.close()
        self._port.close()

    def _on_survey(self, survey: Survey) -> None:
        failure = ""
        if survey.port_range is not None:
            self._port.close()
            try:
                self._port = ports.hold_free_port(survey.port_range)
            except ConfigError as error:
                failure = str(error)
        addresses = interfaces.own_addresses()
        listening: dict[str, int] = {}
        failures: dict[str, str] = {}
        if survey.listen:
            self._key = survey.key
            wanted = [a.address for a in interfaces.candidates(addresses, interfaces.InterfaceFilter(survey.rules))]
            self._listener = ProbeListener(self._selector, self._key, survey.host, wanted, survey.port_range)
            listening, failures = self._listener.ports, self._listener.failures
        self._send(Surveyed([astuple(a) for a in addresses], listening, failures, self.port, failure))

    def _on_probe(self, probe: Probe) -> None:
        if self._prober is not None:
            self._prober.close()
        targets = [ProbeTarget(*target) for target in probe.targets]
        self._prober = Prober(self._selector, self._key, targets, probe.timeout, self._on_answer)

    def _on_answer(self, target: ProbeTarget, answer: Answer) -> None:
        self._answers.append((target, answer))

    def _on_probes_end(self, _: ProbesEnd) -> None:
        if self._prober is not None:
            self._prober.close()
            self._prober = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._answers.clear()

    def _on_serve(self, serve: Serve) -> None:
        environ = {**agent_environment(self._environ), reaper.AGENT_VARIABLE: serve.agent_id}
        try:
            self._server = _ServerBeside(self._selector, serve.request, environ, self._on_served)
        except OSError as error:
            self._on_served(ServerFailed(f"it could not be started: {error}"))

    def _on_ask_served(self, ask: AskServed) -> None:
        if self._server is not None:
            self._server.ask(ask.asked)

    def _on_served(self, message: FromServer) -> None:
        self._send(Served(message))


class _ServerBeside:
    """The rendezvous server as a child of the agent; see ``hvdgloo.rendezvous._server.sidecar``.

    Args:
        request: the request that the server receives.
        environ: its environment.
        tell: receives each message of the server, and its end as ``ServerFailed``.

    Raises:
        OSError: the server cannot be started.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        request: ServerRequest,
        environ: Mapping[str, str],
        tell: Callable[[FromServer], None],
    ) -> None:
        self._selector = selector
        self._tell = tell
        self._frames = FrameDecoder(MAX_MESSAGE)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hvdgloo.rendezvous._server.sidecar"],
            env=environ,
            cwd="/",  # a user's socket.py must not be imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] | None = self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        selector.register(self._stdout, selectors.EVENT_READ, self._on_readable)
        # Even a thousand hosts fit into the pipe, which is empty.
        self._stdin.write(TO_SERVER.frame(request))

    def ask(self, number: int) -> None:
        """Have the server report the workers that have arrived."""
        with contextlib.suppress(OSError, ValueError):  # it has ended, which is reported elsewhere
            self._stdin.write(TO_SERVER.frame(AskArrivals(number)))

    def close(self) -> None:
        """Order the server to end. The agent reaps it, and kills it in its final sweep if it does not end."""
        if not self._stdin.closed:
            self._stdin.close()
        if self._stdout is not None:
            self._selector.unregister(self._stdout)
            self._stdout.close()
            self._stdout = None
        self._process.returncode = self._process.poll() or 0

    def _on_readable(self) -> None:
        if self._stdout is None:
            return
        try:
            data = os.read(self._stdout.fileno(), CHUNK)
        except BlockingIOError:
            return
        try:
            for body in self._frames.feed(data):
                self._tell(FROM_SERVER.decode(body))
        except ValueError as error:
            self.close()
            self._tell(ServerFailed(f"it cannot be understood: {error}"))
            return
        if not data:
            self.close()
            self._tell(ServerFailed("it has ended"))
