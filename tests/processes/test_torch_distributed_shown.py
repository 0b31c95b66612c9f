"""Operations of torch.distributed over hvdgloo, as metrics, the job's page, its report and its timeline show them."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes.test_torch_distributed import run
from tests.support.launching import Launcher, clean_environment, launcher_in, run_command

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs Linux")

HEAD = """
import os, threading, time
import torch
import torch.distributed as dist
import hvdgloo.torch.distributed

def begin(name):
    store = f"file://{os.getcwd()}/store-{name}"
    dist.init_process_group("hvdgloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
"""


def report_of(folder: Path, program: str, *flags: str) -> dict[str, Any]:
    """Run two ranks under hvdgloo-run, which must succeed; returns the page's last data."""
    with launcher_in(folder) as launcher:
        script = launcher.script(HEAD + program)
        done = launcher.run("-np", "2", "--report", "job.html", *flags, script, timeout=60)
        assert done.returncode == 0, done.stderr
    snapshot: dict[str, Any] = json.loads((folder / "job.json").read_text())["snapshot"]
    return snapshot


def test_metrics_count_calls_and_bytes_by_kind(tmp_path: Path) -> None:
    code = """
from hvdgloo.torch.distributed import metrics
begin()
other = 1 - rank
four, eight = torch.zeros(4), torch.zeros(8)
large = torch.zeros(50_000)
dist.all_reduce(four)
dist.all_reduce(large)
dist.all_reduce(four, async_op=True).wait()
dist.all_reduce(four.bfloat16())
dist.broadcast(four, 1)
dist.all_gather_into_tensor(eight, four)
dist.reduce_scatter_tensor(four, eight)
dist.all_to_all_single(eight, torch.zeros(8))
dist.gather(four, [four.clone(), four.clone()] if rank == 0 else None, 0)
dist.scatter(four, [four.clone(), four.clone()] if rank == 0 else None, 0)
dist.reduce(four, 0)
dist.barrier()
group = dist.new_group([0, 1])
dist.all_reduce(four, group=group)
if rank == 0:
    dist.send(eight, 1)
    dist.recv(four, 1, tag=7)
else:
    dist.recv(eight, 0)
    dist.send(four, 0, tag=7)
counted = metrics()
planes = {name: (plane.operations, plane.bytes) for name, plane in counted.planes.items()}
assert planes == {
    "dist.all_reduce": (5, 16 + 200_000 + 16 + 8 + 16), "dist.broadcast": (1, 16), "dist.all_gather": (1, 16),
    "dist.reduce_scatter": (1, 32), "dist.all_to_all": (1, 32), "dist.gather": (1, 16),
    "dist.scatter": (1, 32 if rank == 0 else 16), "dist.reduce": (1, 16), "dist.barrier": (1, 0),
    "dist.send": (1, 32 if rank == 0 else 16), "dist.recv": (1, 16 if rank == 0 else 32),
}, planes
assert (counted.rank, counted.size, counted.operations) == (rank, 2, 15), counted
dist.barrier()
before = metrics()
if rank == 1:
    time.sleep(0.3)
dist.all_reduce(four)
changed = metrics() - before
if rank == 0:
    assert changed.waiting > 0.2 and changed.negotiation > 0.2, changed
    assert changed.planes["dist.all_reduce"].seconds < 0.2, changed
dist.destroy_process_group()
assert metrics().operations == 17
"""
    run(2, code, tmp_path, HVDGLOO_TIMELINE=str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())
    names = [event["name"] for event in events if "bytes" in event.get("args", {})]
    assert len(names) == 17, names
    assert {"ALL_REDUCE", "BARRIER", "SEND", "RECV"} <= set(names)


def test_numbers_are_logged_without_a_context_and_averaged_over_the_group(tmp_path: Path) -> None:
    code = """
from hvdgloo.torch.distributed import log, metrics
try:
    log(loss=1.0, average=True)
    raise AssertionError("no error")
except ValueError as error:
    assert "init_process_group" in str(error), error
begin()
log(loss=torch.tensor(2.0 + rank), step=0, steps=10)
assert metrics().logged == {"loss": 2.0 + rank}, metrics()
log(loss=torch.tensor(2.0 + rank), accuracy=rank, average=True)
assert metrics().logged == {"loss": 2.5, "accuracy": 0.5}, metrics()
dist.destroy_process_group()
"""
    run(2, code, tmp_path)


def test_nothing_is_counted_where_the_user_wants_no_counts(tmp_path: Path) -> None:
    code = """
from hvdgloo.torch.distributed import metrics
begin()
dist.all_reduce(torch.zeros(4))
dist.all_reduce(torch.zeros(4), async_op=True).wait()
assert metrics().operations == 0 and not metrics().planes
dist.destroy_process_group()
"""
    run(2, code, tmp_path, HVDGLOO_OBSERVE="0")


def test_the_page_shows_operations_and_names_the_late_rank(tmp_path: Path) -> None:
    """Steps are the first optimizer's; the rank is named though it is late for one operation of two only."""
    code = """
begin("late")
other, parameter = torch.optim.SGD([torch.zeros(1)]), torch.zeros(1)
optimizer = torch.optim.SGD([parameter])
for step in range(60):
    if dist.get_rank() == 1:
        time.sleep(0.02)
    dist.all_reduce(parameter)
    dist.all_reduce(torch.ones(1000))
    optimizer.step()
    other.step()
dist.destroy_process_group()
"""
    snapshot = report_of(tmp_path, code)
    ranks = snapshot["ranks"]
    assert [ranks[name] for name in ("rank", "steps", "operations")] == [[0, 1], [60, 60], [120, 120]], ranks
    assert ranks["bytes"] == 2 * [60 * 4004], ranks
    assert ranks["waiting"][0] > ranks["waiting"][1], ranks
    (late,) = snapshot["stragglers"]
    assert (late["rank"], late["unit"]) == (1, "steps"), late
    assert late["share"] > 0.8, late
    assert late["seconds"] > 0.01, late
    (plane,) = snapshot["planes"]
    assert (plane["name"], plane["ranks"], plane["operations"]) == ("dist.all_reduce", 2, 240), plane
    assert plane["why"].startswith("shared memory: all ranks are on host "), plane


def test_the_timeline_has_the_operations_and_destroyed_groups_leave_nothing_behind(tmp_path: Path) -> None:
    code = """
found = []
for name in ("first", "second", "third"):
    begin(name)
    names = {thread.name for thread in threading.enumerate()}
    assert {"hvdgloo-reporter", "hvdgloo-timeline"} <= names, names
    dist.all_reduce(torch.ones(8))
    dist.broadcast(torch.ones(8), 0, async_op=True).wait()
    if dist.get_rank() == 1:
        time.sleep(0.05)
    dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    found.append((sorted(thread.name for thread in threading.enumerate()), len(os.listdir("/proc/self/fd"))))
assert found[1] == found[2] and found[2][0] == ["MainThread"], found
"""
    report_of(tmp_path, code, "--timeline-filename", "trace.{rank}.json")
    for rank, number in itertools.product(range(2), ("", "-2", "-3")):
        events = json.loads((tmp_path / f"trace.{rank}{number}.json").read_text())
        named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        shown = [
            (event["name"], event["args"])
            for event in events
            if event["ph"] == "X" and named[event["pid"]] == "the default process group" and "args" in event
        ]
        assert shown == [
            ("ALL_REDUCE", {"call": "all_reduce(SUM, 8 x float32)", "bytes": 32}),
            ("BROADCAST", {"call": "broadcast(32 bytes, root 0)", "bytes": 32}),
            ("ALL_REDUCE", {"call": "all_reduce(SUM, 2 x float32)", "bytes": 8}),
        ]
        waits = [event["dur"] for event in events if event["name"] == "WAIT_FOR_RANKS_ALL_REDUCE"]
        assert rank == 1 or max(waits) > 30_000


def test_an_operation_under_way_is_shown_with_the_ranks_that_it_waits_for(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from hvdgloo.torch.distributed import _record, metrics
begin()
shown, seen = _record.ProcessGroups(), Path(os.environ["JOB_FOLDER"], "seen")
for asynchronous in (False, True):
    dist.barrier()
    if rank == 0:
        def call():
            work = dist.all_reduce(torch.zeros(4), async_op=asynchronous)
            if asynchronous:
                work.wait()
        thread = threading.Thread(target=call)
        thread.start()
        until = time.monotonic() + 10
        while not (missing := shown.missing(0.1)):
            assert time.monotonic() < until
            time.sleep(0.005)
        (one,) = missing
        assert (one.name, one.ranks, one.count) == ("all_reduce(SUM, 4 x float32)", [1], 1), one
        assert shown.oldest_pending()[0] == one.name
        assert metrics().waiting > 0.05
        seen.touch()
        thread.join()
        assert shown.missing(0.0) == [] and shown.oldest_pending() == ("", 0.0)
    else:
        until = time.monotonic() + 10
        while not seen.exists():
            assert time.monotonic() < until
            time.sleep(0.005)
        seen.unlink()
        dist.all_reduce(torch.zeros(4))
dist.destroy_process_group()
"""
    run(2, code, tmp_path)


def test_a_program_that_also_calls_init_has_one_reporter_and_all_counts(tmp_path: Path) -> None:
    code = """
import hvdgloo.torch as hvd
begin("store")
dist.all_reduce(torch.ones(8))
hvd.init()
hvd.allreduce(torch.ones(100_000))
dist.all_reduce(torch.ones(8))
reporters = [thread for thread in threading.enumerate() if thread.name == "hvdgloo-reporter"]
assert len(reporters) == 1, reporters
counted = hvd.metrics()
assert counted.planes["dist.all_reduce"].operations == 2 and counted.operations == 3, counted
dist.destroy_process_group()
hvd.shutdown()
"""
    snapshot = report_of(tmp_path, code)
    assert snapshot["ranks"]["operations"] == [3, 3]


def test_groups_that_outlive_the_job_they_were_made_in_are_shown_on(tmp_path: Path) -> None:
    """And their timeline does not overwrite the job's."""
    code = """
import hvdgloo.torch as hvd
hvd.init()
begin("store")
dist.all_reduce(torch.ones(8))
hvd.shutdown()
for _ in range(3):
    dist.broadcast(torch.ones(8), 0)
dist.destroy_process_group()
assert "hvdgloo-reporter" not in {thread.name for thread in threading.enumerate()}
"""
    snapshot = report_of(tmp_path, code, "--timeline-filename", "made/trace.json")
    assert snapshot["ranks"]["operations"] == [4, 4]
    first, second = ((tmp_path / "made" / name).read_text() for name in ("trace.json", "trace-2.json"))
    assert "ALL_REDUCE" in first
    assert "BROADCAST" not in first
    assert "BROADCAST" in second
    assert "ALL_REDUCE" not in second


def test_an_error_is_shown_with_the_program_s_own_line_and_not_repeated_by_the_launcher(launcher: Launcher) -> None:
    # Not a broadcast: its root may be done before any rank sees the difference.
    script = launcher.script(
        HEAD + "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher stops the rank that is second to fail\n"
        'begin("store")\ndist.all_reduce(torch.ones(2))\n'
        "dist.barrier() if dist.get_rank() else dist.all_reduce(torch.ones(4))\n"
    )
    done = launcher.run("-np", "2", script, timeout=50)
    assert done.returncode == 1
    assert done.stderr.count("dist.barrier() if dist.get_rank() else dist.all_reduce(torch.ones(4))") == 2
    assert "/hvdgloo/torch/" not in done.stderr
    assert "distributed_c10d.py" not in done.stderr
    assert "Its last lines were" not in done.stderr
    assert done.stderr.count("; all ranks of a group must call the same collectives") == 3  # each rank, and the summary


def test_a_variable_that_cannot_be_used_is_told_in_one_line_and_a_mistyped_one_too(tmp_path: Path) -> None:
    """Without hvdgloo-run, which checks them before it starts anything."""
    call = "dist.init_process_group('hvdgloo', store=dist.HashStore(), rank=0, world_size=1)"
    environ = {**clean_environment(), "HVDGLOO_OPERATION_TIMEOUT": "soon"}
    command = [sys.executable, "-W", "ignore", "-c", f"import torch.distributed as dist\n{call}"]
    done = run_command(command, env=environ, timeout=50, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert line.startswith("hvdgloo.errors.ConfigError: HVDGLOO_OPERATION_TIMEOUT: 'soon' cannot be used: expected")
    environ = {**clean_environment(), "HVDGLOO_OPERATION_TIMOUT": "3"}
    done = run_command(command, env=environ, timeout=50, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("there is no setting HVDGLOO_OPERATION_TIMOUT") == 1, done.stderr
