"""The agent's part in probing the network: it reports addresses, answers probes and sends its own.

All of it runs in the agent's selector, and nothing here blocks.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from hvdgloo._net import ports
from hvdgloo.errors import ConfigError
from hvdgloo.runner.network import interfaces
from hvdgloo.runner.network.probe import Answer, ProbeListener, Prober, ProbeTarget
from hvdgloo.runner.protocol.frames import Frame, Probe, Probed, ProbesEnd, Survey, Surveyed

_BATCH_SECONDS = 0.02  # answers that arrive together are sent together


class HostDiscovery:
    """One host's part in the probing.

    Args:
        selector: the agent's.
        send: to the launcher.

    Attributes:
        handlers: frame type to handler.
    """

    def __init__(self, selector: selectors.BaseSelector, send: Callable[[Frame], None]) -> None:
        self._selector = selector
        self._send = send
        self._port = ports.hold_free_port()
        self._key = b""
        self._listener: ProbeListener | None = None
        self._prober: Prober | None = None
        self._answers: list[tuple[ProbeTarget, Answer]] = []
        self._next_batch = 0.0
        self.handlers: dict[type[Frame], Callable[[Any], None]] = {
            Survey: self._on_survey,
            Probe: self._on_probe,
            ProbesEnd: self._on_probes_end,
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
