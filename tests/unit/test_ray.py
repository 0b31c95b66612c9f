"""The decisions of ``hvdgloo.ray`` without Ray: arguments, room in a cluster, order, and messages."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdgloo.errors import ConfigError, JobFailedError
from hvdgloo.ray import RayExecutor, _calls, elastic
from hvdgloo.ray._actor import ActorLocation
from hvdgloo.ray._placement import lacking, node_resources
from hvdgloo.ray._settings import Demand, create_settings, demand
from hvdgloo.ray._workers import Call, Workers, by_node, visible_gpus, words
from hvdgloo.ray.elastic import RayHostDiscovery, _Actors
from hvdgloo.runner.inbound.task import Invitation
from tests.support.launching import run_command
from tests.support.threads import Task


def _demand(**given: Any) -> Demand:
    arguments: dict[str, Any] = {
        "num_workers": None,
        "num_hosts": None,
        "num_workers_per_host": 1,
        "cpus_per_worker": 1,
        "gpus_per_worker": None,
        "use_gpu": False,
    }
    return demand(**{**arguments, **given})


def test_actors_and_workers_import_nothing_of_the_launcher() -> None:
    """Each of them is a process of its own, which starts the later the more it imports."""
    code = "import sys, hvdgloo.ray._actor, hvdgloo.ray._worker; print(*sorted(sys.modules))"
    done = run_command([sys.executable, "-c", code], check=True)
    imported = set(done.stdout.split())
    assert "hvdgloo.ray._worker" in imported
    assert not imported & {"hvdgloo.ray.elastic", "hvdgloo.ray.runner", "hvdgloo.runner.launch", "ray", "yaml"}


def test_workers_are_packed_and_hosts_spread() -> None:
    packed = _demand(num_workers=3, cpus_per_worker=2)
    assert (packed.strategy, packed.bundles) == ("PACK", [{"CPU": 2}] * 3)
    spread = _demand(num_hosts=2, num_workers_per_host=4, use_gpu=True)
    assert (spread.strategy, spread.bundles) == ("STRICT_SPREAD", [{"CPU": 4, "GPU": 4}] * 2)
    assert str(spread) == "8 workers on 2 nodes with 1 CPU and 1 GPU each"
    assert str(_demand(num_workers=1, use_gpu=True, gpus_per_worker=2)) == "1 worker with 1 CPU and 2 GPUs"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 2, "num_hosts": 2}, r"num_workers=2, num_hosts=2\): give only one"),
        ({}, "how many workers"),
        ({"num_workers": 0}, r"num_workers=0\): it must be at least 1"),
        ({"num_workers": "2"}, r"num_workers='2'\): it is not a whole number"),
        ({"num_workers": True}, "it is not a whole number"),
        ({"num_hosts": 1, "num_workers_per_host": 0}, r"num_workers_per_host=0\)"),
        ({"num_workers": 1, "cpus_per_worker": 0.5}, r"cpus_per_worker=0\.5\)"),
        ({"num_workers": 1, "gpus_per_worker": 2}, "only with use_gpu=True"),
        ({"num_workers": 1, "gpus_per_worker": 0, "use_gpu": True}, r"gpus_per_worker=0\): it must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RayExecutor(None, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout_s": -1}, "timeout_s=-1"),
        ({"placement_group_timeout_s": float("inf")}, "placement_group_timeout_s=inf"),
        ({"timeout_s": "30"}, r"timeout_s='30'\): give a time in seconds"),
        ({"nics": "eth0"}, r"nics='eth0'\): give a list of names"),
    ],
)
def test_wrong_settings_are_refused(arguments: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        create_settings(**arguments)


def test_settings_of_horovods_without_meaning_are_said_to_be() -> None:
    with pytest.warns(UserWarning, match="ssh_str=.* has no effect"):
        create_settings(ssh_str="key")


def test_the_first_argument_is_settings() -> None:
    with pytest.raises(ConfigError, match=r"settings=4\).*num_workers="):
        RayExecutor(4)  # type: ignore[arg-type]


def test_old_names_are_understood() -> None:
    with (
        pytest.warns(DeprecationWarning, match="num_slots=.*num_workers_per_host"),
        pytest.raises(ConfigError) as caught,
    ):
        RayExecutor(None, num_hosts=1, num_slots=0)
    assert "num_workers_per_host=0" in str(caught.value)
    with pytest.warns(DeprecationWarning, match="cpus_per_slot"), pytest.raises(ConfigError, match="contradict"):
        RayExecutor(None, num_workers=1, cpus_per_worker=2, cpus_per_slot=3)


@pytest.mark.parametrize(
    ("wanted", "nodes", "message"),
    [
        ({"num_workers": 4}, [2, 2], ""),
        (
            {"num_workers": 5},
            [2, 2],
            "5 workers with 1 CPU each: that is 5 CPUs in all; the cluster has 4 CPUs on 2 nodes",
        ),
        ({"num_workers": 2, "cpus_per_worker": 2}, [3, 1], "there is room on the nodes for 1"),
        ({"num_workers": 2, "cpus_per_worker": 2}, [4, 1], ""),
        ({"num_hosts": 2, "num_workers_per_host": 2}, [4, 1], "that is 2 CPUs on each, which 1 of 2 nodes can give"),
        ({"num_hosts": 2, "num_workers_per_host": 2}, [2, 2, 0], ""),
        ({"num_workers": 1, "use_gpu": True}, [4], "that is 1 GPU in all; the cluster has 0 GPUs on 1 node"),
    ],
)
def test_what_a_cluster_lacks(wanted: Mapping[str, Any], nodes: list[int], message: str) -> None:
    said = lacking(_demand(**wanted), [{"CPU": cpus} for cpus in nodes])
    assert message in said
    assert bool(message) == bool(said)


def test_dead_nodes_have_nothing() -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0}}, {"Alive": False, "Resources": {"CPU": 8.0}}]
    assert node_resources(nodes) == [{"CPU": 2.0}]


def _place(node: str, *gpus: str) -> ActorLocation:
    return ActorLocation(node, "10.0.0.1", "h", gpus)


def test_actors_of_a_node_follow_each_other() -> None:
    assert by_node([_place("b"), _place("a"), _place("b"), _place("a"), _place("c")]) == [0, 2, 1, 3, 4]


def test_workers_of_a_node_see_the_gpus_of_all_of_them() -> None:
    assert visible_gpus([_place("b", "0"), _place("a"), _place("b", "3", "1")]) == {
        "b": {"CUDA_VISIBLE_DEVICES": "0,3,1"},
        "a": {},
    }


def test_rays_advice_is_left_out() -> None:
    said = (
        "The actor died.\n\tactor_id: 1\nThe actor is dead because its worker process has died. Some common causes ..."
    )
    assert words(RuntimeError(said)) == "The actor is dead because its worker process has died."
    assert words(RuntimeError()) == "RuntimeError"


def _connected() -> tuple[_calls.Connection, _calls.Connection]:
    listener = _calls.Listener()
    accepting = Task(listener.accept)
    worker = _calls.connect(listener.name)
    actor = accepting.result(30)
    listener.close()
    return actor, worker


def test_messages_arrive_whole_whatever_their_size() -> None:
    actor, worker = _connected()
    big = np.arange(3_000_000, dtype=np.float64)
    with actor, worker:
        thread = Task(lambda: actor.send([b"", b"few", big.data, b""]))
        received = worker.receive()
        thread.result(30)
        assert received is not None
        assert [len(part) for part in received] == [0, 3, big.nbytes, 0]
        np.testing.assert_array_equal(np.frombuffer(received[2]), big)
        worker.send([])
        assert actor.receive() == []


@pytest.mark.parametrize("end", [lambda actor: actor.close(), lambda actor: actor._socket.sendall(b"\0\0\0\1\0")])
def test_the_end_of_a_connection_is_the_end_of_messages(end: Callable[[_calls.Connection], None]) -> None:
    actor, worker = _connected()
    with actor, worker:
        end(actor)
        actor.close()
        assert worker.receive() is None


def test_other_users_are_not_talked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = _calls.Listener()
    monkeypatch.setattr("hvdgloo._net.abstract.user_of_peer", lambda sock: 12345)
    monkeypatch.setattr("os.geteuid", lambda: 54321)
    waiting = Task(listener.accept)
    for _ in range(300):  # more than the listener turns away at once
        with pytest.raises(PermissionError, match="different users"):
            _calls.connect(listener.name)
    listener.close()
    with pytest.raises(OSError, match=r"Invalid argument|Bad file"):
        waiting.result(30)


def test_a_listener_that_is_closed_lets_go_of_who_waits() -> None:
    listener = _calls.Listener()
    waiting = Task(listener.accept)
    listener.close()
    with pytest.raises(OSError, match=r"Invalid argument|Bad file"):
        waiting.result(30)
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(f"\0{listener.name}")


def test_without_ray_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'hvdgloo\[ray\]'"):
        RayExecutor(None, num_workers=1)


class _Ray:
    """The parts of Ray that ``hvdgloo.ray`` uses; records the requested and the killed actors."""

    def __init__(self, *nodes: str) -> None:
        self.listed = [
            {"Alive": True, "NodeID": node, "NodeManagerAddress": node, "Resources": {"CPU": 1.0}} for node in nodes
        ]
        self.begun: list[SimpleNamespace] = []
        self.killed: list[Any] = []
        self.util = SimpleNamespace(
            scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
        )

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return self.listed

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)
        actor.ended.set_exception(RuntimeError("it was killed"))

    def remote(self, _: type) -> Any:
        return SimpleNamespace(
            options=lambda scheduling_strategy, **_: SimpleNamespace(remote=lambda: self._actor(scheduling_strategy))
        )

    def _actor(self, node: str) -> SimpleNamespace:
        actor = SimpleNamespace(node=node, up=Future(), ended=Future())
        actor.there = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: actor.up))
        actor.bring = SimpleNamespace(remote=lambda *_: SimpleNamespace(future=lambda: actor.ended))
        self.begun.append(actor)
        return actor


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> _Ray:
    """Two nodes with room for one worker each."""
    made = _Ray("a", "b")
    monkeypatch.setitem(sys.modules, "ray", made)
    return made


def _actors(discovery: Any = None, most: int | None = None) -> _Actors:
    room = RayHostDiscovery()
    return _Actors(Invitation((), b""), discovery or room, room, most)


def test_actors_are_all_killed_at_the_end_while_some_end_by_themselves(ray: _Ray) -> None:
    ray.listed = ray.listed[:1]
    ray.listed[0]["Resources"] = {"CPU": 3.0}
    actors = _actors()
    actors._adjust()
    begun = list(ray.begun)
    with actors:  # each one that is killed calls back at once, as Ray does on a thread of its own
        pass
    assert set(map(id, begun)) <= set(map(id, ray.killed))


def _workers(*actors: Any) -> Workers:
    workers = Workers(_demand(num_workers=1), create_settings(), {})
    workers.actors = list(actors)
    return workers


def _unreachable(*_: object) -> None:
    raise RuntimeError("Ray cannot be reached")


def test_everything_is_given_back_if_ctrl_c_is_pressed_again(ray: _Ray) -> None:
    def join(_: float) -> None:
        raise KeyboardInterrupt

    workers, given_back = _workers(), threading.Event()
    workers._exit.callback(given_back.set)
    workers._job = SimpleNamespace(ident=1, join=join, is_alive=lambda: True)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        workers.close("Ctrl-C was pressed")
    assert given_back.is_set()


def test_calls_are_over_even_if_actors_cannot_be_told(ray: _Ray) -> None:
    workers = _workers(SimpleNamespace(over=SimpleNamespace(remote=_unreachable)))
    call = Call([None])
    workers._calls.add(call)
    with pytest.raises(RuntimeError, match="cannot be reached"):
        workers._over(None)
    assert call.done.is_set()
    assert isinstance(call.error, JobFailedError)


def test_a_free_node_gets_what_a_busy_one_cannot_start(ray: _Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    actors = _actors(most=1)
    actors._adjust()
    actors._adjust()
    (waiting,) = ray.begun
    assert waiting.node == "a", "Ray still has time to start it"
    monkeypatch.setattr(elastic, "_PENDING", 0.0)
    actors._adjust()
    assert [each.node for each in ray.begun] == ["a", "b"]
    assert ray.killed == [waiting], "there are never more than the job may have"
    ray.begun[1].up.set_result(None)
    monkeypatch.setattr(elastic, "_PAUSES", (0.0, 0.0))
    actors._nodes["a"].again_at = 0.0
    actors._adjust()
    assert len(ray.begun) == 2, "an actor that is up stays"


def test_the_pause_after_an_actor_grows_until_one_has_lived(ray: _Ray) -> None:
    actors = _actors()
    node = elastic._Node()
    ended: Future[int] = Future()
    ended.set_result(0)
    for up_at, pause in ((None, 2.0), (monotonic(), 4.0), (monotonic() - 1000.0, 2.0)):
        node.actors[0] = elastic._Kept(SimpleNamespace(), monotonic(), up_at)
        actors._ended(node, 0, ended)
        assert node.pause == pause


def test_a_discovery_that_blocks_does_not_keep_a_job_that_is_over(ray: _Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def block() -> dict[str, int]:
        asked.set()
        assert go_on.wait(60)
        return {"a": 1, "b": 1}

    monkeypatch.setattr(elastic, "_LOOK_END", 0.05)
    actors = _actors(SimpleNamespace(find_available_hosts_and_slots=block))
    with actors:
        assert asked.wait(60)
    assert actors._thread.is_alive()
    go_on.set()
    actors._thread.join(60)
    assert not actors._thread.is_alive()
    assert ray.begun == [], "whatever it returns then, nothing is started"
