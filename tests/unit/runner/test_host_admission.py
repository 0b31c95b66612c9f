"""The admission of hosts, all at the start or one later, with made-up agents. The rest is tested with real networks, in
tests/processes/test_launch_networks.py and test_elastic_hosts.py."""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hvdgloo._net import ports
from hvdgloo.errors import ConfigError, HostsUnreachableError, HvdglooError, LaunchError
from hvdgloo.rendezvous import host_identity
from hvdgloo.runner.host_admission import (
    SETTLE_SECONDS,
    TOGETHER,
    Admission,
    Reached,
    is_here,
    probe_timeout,
)
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.network.interfaces import Address
from hvdgloo.runner.network.probe import LAUNCHER, ProbeResult
from hvdgloo.runner.protocol.frames import PROTOCOL, Frame, Hello, Probe, Probed, Relay, Relaying, Survey, Surveyed
from hvdgloo.runner.supervise.agent_link import AgentLink
from hvdgloo.version import __version__

HERE = Address("lo", "127.0.0.1", 8)
"""The launcher's address: one at which a listener can be opened here."""

SPEC = LaunchSpec(("true",), (), None, "/", {}, b"s" * 32)


def hello(identity: str, port: int) -> Hello:
    return Hello(PROTOCOL, __version__, "h1", identity, pid=1, cores=1, gpus=0, port=port)


@pytest.mark.parametrize(("connect", "probe"), [(30, 3.0), (1000, 3.0), (10, 1.0), (0.5, 0.5)])
def test_probes_take_a_part_of_the_connect_timeout(connect: float, probe: float) -> None:
    assert probe_timeout(connect) == probe


@pytest.mark.skipif(sys.platform != "linux", reason="abstract Unix sockets are Linux's")
def test_an_agent_is_here_if_its_port_is_held_here() -> None:
    """A clone of this virtual machine has the same boot id, host name and number of network namespace."""
    with ports.hold_free_port() as hold:
        assert is_here(hello(host_identity(), hold.port))
        assert not is_here(hello("0123456789abcdef", hold.port))
    assert not is_here(hello(host_identity(), hold.port))


@dataclass(eq=False)
class Line:
    """A replacement of an ``AgentLink``."""

    host: HostEntry
    hello: Hello
    channel: SimpleNamespace


class Agent:
    """A made-up agent, and the launcher's link to it.

    Attributes:
        sent: what the launcher has sent to it.
        fields: what it reports, beside its addresses.
        relaying: its answer to the order to relay; None if there is none.
    """

    def __init__(self, number: int, **fields: Any) -> None:
        self.address = Address("eth0", f"10.0.0.{number + 1}", 24)
        self.sent: list[Frame] = []
        self.fields = fields
        self.relaying: Relaying | None = Relaying(5000 + number)
        line = Line(
            HostEntry(f"h{number + 1}", 1), hello("elsewhere", 4000 + number), SimpleNamespace(send=self.sent.append)
        )
        self.link = cast(AgentLink, line)

    def take(self, kind: type[Any]) -> list[Any]:
        """Return frames of a kind, which are not returned again."""
        found = [frame for frame in self.sent if isinstance(frame, kind)]
        self.sent[:] = [frame for frame in self.sent if not isinstance(frame, kind)]
        return found

    def surveyed(self) -> Surveyed:
        address = self.address
        fields = {"ports": {address.address: 7000}, "failures": {}, "port": 29500, **self.fields}
        return Surveyed([astuple(address)], **fields)


class Bench:
    """An admission, and what comes of it.

    Args:
        whole: as for ``Admission``.
        missed: pairs of hosts, the first of which does not reach the second.
    """

    visits = SimpleNamespace(coming=False)

    def __init__(self, whole: bool, missed: Sequence[tuple[int, int]] = ()) -> None:
        self.selector = selectors.DefaultSelector()
        self.loop = SimpleNamespace(selector=self.selector)
        self.handlers: dict[type[Frame], Callable[[AgentLink, Any], None]] = {}
        self.missed = missed
        self.agents: list[Agent] = []
        self.admitted: list[str] = []
        self.refused: dict[str, HvdglooError] = {}
        self.asked: list[tuple[int, int]] = []
        self.whole = whole
        self.admission = Admission(cast(Any, self), SPEC, [HERE], alone=False, whole=whole)

    def admit(self, link: AgentLink, detail: str) -> None:
        self.admitted.append(link.host.name)

    def refuse(self, link: AgentLink, error: HvdglooError) -> None:
        if self.whole:
            raise error
        self.refused[link.host.name] = error

    def close(self) -> None:
        self.admission.close()
        self.selector.close()

    def request(self, count: int, **fields: Any) -> list[Agent]:
        """Request that many more hosts."""
        made = [Agent(len(self.agents) + n, **fields) for n in range(count)]
        self.agents += made
        for agent in made:
            self.admission.request(agent.link)
        return made

    def answer(self, now: float | None = None) -> None:
        """Have all agents answer what they were sent, and do what is due then."""
        for number, agent in enumerate(self.agents):
            for _ in agent.take(Survey):
                self.handlers[Surveyed](agent.link, agent.surveyed())
            for probe in agent.take(Probe):
                self.handlers[Probed](agent.link, Probed([self._result(number, target) for target in probe.targets]))
            if agent.take(Relay) and agent.relaying is not None:
                self.handlers[Relaying](agent.link, agent.relaying)
        self.admission.keep_time(time.monotonic() if now is None else now)

    def _result(self, source: int, target: tuple[int, str, int]) -> Any:
        self.asked.append((source, target[0]))
        outcome = ProbeResult.TIMED_OUT if (source, target[0]) in self.missed else ProbeResult.REACHED
        return target, (self.agents[source].address.address, target[0], "", outcome.value)


@pytest.fixture(params=[True, False], ids=["at the start", "later"])
def bench(request: pytest.FixtureRequest) -> Iterator[Callable[..., Bench]]:
    """A function that returns a bench, for hosts that are there at the start, and for such as come later."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(Bench(request.param, **options)))


@pytest.fixture
def elastic() -> Iterator[Callable[..., Bench]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(Bench(False, **options)))


def test_hosts_that_come_together_are_tried_once_and_admitted_together(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.request(3)
    made.answer()
    assert not made.admitted
    made.answer()
    assert made.admitted == ["h1", "h2", "h3"]
    assert made.admission.done
    assert sorted(made.asked) == sorted((a, b) for a in range(3) for b in (LAUNCHER, 0, 1, 2) if a != b)
    made.admission.serve(4444)
    for agent in made.agents:
        assert made.admission.reached(agent.link) == Reached(agent.address, "127.0.0.1", None, 29500)
        assert made.admission.endpoint(agent.link) == ("127.0.0.1", 4444)


def test_nothing_is_tried_before_all_have_reported_what_they_have(bench: Callable[..., Bench]) -> None:
    made = bench()
    one, _ = made.request(2)
    made.handlers[Surveyed](one.link, one.surveyed())
    made.admission.keep_time(time.monotonic())
    assert not one.take(Probe)
    made.admission.keep_time(time.monotonic() + TOGETHER + 1)
    # A job of a fixed size cannot begin without the other one.
    assert bool(one.take(Probe)) != made.whole


def test_a_host_that_others_do_not_reach(bench: Callable[..., Bench]) -> None:
    """A job of a fixed size cannot begin. An elastic one does without."""
    made = bench(missed=[(0, 2)])
    made.request(3)
    made.answer()
    if made.whole:
        with pytest.raises(HostsUnreachableError, match=r"h1 -> h3: 10.0.0.3 .* timed out"):
            made.answer()
        assert not made.admitted
        return
    for _ in range(6):
        made.answer()
    assert made.admitted == ["h1", "h2"]
    assert "h1 -> h3: 10.0.0.3 (eth0) timed out" in str(made.refused["h3"])
    assert made.admission.done


def test_workers_that_do_not_reach_the_launcher_have_their_agent_relay(bench: Callable[..., Bench]) -> None:
    made = bench(missed=[(1, LAUNCHER)])
    made.request(2)
    for _ in range(2):
        made.answer()
    assert made.admitted == ["h1"]
    assert not made.admission.done
    made.answer()
    assert made.admitted == ["h1", "h2"]
    made.admission.serve(4444)
    assert [made.admission.endpoint(agent.link) for agent in made.agents] == [("127.0.0.1", 4444), ("127.0.0.1", 5001)]
    assert made.admission.relaying == ["h2"]


@pytest.mark.parametrize("answer", [Relaying(0, "no port is free"), None], ids=["an agent that cannot", "a silent one"])
def test_a_host_whose_workers_nothing_leads_to_the_launcher_is_refused(
    bench: Callable[..., Bench], answer: Relaying | None
) -> None:
    made = bench(missed=[(0, LAUNCHER)])
    (agent,) = made.request(1)
    agent.relaying = answer
    text = "no port is free" if answer else "on h1 did not listen for its workers within"
    for _ in range(2):
        made.answer()
    late = time.monotonic() + SPEC.config.connect_timeout + 1
    if made.whole:
        with pytest.raises(LaunchError, match=text):
            made.answer(late)
    else:
        made.answer(late)
        assert text in str(made.refused["h1"])
    assert not made.admitted


def test_a_host_that_reports_nothing_is_refused(bench: Callable[..., Bench]) -> None:
    made = bench()
    one, two = made.request(2)
    late = time.monotonic() + SPEC.config.connect_timeout + 1
    made.handlers[Surveyed](one.link, one.surveyed())
    text = "the agent on h2 did not report its addresses within 30 s; if the host is only slow, raise"
    if made.whole:
        with pytest.raises(LaunchError, match=text):
            made.admission.keep_time(late)
        return
    made.admission.keep_time(late)
    assert text in str(made.refused["h2"])
    two.take(Survey)
    made.answer()
    assert made.admitted == ["h1"]


def test_answers_that_could_lead_to_a_better_choice_are_waited_for_briefly(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.request(2)
    made.answer()
    probes = {agent: agent.take(Probe)[0].targets for agent in made.agents}
    for number, (agent, targets) in enumerate(probes.items()):
        known = [made._result(number, target) for target in targets if target[0] != LAUNCHER]
        made.handlers[Probed](agent.link, Probed(known))
    now = time.monotonic() + 1
    made.admission.keep_time(now)
    assert not made.admission.done
    assert not any(agent.take(Relay) for agent in made.agents)
    made.admission.keep_time(now + SETTLE_SECONDS + 0.01)
    assert all(agent.take(Relay) for agent in made.agents)


def test_no_port_of_the_range_is_free(bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench()
    monkeypatch.setattr(made.admission, "_config", replace(SPEC.config, port_range=(29400, 29401)))
    made.request(2, failures={"10.0.0.1": "all are taken", "10.0.0.2": "all are taken"})
    if made.whole:
        with pytest.raises(ConfigError, match="host h1: all are taken"):
            made.answer()
    else:
        made.answer()
        assert {name: str(error) for name, error in made.refused.items()} == {
            "h1": "host h1: all are taken",
            "h2": "host h2: all are taken",
        }


def test_only_the_first_host_of_a_job_of_a_fixed_size_has_to_have_a_port_for_master_port(
    bench: Callable[..., Bench],
) -> None:
    made = bench()
    made.request(1)
    made.request(1, port_failure="no port is free for MASTER_PORT")
    for _ in range(2):
        made.answer()
    assert made.admitted == ["h1", "h2"]
    made = bench()
    made.request(1, port_failure="no port is free for MASTER_PORT")
    if made.whole:
        with pytest.raises(ConfigError, match="host h1: no port is free for MASTER_PORT"):
            made.answer()


def test_a_host_that_comes_later_is_tried_with_those_that_are_there(elastic: Callable[..., Bench]) -> None:
    made = elastic()
    made.request(2)
    for _ in range(2):
        made.answer()
    made.asked.clear()
    made.request(1)
    for _ in range(2):
        made.answer()
    assert made.admitted == ["h1", "h2", "h3"]
    assert sorted(made.asked) == [(0, 2), (1, 2), (2, 0), (2, 1), (2, LAUNCHER)]


def test_a_host_that_goes_while_it_is_tried_does_not_stop_the_others(elastic: Callable[..., Bench]) -> None:
    made = elastic()
    first, second = made.request(2)
    made.answer()
    made.admission.withdraw(second.link)
    made.agents.remove(second)
    first.take(Probe)
    for _ in range(2):
        made.answer()
    assert made.admitted == ["h1"]
    assert made.admission.done


def test_a_host_that_was_let_in_without_a_network_is_not_tried(
    elastic: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = elastic()
    monkeypatch.setattr("hvdgloo.runner.host_admission.is_here", lambda found: found.port == 4000)
    (first,) = made.request(1, ports={})
    first.address = HERE
    made.answer()
    assert made.admitted == ["h1"]
    assert made.admission.reached(first.link).address.loopback
    made.request(1)
    for _ in range(5):
        made.answer()
    assert (1, 0) not in made.asked
    assert "its agent does not listen there" in str(made.refused["h2"])
