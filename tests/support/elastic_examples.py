"""Shared parts of the tests of programs that are written as Horovod's documentation teaches: one of two workers is
killed, another one takes its place, and both come to the end together."""

from __future__ import annotations

import os
import signal

from tests.support.elastic_launch import Job

SAYING = """
import os

def say(what, step):
    places = hvd.rank(), hvd.size(), hvd.local_rank(), step, os.getpid(), os.environ["HVDGLOO_WORKER"]
    print(what, *places, flush=True)
"""
"""In front of the program, whose ``hvd`` it uses: what ``Training`` reads."""


def lose_one_and_get_another(job: Job, victim: int, program: str, python: str, **env: str) -> None:
    """Run a program that says ``epoch`` whenever its training function begins, and ``over`` in the end."""
    flags = ["-np", "2", "--min-np", "1", "--failures-per-host", "99", "--as-horovod", python]
    job.start(*flags, program=SAYING + program, env={"OMP_NUM_THREADS": "1", **env})
    first = job.members(1, 2)
    os.kill(first[victim].pid, signal.SIGKILL)
    again = job.members(2, 2)
    # The survivor has an epoch of its own only if it notices the loss before the newcomer is there.
    alone = [line for line in job.said if line.size == 1]
    survivor = first[1 - victim]
    assert {each.pid for each in [*alone, again[0]]} == {survivor.pid}, "the survivor stays the process that it is"
    assert again[1].pid not in {each.pid for each in first}
    steps = [each.step for each in [survivor, *alone, again[0]]]
    assert steps == sorted(steps)
    assert again[1].step == again[0].step, "the newcomer goes on where the other one is"
    assert job.finished() == 0, job.error
    over = job.members(1, 2, "over")
    assert over[0].step == over[1].step > again[0].step
    assert "Traceback" not in job.error


def follow_three_sizes(job: Job, program: str, rate: str, of_one: float, python: str, **env: str) -> None:
    """Run an elastic program of a page's with two workers, then three, then one, and look at its learning rate.

    Args:
        program: ends once there is a file named ``over``; its function ``train`` begins again with each change.
        rate: the expression for its learning rate.
        of_one: the rate that is right for one worker.
    """
    begins = "def train(state):\n"
    assert begins in program
    program = program.replace(begins, f'{begins}    say("epoch", round(1000 * float({rate})))\n')
    flags = ["-np", "2", "--min-np", "1", *job.discovers("localhost:2"), python]
    job.start(*flags, program=SAYING + program, env={"OMP_NUM_THREADS": "1", **env})
    for size in (2, 3, 1):
        job.discovers(f"localhost:{size}")
        assert [member.step for member in job.members(1, size)] == [round(1000 * of_one * size)] * size
    assert job.finished() == 0, job.error
    assert "Traceback" not in job.error
