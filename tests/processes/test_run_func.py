"""``hvdgloo.run.run``: a function on several processes, from wherever it is called."""

from __future__ import annotations

import inspect
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import hvdgloo
import hvdgloo.run
from hvdgloo.errors import (
    ConfigError,
    InvalidArgumentError,
    JobFailedError,
    LaunchError,
    PeerLostError,
    RemoteTraceback,
)
from tests.support import warm
from tests.support.launching import clean_environment, hold_interpreter, run_command, wait_for
from tests.support.threads import Task, at_once

_PYTHON = sys.executable


@pytest.fixture(autouse=True)
def _warm(monkeypatch: pytest.MonkeyPatch, clean_variables: None) -> None:
    # The interpreter of the workers of those jobs that a test itself launches.
    monkeypatch.setattr(sys, "executable", warm.python(*warm.NUMPY))


class OwnError(Exception):
    """Needs two arguments, which its pickle has."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)
        self.number = number


class ForgetfulError(Exception):
    """Cannot be built again from what it keeps."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_results_come_in_the_order_of_ranks(tmp_path: Path) -> None:
    def work(base: int, *, factor: int) -> tuple[int, int, int]:
        rank = int(os.environ["HVDGLOO_RANK"])
        if rank < 2:  # the last one ends first
            _wait_for_the_end_of(tmp_path / f"pid{rank + 1}")
        _tell_pid(tmp_path / f"pid{rank}")
        return rank, base + factor * rank, int(os.environ["WORLD_SIZE"])

    assert hvdgloo.run.run(work, (100,), {"factor": 10}, 3) == [(0, 100, 3), (1, 110, 3), (2, 120, 3)]


def _tell_pid(path: Path) -> None:
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def _wait_for_the_end_of(path: Path) -> None:
    """Wait until the process that tells its number there has ended, and its agent knows."""
    wait_for(path.exists)
    wait_for(lambda: not psutil.pid_exists(int(path.read_text())))


def test_the_module_itself_can_be_called() -> None:
    """Horovod's ``horovod.run`` is a package in one version and a function in another; here it is both."""
    captured = 17
    assert hvdgloo.run(lambda: captured, np=2) == [17, 17]
    assert hvdgloo.run.run(lambda: captured, num_proc=2) == [17, 17]


def test_a_worker_s_exception_is_raised_with_its_traceback_rank_and_host() -> None:
    def work() -> None:
        if os.environ["RANK"] == "1":
            raise OwnError(5, "broken")
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(OwnError) as caught:
        hvdgloo.run.run(work, np=2)
    assert time.monotonic() - started < 10
    assert caught.value.number == 5
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert (cause.rank, cause.host) == (1, "localhost")
    assert 'raise OwnError(5, "broken")' in cause.traceback
    assert "raised by rank 1 on host localhost" in str(cause)
    assert (caught.value.rank, caught.value.host) == (1, "localhost")  # type: ignore[attr-defined]


def test_an_exception_that_cannot_travel_is_told_in_words() -> None:
    def work() -> None:
        raise ForgetfulError(1, 2)

    with pytest.raises(JobFailedError, match="ForgetfulError: 1 and 2") as caught:
        hvdgloo.run.run(work)
    assert caught.value.rank == 0
    assert "raise ForgetfulError(1, 2)" in str(caught.value)


def test_the_culprit_is_raised_and_not_a_rank_that_merely_lost_it(tmp_path: Path) -> None:
    ready, noticed = tmp_path / "ready", tmp_path / "noticed"

    def work() -> None:
        if os.environ["RANK"] == "0":
            wait_for(ready.exists)
            _tell_pid(noticed)
            raise PeerLostError("rank 1 is gone", rank=1)
        # It takes longer to end than the rank that noticed.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ready.touch()
        _wait_for_the_end_of(noticed)
        raise ValueError("the reason")

    with pytest.raises(ValueError, match="the reason"):
        hvdgloo.run.run(work, np=2)


def test_a_killed_worker() -> None:
    def work() -> None:
        if os.environ["RANK"] == "1":
            sys.stdout.write("last words\n")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(JobFailedError, match="rank 1 on host localhost was killed by signal 9") as caught:
        hvdgloo.run.run(work, np=2)
    error = caught.value
    assert (error.rank, error.host, error.exit_code, error.signal) == (1, "localhost", 137, 9)
    assert error.last_lines == ("last words",)
    assert pickle.loads(pickle.dumps(error)).rank == 1


@pytest.mark.parametrize(("code", "status"), [(3, 3), (0, 1), ("bye", 1)])
def test_sys_exit_in_the_function(code: Any, status: int) -> None:
    def work() -> None:
        sys.exit(code)

    with pytest.raises(JobFailedError) as caught:
        hvdgloo.run.run(work, np=2)
    assert f"called sys.exit({code!r})" in str(caught.value)
    assert caught.value.exit_code == status


def test_leaving_without_a_result() -> None:
    with pytest.raises(JobFailedError, match="left no result"):
        hvdgloo.run.run(lambda: os._exit(0), np=2)


def test_what_cannot_be_pickled() -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidArgumentError, match="cannot be sent to the workers"):
        hvdgloo.run.run(lambda: lock)
    with pytest.raises(JobFailedError, match=r"rank 0 .*returned a lock that cannot be pickled"):
        hvdgloo.run.run(threading.Lock)


@pytest.mark.extended
def test_a_result_of_200_megabytes() -> None:
    def work() -> bytes:
        return bytes(200_000_000) if os.environ["RANK"] == "0" else b"\1"

    first, second = hvdgloo.run.run(work, np=2)
    assert len(first) == 200_000_000
    assert (first[:1], second) == (b"\0", b"\1")


def test_a_large_argument_reaches_every_rank() -> None:
    data = os.urandom(1_000_000) * 50
    assert hvdgloo.run.run(lambda: (len(data), data[-20:]), np=2) == [(50_000_000, data[-20:])] * 2


def test_numpy_arrays() -> None:
    import numpy as np

    results = hvdgloo.run.run(np.arange, (5,), np=2)
    assert all(np.array_equal(result, [0, 1, 2, 3, 4]) for result in results)


def test_output_goes_to_the_caller_s_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        sys.stdout.write(f"from {os.environ['RANK']} ü\n")
        sys.stderr.write("error\n")

    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    hvdgloo.run.run(work, np=2)
    assert sorted(out.getvalue().splitlines()) == ["[0]<stdout>:from 0 ü", "[1]<stdout>:from 1 ü"]
    assert sorted(err.getvalue().splitlines()) == ["[0]<stderr>:error", "[1]<stderr>:error"]


def test_output_files_environment_and_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def work() -> tuple[str, str]:
        sys.stdout.write("to the file\n")
        return os.environ["EXTRA"], os.getcwd()

    assert hvdgloo.run.run(work, np=2, output_filename="logs", env={"EXTRA": "1"}) == [("1", str(tmp_path))] * 2
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "to the file\n"


def test_from_another_thread() -> None:
    assert len(set(Task(lambda: hvdgloo.run.run(os.getpid, np=2)).result(30))) == 2


def test_two_jobs_at_once() -> None:
    def launch(number: int) -> list[int]:
        return hvdgloo.run.run(lambda: number, np=2)

    assert at_once(lambda: launch(0), lambda: launch(1), timeout=30) == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"use_mpi": True}, ConfigError, "there is no MPI here"),
        ({"use_mpi": True, "use_gloo": True}, ConfigError, "exclude each other"),
        ({"min_num_proc": 2, "np": 1}, ConfigError, "--min-np 2 exceeds -np 1"),
        ({"min_num_proc": "h1:2"}, ConfigError, "give hosts by name"),
        ({"np": 2, "num_proc": 3}, ConfigError, "two names for one thing"),
        ({"np": 1, "host_discovery_script": "x.sh"}, ConfigError, "x.sh: there is no such file"),
        ({"np": 0}, ConfigError, "at least one process"),
        ({"np": 3, "hosts": "localhost:2"}, ConfigError, "only 2 slots"),
        ({"hosts": "localhost:2", "hostfile": "f"}, ConfigError, "not both"),
        ({"hosts": "no-such-host.invalid:2"}, LaunchError, "its name cannot be looked up"),
        ({"network_interfaces": "no such"}, ConfigError, "no such"),
        ({"agent_command": "kubectl exec {pod}"}, ConfigError, "--agent-command"),
        ({"executable": "/no/such/python"}, JobFailedError, "could not be started"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        hvdgloo.run.run(int, **arguments)


def test_arguments_that_change_nothing_here() -> None:
    assert hvdgloo.run.run(int, use_gloo=True, ssh_port=22, disable_cache=True, network_interfaces="lo") == [0]


def test_all_slots_of_the_hosts_are_the_default() -> None:
    assert hvdgloo.run.run(int, hosts="localhost:3") == [0, 0, 0]
    assert hvdgloo.run.run(int) == [0]


def test_old_names_warn_and_work() -> None:
    with pytest.warns(DeprecationWarning, match=r"write network_interfaces="):
        assert hvdgloo.run.run(int, np=2, network_interface="lo") == [0, 0]
    with pytest.warns(UserWarning, match="no effect"):
        assert hvdgloo.run.run(int, mpi_args="--oversubscribe") == [0]


def test_numbers_of_processes_have_two_names_each_as_on_the_command_line(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(ConfigError, match="--min-np 3 exceeds -np 2"):
        hvdgloo.run.run(int, np=2, min_np=3)
    with pytest.raises(ConfigError, match="--max-np is for"):
        hvdgloo.run.run(int, num_proc=2, max_np=2)
    with pytest.raises(ConfigError, match="min_num_proc=1 and min_np=2 are two names for one thing"):
        hvdgloo.run.run(int, min_num_proc=1, min_np=2)
    assert not recwarn.list


def test_the_order_of_arguments_is_horovod_s() -> None:
    """Scripts may give them by position, as in ``horovod.run(func, args, kwargs, num_proc)``."""
    names = (
        "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile "
        "host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo "
        "use_mpi mpi_args network_interface network_interfaces executable np min_np max_np"
    )
    parameters = inspect.signature(hvdgloo.run.run).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == names.split()


def run_program(text: str, folder: Path, *, name: str = "program.py") -> subprocess.CompletedProcess[str]:
    (folder / name).write_text(textwrap.dedent(text))
    return run_command([_PYTHON, name], cwd=folder, env=clean_environment(), timeout=40)


def test_from_a_script_whose_main_defines_everything(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("def double(x): return 2 * x\n")
    done = run_program(SCRIPT, tmp_path)
    assert done.stdout.splitlines() == ["[0, 2, 4]", "caught as planned"], done.stderr


SCRIPT = """
import os
import hvdgloo.run
import helper

class Problem(Exception):
    pass

def work(fail):
    if fail:
        raise Problem("as planned")
    return helper.double(int(os.environ["RANK"]))

# No guard against being imported: the workers do not run this file.
print(hvdgloo.run.run(work, (False,), np=3))
try:
    hvdgloo.run.run(work, (True,), np=2)
except Problem as problem:
    print("caught", problem)
"""


def test_from_exec_as_in_a_notebook(tmp_path: Path) -> None:
    cell = (
        "def work():\n    return help_me()\ndef help_me():\n    return 41 + offset\noffset = 1\n"
        "result = hvdgloo.run.run(work, np=2)"
    )
    done = run_program(
        f"""
        import hvdgloo.run
        for name in ("__main__", "a_notebook", None):
            space = {{"hvdgloo": hvdgloo, **({{"__name__": name}} if name else {{}})}}
            exec({cell!r}, space)
            print(space["result"])
        """,
        tmp_path,
    )
    assert done.stdout.splitlines() == ["[42, 42]"] * 3, done.stderr


def test_ctrl_c_reaches_the_workers_and_raises_here(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import os, time
            import hvdgloo.run

            def work():
                rank = os.environ["RANK"]
                try:
                    open(f"ready{rank}", "w").write("1")
                    time.sleep(60)
                except KeyboardInterrupt:
                    time.sleep(0.3)
                    open(f"saved{rank}", "w").write("1")
                    raise

            try:
                hvdgloo.run.run(work, np=2)
            except KeyboardInterrupt:
                print("interrupted", sorted(os.listdir(".")))
            """
        )
    )
    process = subprocess.Popen(
        [_PYTHON, "program.py"], cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for(lambda: (tmp_path / "ready0").exists() and (tmp_path / "ready1").exists())
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert b"interrupted ['program.py', 'ready0', 'ready1', 'saved0', 'saved1']" in out


def test_the_caller_is_left_as_it_was() -> None:
    """No thread, descriptor, child or signal handler stays behind."""
    hvdgloo.run.run(int, np=1)
    children = psutil.Process().children()  # other tests' warm interpreters
    before = (_descriptors(), threading.active_count(), signal.getsignal(signal.SIGINT))
    for _ in range(3):
        hvdgloo.run.run(int, np=2)
    assert (_descriptors(), threading.active_count(), signal.getsignal(signal.SIGINT)) == before
    assert psutil.Process().children() == children


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_pain_30_a_function_is_unpickled_only_after_its_seal_was_checked(tmp_path: Path) -> None:
    """A task that is given bytes which were not sealed with its secret ends without looking into them."""
    from hvdgloo.runner.worker import function_task

    trap = tmp_path / "sprung"
    bomb = pickle.dumps((["x"], _Bomb(str(trap))))
    for payload in (
        bomb,
        b"\0" * 32 + bomb,
        function_task.pack_function(int, (), {}, b"another secret of 32 bytes......"),
    ):
        (tmp_path / "function").write_bytes(payload)
        with open(tmp_path / "function", "rb") as function, open(tmp_path / "outcome", "wb") as outcome:
            done = run_command(
                [*function_task.command(_PYTHON), str(function.fileno()), str(outcome.fileno())],
                pass_fds=(function.fileno(), outcome.fileno()),
                env={**clean_environment(), "HVDGLOO_SECRET": "ab" * 32, "HVDGLOO_RANK": "0"},
                timeout=30,
            )
        assert done.returncode == 1
        assert "AuthenticationError" in done.stderr
        assert (tmp_path / "outcome").read_bytes() == b""
    assert not trap.exists()


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.path),))


def test_the_other_ranks_learn_what_was_raised(tmp_path: Path) -> None:
    said = tmp_path / "said"

    def work() -> None:
        import numpy as np

        import hvdgloo.numpy as hvd

        hvd.init()
        hvd.barrier()  # a rank that is still in init() may be ended before it learns anything
        if hvd.rank() == 1:
            raise ValueError("bad data")
        try:
            hvd.allreduce(np.ones(2))
        except hvd.HorovodInternalError as error:
            said.write_text(str(error))
            raise

    with pytest.raises(ValueError, match="bad data"):
        hvdgloo.run.run(work, np=2)
    assert re.search(r"rank 1 .* ended with ValueError: bad data", said.read_text())


def test_another_thread_s_long_call_does_not_end_the_job_on_other_hosts(tmp_path: Path) -> None:
    """Such as ``sorted`` of a long list, in a notebook: no other thread of this process runs meanwhile."""

    def work() -> str:
        (tmp_path / "ready").touch()
        while not (tmp_path / "enough").exists():
            time.sleep(0.01)
        return "done"

    def hold() -> None:
        wait_for((tmp_path / "ready").exists)
        hold_interpreter(6.0)
        (tmp_path / "enough").touch()

    thread = Task(hold)
    assert hvdgloo.run.run(work, np=1, hosts="h1:1", agent_command="env {command}") == ["done"]
    thread.result()


@pytest.mark.parametrize("value", [0, -1, "long"])
def test_a_silence_that_no_process_can_keep_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"run\(heartbeat_timeout={value!r}\): it "):
        hvdgloo.run.run(print, heartbeat_timeout=value)
