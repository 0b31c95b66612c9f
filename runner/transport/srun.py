"""Agents started by Slurm's srun, so that nothing of a job runs outside its allocation.

One job step for each node: each has a stream of its own, and a failing node does not take the other nodes' steps down
with it. The step shares the node with whatever else the job runs there, and has all of the job's cores, memory and GPUs
on it; the agent divides them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.processes.bootstrap import CommandStream, agent_argv
from hvdgloo.runner.transport.failures import Cause, Diagnosis, Ending, Retry, other_failure, python_failure

_WISHES = re.compile(
    r"SLURM_(N?TASKS|NPROCS|NTASKS_PER_.*|TASKS_PER_NODE|NNODES|CPUS_PER_.*|GPUS_PER_TASK|GPU_BIND.*|CPU_BIND.*"
    r"|MEM_.*|THREADS_PER_CORE|TRES_PER_TASK|HINT|DISTRIBUTION|EXACT|EXCLUSIVE|STEP_.*|LABELIO|UNBUFFEREDIO"
    r"|STDINMODE|STDOUTMODE|STDERRMODE|MPI_TYPE|MULTI_PROG|WCKEY|THREADS)"
)
"""Variables through which a job's own settings for its tasks would affect the agents' steps."""


class SrunSpawner:
    """One job step for each node.

    Args:
        environ: of the launcher, in which srun finds its job and its controller.
    """

    def __init__(self, reach: Reach, job_id: str, environ: Mapping[str, str]) -> None:
        self._reach = reach
        self._job_id = job_id
        self._environ = step_environment(environ)

    def start(self, host: HostEntry) -> CommandStream:
        return CommandStream(srun_argv(host, self._reach, self._job_id), environ=self._environ)

    def is_local(self, host: HostEntry) -> bool:
        return False

    def diagnose(self, host: HostEntry, ending: Ending) -> Diagnosis:
        return diagnose(ending, self._reach)


def srun_argv(host: HostEntry, reach: Reach, job_id: str) -> tuple[str, ...]:
    """Return the command line for one node."""
    return (
        "srun",
        f"--jobid={job_id}",
        f"--nodelist={host.name}",
        "--nodes=1",
        "--ntasks=1",
        "--mem=0",  # all of the job's memory on the node
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=1",
        "--chdir=/",
        *agent_argv(reach.python),
    )


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which srun is started.

    ``SLURM_OVERLAP`` is ``--overlap`` (share the node with the job's other steps), which releases before 20.11 refuse
    as an option, but which is their default.
    """
    kept = {name: value for name, value in environ.items() if _WISHES.fullmatch(name) is None}
    return {**kept, "SLURM_OVERLAP": "1"}


_BUSY = re.compile(
    r"temporarily (disabled|unavailable)|nodes are busy|Unable to contact slurm controller|Socket timed out"
)
_GONE = re.compile(
    r"Invalid job id|already completing or completed|Job has expired|allocation .* revoked", re.IGNORECASE
)
_EXECVE = re.compile(r"execve\(\): .*(No such file or directory|Permission denied)|fork_exec_wait|not found")


def diagnose(ending: Ending, reach: Reach) -> Diagnosis:
    """Explain why a step ended without an agent."""
    found = python_failure(ending, reach.python)
    if found is None and _EXECVE.search(ending.text) and reach.python in ending.text:
        found = python_failure(Ending(127, ending.lines), reach.python)
    if found is not None:
        return found
    said = other_failure(ending, "srun").text
    if _GONE.search(ending.text):
        return Diagnosis(Cause.OTHER, f"{said}; is the allocation over?")
    if _BUSY.search(ending.text):
        return Diagnosis(Cause.NOT_THERE, said, Retry.A_FEW_TIMES)
    return Diagnosis(Cause.OTHER, said)
