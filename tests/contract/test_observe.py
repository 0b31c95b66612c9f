"""Counters of a job's ranks: data that they exchange, waits, and the ranks that caused them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdgloo._collectives.frontend import Frontend
from hvdgloo._collectives.process_sets import ProcessSet
from hvdgloo._engine.settings import Choice
from hvdgloo._job.context import Context
from hvdgloo._job.observing import _Rank
from hvdgloo._job.single_rank import open_single_rank
from hvdgloo._observe.counters import Counters
from hvdgloo.config import Config
from hvdgloo.errors import InvalidArgumentError, MismatchError
from hvdgloo.types import Metrics, PlaneMetrics
from tests.support import world as world_module
from tests.support.frameworks import Framework, load
from tests.support.rendezvous import until
from tests.support.world import MakeWorld, World

DEADLINE = 30.0

frontend_of = load("numpy").frontend


def test_what_is_exchanged_is_counted_by_plane(world: MakeWorld, backend: str) -> None:
    made = world(2)

    def rank_body(context: Context) -> tuple[Metrics, str]:
        hvd = frontend_of(context)
        for _ in range(3):
            hvd.allreduce(np.ones(1000, np.float32), name="x")  # 4,000 bytes: never inline
        hvd.allgather(np.ones((1 + context.rank, 500), np.float32), name="y")
        handles = [hvd.allreduce_async(np.ones(1000, np.float32), name=f"z{i}") for i in range(4)]
        for handle in handles:
            hvd.synchronize(handle)
        (_, _, plane, _), *_ = context.engine.planes
        return context.metrics(), plane.label

    for rank, (metrics, plane) in enumerate(made.run(rank_body)):
        assert (metrics.rank, metrics.size) == (rank, 2)
        assert metrics.operations == 8
        assert metrics.bytes == 7 * 4000 + 2000 * (1 + rank)
        assert metrics.planes[plane].operations == 8
        assert 0 < metrics.planes[plane].seconds < DEADLINE
        assert 0 < metrics.wire < DEADLINE
        assert 0 < metrics.negotiation < DEADLINE
        assert metrics.queue > 0
        assert metrics.cpu_seconds > 0
        assert metrics.memory > 1 << 20


def test_tiny_tensors_and_barriers_go_with_the_agreement(ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> Metrics:
        hvd = frontend_of(context)
        hvd.allreduce(np.ones(2, np.float32), name="x")
        hvd.barrier()
        return context.metrics()

    for metrics in ranks(2).run(rank_body):
        agreement = metrics.planes["agreement"]
        assert (agreement.operations, agreement.bytes) == (2, 8)


def test_process_sets_are_counted_apart_and_shown_with_their_planes(ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> tuple[Any, Any]:
        hvd = frontend_of(context)
        pair = ProcessSet([0, 1])
        hvd.add_process_set(pair)
        if pair.included():
            hvd.allreduce(np.ones(2000, np.float32), process_set=pair)
        hvd.barrier()
        counters = context.engine.counters
        assert counters is not None
        carried = {key: traffic.bytes for key, traffic in counters.traffic.items() if traffic.bytes}
        return carried, [(p.name, p.process_set, p.why) for p in _Rank(context.config, context.engine, 0.0).planes()]

    results = ranks(3, inline_threshold=0).run(rank_body)
    for carried, planes in results[:2]:
        assert carried == {("alone", 1): 8000}
        assert [(name, number) for name, number, _ in planes] == [("alone", 0), ("alone", 1)]
        assert all(why for _, _, why in planes), planes
    assert results[2][0] == {}
    assert [number for _, number, _ in results[2][1]] == [0]


def late(
    context: Context, who: int, others: threading.Barrier, waiting: Sequence[Counters], delay: float, rounds: int
) -> Metrics:
    """One rank submits each operation a while after all others wait for theirs."""
    hvd = frontend_of(context)
    for number in range(rounds):
        if context.rank != who:
            handle = hvd.allreduce_async(np.ones(2000, np.float32), name=f"{number % 2}")
            others.wait(DEADLINE)
        else:
            others.wait(DEADLINE)
            until(lambda: all(counters.blocked_in is not None for counters in waiting), "the others wait", DEADLINE)
            time.sleep(delay)
            handle = hvd.allreduce_async(np.ones(2000, np.float32), name=f"{number % 2}")
        hvd.synchronize(handle)
        context.end_step()
    return context.metrics()


@pytest.mark.parametrize("who", [0, 1, 3, 5])
@pytest.mark.parametrize(("control", "slots"), [("inline", None), ("tree", (2, 3, 1)), ("tree", (1, 2, 2, 1))])
def test_it_is_known_who_made_the_others_wait_and_how_long(control: str, slots: Sequence[int] | None, who: int) -> None:
    size, delay, rounds = 6, 0.05, 8
    made = World(size, control, slots=slots)
    try:
        others = threading.Barrier(size)
        kept = [context.engine.counters for context in made.contexts if context.rank != who]
        waiting = [counters for counters in kept if counters is not None]
        results = made.run(lambda context: late(context, who, others, waiting, delay, rounds))
        counters = made.contexts[0].engine.counters
        assert counters is not None
        assert counters.lateness is not None
        totals = counters.lateness.totals()
    finally:
        made.close()
    assert totals.rounds == rounds - 1  # it is not known when the first step began
    by_rank = {rank.rank: rank for rank in totals.ranks}
    assert max(by_rank, key=lambda rank: by_rank[rank].seconds) == who
    assert by_rank[who].seconds >= 0.5 * delay * by_rank[who].count
    for rank, metrics in enumerate(results):
        assert metrics.steps == rounds
        if rank != who:
            assert metrics.step_waiting >= 0.5 * delay * (rounds - 1)
            assert metrics.step_waiting + metrics.step_communicating <= metrics.step_seconds


def test_what_others_wait_for_is_known_on_rank_0(ranks: MakeWorld) -> None:
    made = ranks(3)
    contexts = made.contexts
    hvd = [frontend_of(context) for context in contexts]
    pending = [hvd[rank].allreduce_async(np.ones(9, np.float32), name="x") for rank in (0, 2)]
    subject = _Rank(contexts[0].config, contexts[0].engine, 0.0)
    end = time.monotonic() + DEADLINE
    while True:
        missing, stacks = subject.missing(0.01)
        if missing and missing[0].count == 1:
            break
        assert time.monotonic() < end
        time.sleep(0.005)
    assert [(each.name, list(each.ranks)) for each in missing] == [("allreduce.x", [1])]
    assert 0.01 <= missing[0].seconds < DEADLINE
    assert subject.oldest_pending()[0] == "allreduce.x"
    assert list(stacks) == []
    assert _Rank(contexts[1].config, contexts[1].engine, 0.0).missing(0.01) == ([], [])
    pending.append(hvd[1].allreduce_async(np.ones(9, np.float32), name="x"))
    for frontend, handle in zip((hvd[0], hvd[2], hvd[1]), pending, strict=True):
        frontend.synchronize(handle)
    assert subject.missing(0.0) == ([], [])
    assert subject.oldest_pending() == ("", 0.0)


def test_a_stall_is_noted_and_so_is_its_end(ranks: MakeWorld) -> None:
    made = ranks(2, stall_warning_time=0.2)
    hvd = [frontend_of(context) for context in made.contexts]
    counters = made.contexts[0].engine.counters
    assert counters is not None
    handles = [hvd[0].allreduce_async(np.ones(9, np.float32), name="x")]

    def kinds() -> list[str]:
        return [kind for _, kind, _ in list(counters.notes)]

    def wait(kind: str) -> None:
        end = time.monotonic() + DEADLINE
        while kind not in kinds():
            assert time.monotonic() < end
            time.sleep(0.01)

    wait("stall")
    assert made.contexts[0].engine.overdue(0.0)[1].keys() == {1}
    handles.append(hvd[1].allreduce_async(np.ones(9, np.float32), name="x"))
    for frontend, handle in zip(hvd, handles, strict=True):
        frontend.synchronize(handle)
    wait("stall ended")
    assert kinds()[0] == "stall"


def test_a_trace_ordered_while_another_is_written_is_refused(ranks: MakeWorld, tmp_path: Path) -> None:
    (context,) = ranks(1).contexts
    subject = _Rank(context.config, context.engine, 0.0)
    assert subject.start_trace(str(tmp_path / "a.json"))
    assert not subject.start_trace(str(tmp_path / "b.json"))
    subject.stop_trace()
    assert subject.start_trace(str(tmp_path / "b.json"))
    subject.stop_trace()
    assert (tmp_path / "a.json").exists()


def test_a_trace_that_is_asked_for_and_the_programs_own_are_both_whole(ranks: MakeWorld, tmp_path: Path) -> None:
    def names(file: str) -> set[str]:
        events = json.loads((tmp_path / file).read_text())
        tensors = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        return {tensors[event["pid"]] for event in events if event["name"] == "ALLREDUCE"}

    (context,) = ranks(1).contexts
    hvd = frontend_of(context)
    subject = _Rank(context.config, context.engine, 0.0)

    def step(name: str) -> None:
        hvd.allreduce(np.ones(9, np.float32), name=name)

    context.start_timeline(str(tmp_path / "own.json"))
    step("a")
    assert subject.start_trace(str(tmp_path / "asked.json"))
    step("b")
    context.stop_timeline()  # which ends the program's own alone
    step("c")
    context.start_timeline(str(tmp_path / "again.json"))
    step("d")
    subject.stop_trace()
    step("e")
    context.stop_timeline()
    assert names("own.json") == {"allreduce.a", "allreduce.b"}
    assert names("asked.json") == {"allreduce.b", "allreduce.c", "allreduce.d"}
    assert names("again.json") == {"allreduce.d", "allreduce.e"}


def test_the_difference_of_metrics_is_what_was_counted_in_between() -> None:
    earlier = Metrics(
        1, 4, operations=10, bytes=100, steps=2, last_step=0.5, planes={"gloo": PlaneMetrics(10, 100, 1.0)}
    )
    later = Metrics(
        1,
        4,
        operations=15,
        bytes=180,
        steps=3,
        last_step=0.25,
        memory=7,
        planes={"gloo": PlaneMetrics(12, 120, 1.5), "nccl": PlaneMetrics(3, 60, 0.5)},
    )
    between = later - earlier
    assert between == Metrics(
        1,
        4,
        operations=5,
        bytes=80,
        steps=1,
        last_step=0.25,
        memory=7,
        planes={"gloo": PlaneMetrics(2, 20, 0.5), "nccl": PlaneMetrics(3, 60, 0.5)},
    )
    with pytest.raises(TypeError):
        later - 1  # type: ignore[operator]


def test_settings_are_those_in_use_named_as_in_a_file(ranks: MakeWorld) -> None:
    made = ranks(2, fusion_threshold=8 << 20, stall_check_disable=True)
    subjects = [_Rank(context.config, context.engine, 0.0) for context in made.contexts]
    assert subjects[1].settings() is None
    shown = subjects[0].settings()
    assert shown is not None
    assert shown["params.fusion_threshold_mb"] == 8
    assert shown["stall_check.enabled"] is False
    assert not any("secret" in name or "tls" in name for name in shown)
    made.contexts[0].engine.tune(Choice(1 << 20, 0.005, 0, 64))

    def rank_body(context: Context) -> None:
        frontend_of(context).allreduce(np.ones(3000, np.float32), name="x")

    end = time.monotonic() + DEADLINE
    while (subjects[0].settings() or {})["params.fusion_threshold_mb"] != 1:
        made.run(rank_body)
        assert time.monotonic() < end
    assert (subjects[0].settings() or {})["params.cycle_time_ms"] == 5.0


def test_nothing_is_counted_where_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_module, "Counters", lambda: None)
    made = World(2, "inline")
    try:

        def rank_body(context: Context) -> Metrics:
            hvd = frontend_of(context)
            hvd.allreduce(np.ones(2, np.float32), name="x")
            hvd.allreduce(np.ones(2000, np.float32), name="y")
            hvd.end_step()
            return context.metrics()

        assert made.run(rank_body) == [Metrics(0, 2), Metrics(1, 2)]
    finally:
        made.close()


def test_totals_go_on_in_the_next_engine() -> None:
    """As in an elastic job's next epoch."""
    counters = Counters()
    config = Config()
    for epoch in (1, 2):
        engine = open_single_rank(config, counters=counters)
        context = Context(config, engine.topology, 0, engine)
        frontend_of(context).allreduce(np.ones(2000, np.float32), name="x")
        context.end_step()
        assert (context.metrics().operations, context.metrics().steps) == (epoch, epoch)
        context.close()


def test_the_optimizers_steps_are_counted_in_torch(ranks: MakeWorld) -> None:
    torch = pytest.importorskip("torch")
    from hvdgloo.torch._adapter import TorchAdapter
    from hvdgloo.torch._distributed_optimizer import wrap
    from hvdgloo.torch._parameters import ReductionOptions

    def rank_body(context: Context) -> Metrics:
        parameter = torch.nn.Parameter(torch.ones(3000))
        frontend = Frontend(TorchAdapter(), lambda: context)
        optimizer = wrap(frontend, torch.optim.SGD([parameter], lr=0.1), None, None, ReductionOptions())
        for _ in range(4):
            optimizer.zero_grad()
            (parameter * (1 + context.rank)).sum().backward()
            optimizer.step()
        return context.metrics()

    for size in (1, 2):
        for metrics in ranks(size).run(rank_body):
            assert metrics.steps == 4
            assert 0 < metrics.step_before_first <= metrics.step_seconds if size > 1 else metrics.step_seconds > 0


def test_numbers_that_a_program_logs_are_each_ranks_own_or_averages(framework: Framework, world: MakeWorld) -> None:
    made = world(3)

    def rank_body(context: Context) -> tuple[dict[str, float], dict[str, float]]:
        hvd = framework.frontend(context)
        hvd.log(loss=framework.float64([context.rank])[0], step=1, steps=4)
        hvd.log({"val/accuracy": 0.5}, epoch=0, epochs=2)
        own = dict(context.metrics().logged)
        hvd.log({"val/accuracy": context.rank}, loss=10.0 * context.rank, average=True)
        return own, dict(context.metrics().logged)

    for rank, (own, averaged) in enumerate(made.run(rank_body)):
        assert own == {"loss": rank, "val/accuracy": 0.5}
        assert averaged == {"loss": 10.0, "val/accuracy": 1.0}


def test_ranks_that_average_different_names_get_an_error_and_go_on(ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> dict[str, float]:
        hvd = frontend_of(context)
        with pytest.raises(MismatchError, match="averages need the same names on all ranks"):
            hvd.log({f"loss{context.rank}": 1.0}, average=True)
        hvd.log(loss=context.rank, average=True)
        return dict(context.metrics().logged)

    assert ranks(2).run(rank_body) == [{"loss": 0.5}, {"loss": 0.5}]


def test_logging_without_averages_needs_no_other_rank(ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> int:
        if context.rank == 0:
            frontend_of(context).log(loss=1.0, note="rank 0 alone")
        return context.metrics().operations

    assert ranks(2).run(rank_body) == [0, 0]


def test_a_wrong_call_of_log_is_an_error_before_anything_is_sent(ranks: MakeWorld) -> None:
    def rank_body(context: Context) -> int:
        hvd = frontend_of(context)
        for wrong in ({"loss": "low"}, {"loss": 1.0, "step": -1}, {"loss": 1.0, "note": ""}):
            with pytest.raises(InvalidArgumentError):
                hvd.log(**wrong, average=True)  # type: ignore[arg-type]
        assert not context.metrics().logged
        return context.metrics().operations

    assert ranks(2).run(rank_body) == [0, 0]
