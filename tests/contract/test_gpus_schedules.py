"""Programs that hypothesis makes up, on simulated GPUs that do their work in whatever order hypothesis chooses.

Every rank runs the same collectives, each on streams and GPUs of its own; tensors are let go of as soon as they have
been handed over; some rank joins early, and some are lost at any point. Whatever happens, results are right or an error
is raised, and no two accesses to one memory lack an order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from hvdgloo._backends import gpu  # noqa: E402
from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._collectives.process_sets import ProcessSet  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.errors import HorovodInternalError  # noqa: E402
from hvdgloo.torch._adapter import TorchAdapter  # noqa: E402
from hvdgloo.types import ReduceOp  # noqa: E402
from tests.support.gpus import Schedule, Simulated, on_gpu, simulated  # noqa: E402
from tests.support.gpus.worlds import world  # noqa: E402

KINDS = ["allreduce", "in place", "allgather", "broadcast", "group", "alltoall", "reducescatter"]
SIZE = 3
SOME = settings(
    max_examples=4,
    phases=[Phase.generate],  # a world that hangs would have to do so again and again before a smaller one is found
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    database=None,
)


@dataclass(frozen=True)
class Step:
    """One collective: which, of how many rows, on which of a rank's streams, and whether it is waited for at once."""

    kind: str
    rows: int
    stream: int
    waits: bool
    in_set: bool


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(KINDS),
        st.sampled_from([1, 5, 40]),
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=7,
)
SCHEDULES = st.builds(Schedule, st.sampled_from(["late", "early", "any"]), st.integers(0, 99))


class Program:
    """A rank's part."""

    def __init__(self, gpus: Simulated, context: Context) -> None:
        self.gpus, self.rank = gpus, context.rank
        self.hvd = Frontend(TorchAdapter(), lambda: context)
        self.pair = self.hvd.add_process_set(ProcessSet([0, 2]))
        device = self.rank % 2
        self.streams = [gpus.machine.default_stream(device), *(gpus.machine.new_stream(device) for _ in range(2))]
        self.device = device
        self.pending: list[tuple[Any, Any, int]] = []

    def run(self, steps: list[Step]) -> None:
        for number, step in enumerate(steps):
            self.begin(number, step)
        self.end()

    def begin(self, number: int, step: Step) -> None:
        if step.in_set and not self.pair.included():
            return
        members = [0, 2] if step.in_set else list(range(SIZE))
        with self.gpus.machine.on_stream(self.streams[step.stream]):
            own = [torch.full((step.rows * len(members), 2), 100.0 * number + rank) for rank in range(SIZE)]
            tensor = on_gpu(own[self.rank], self.device)
            tensor += 1
            handle = self.start(step, tensor)
            # What the program makes next is likely to be where the tensor was.
            del tensor
            gpu.empty((step.rows * len(members), 2), torch.float32, torch.device("cuda", self.device)).fill_(-1)
        self.pending.append((handle, self.expected(step, [own[rank] + 1 for rank in members], members), step.stream))
        if step.waits:
            self.end()

    def start(self, step: Step, tensor: Any) -> Any:
        hvd, kwargs = self.hvd, {"process_set": self.pair} if step.in_set else {}
        if step.kind == "allreduce":
            return hvd.allreduce_async(tensor, op=ReduceOp.SUM, **kwargs)
        if step.kind == "in place":
            return hvd.allreduce_async_(tensor, op=ReduceOp.SUM, **kwargs)
        if step.kind == "allgather":
            return hvd.allgather_async(tensor, **kwargs)
        if step.kind == "broadcast":
            return hvd.broadcast_async(tensor, 2, **kwargs)
        if step.kind == "group":
            return hvd.grouped_allreduce_async([tensor, tensor * 2], op=ReduceOp.SUM, **kwargs)
        if step.kind == "alltoall":
            return hvd.alltoall_async(tensor, **kwargs)
        return hvd.reducescatter_async(tensor, op=ReduceOp.SUM, **kwargs)

    def expected(self, step: Step, tensors: list[Any], members: list[int]) -> list[list[float]]:
        place, rows = members.index(self.rank), step.rows
        total = torch.stack(tensors).sum(0)
        results = {
            "allgather": [torch.cat(tensors)],
            "broadcast": [tensors[-1]],
            "group": [total, 2 * total],
            "alltoall": [torch.cat([tensor[place * rows : (place + 1) * rows] for tensor in tensors])],
            "reducescatter": [total[place * rows : (place + 1) * rows]],
        }.get(step.kind, [total])
        return [result.flatten().tolist() for result in results]

    def end(self) -> None:
        """Wait for all that is under way, on the streams that it belongs to, and look at the results."""
        pending, self.pending = self.pending, []
        for handle, expected, stream in pending:
            with self.gpus.machine.on_stream(self.streams[stream]):
                result = self.hvd.synchronize(handle)
                results = list(result) if isinstance(result, list) else [result]
                if isinstance(result, tuple):
                    results = [result[0]]
                assert [(each * 1).flatten().tolist() for each in results] == expected


@SOME
@given(steps=STEPS, schedule=SCHEDULES, completion=st.sampled_from(["host", "stream"]))
def test_any_program_in_any_order(steps: list[Step], schedule: Schedule, completion: str) -> None:
    with simulated(schedule) as gpus, world(gpus, SIZE, gpu_completion=completion) as made:
        made.run(lambda context: Program(gpus, context).run(steps))


@SOME
@given(steps=STEPS, schedule=SCHEDULES, early=st.integers(0, 2), after=st.integers(0, 6))
def test_a_rank_joins_at_any_point(steps: list[Step], schedule: Schedule, early: int, after: int) -> None:
    """The others' sums lack its part from then on; what it contributes is not on its GPU, and in no rank's way."""
    steps = [step for step in steps if step.kind in ("allreduce", "in place") and not step.in_set]

    def body(context: Context) -> None:
        program = Program(gpus, context)
        for number, step in enumerate(steps):
            if number >= after and context.rank == early:
                break
            left = [rank for rank in range(SIZE) if number < after or rank != early]
            program.begin(number, step)
            handle, _, stream = program.pending.pop() if program.pending else (None, None, 0)
            if handle is not None:
                total = sum(100.0 * number + rank + 1 for rank in left)
                program.pending.append((handle, [[total] * (step.rows * SIZE * 2)], stream))
        program.end()
        program.hvd.join()

    steps = [Step(step.kind, step.rows, step.stream, False, False) for step in steps]
    with simulated(schedule) as gpus, world(gpus, SIZE) as made:
        made.run(body)


@SOME
@given(
    steps=STEPS,
    schedule=SCHEDULES,
    completion=st.sampled_from(["host", "stream"]),
    lost=st.integers(0, 2),
    at=st.integers(0, 6),
    hangs=st.booleans(),
)
def test_a_rank_is_lost_at_any_point(
    steps: list[Step], schedule: Schedule, completion: str, lost: int, at: int, hangs: bool
) -> None:
    """3.7: the program frees its tensors when it gets the error; GPUs go on with what they were given, if at all."""
    with simulated(schedule) as gpus:
        if hangs:
            gpus.nccl.faults.hangs_after_abort.update(range(SIZE))

        def body(context: Context) -> None:
            try:
                program = Program(gpus, context)
                for number, step in enumerate(steps):
                    if number == at and context.rank == lost:
                        break
                    program.begin(number, step)
                if context.rank == lost:
                    gpus.nccl.faults.lost.add(lost)
                    context.engine._control.close()
                program.end()
                program.hvd.barrier()
            except HorovodInternalError:
                pass
            program = None
            for _ in range(4):
                gpu.empty((30, 2), torch.float32, torch.device("cuda", context.rank % 2)).fill_(-1)

        with world(gpus, SIZE, gpu_completion=completion, operation_timeout=1.0) as made:
            made.run(body)
        gpus.machine.finish()
