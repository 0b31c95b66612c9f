"""Jobs on agents that come by themselves, brought by threads and processes that stand for another system's tasks."""

from __future__ import annotations

import ctypes
import io
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from hvdgloo._net.frame_mac import FrameMac
from hvdgloo.errors import JobFailedError, RemoteTraceback
from hvdgloo.rendezvous._host_identity import host_identity
from hvdgloo.runner.inbound.job import run_function
from hvdgloo.runner.inbound.listener import TaskListener
from hvdgloo.runner.inbound.sealed import SealedChannel
from hvdgloo.runner.inbound.task import Invitation
from hvdgloo.runner.job.spec import Times
from hvdgloo.runner.network.probe import probe_key
from hvdgloo.runner.protocol.frames import Beat
from tests.support.inbound import PATIENCE, Tasks, eventually, gathered, process
from tests.support.launching import hold_interpreter, is_running
from tests.support.threads import Task

_SO_ATTACH_FILTER = 26

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc"),
    pytest.mark.usefixtures("clean_variables"),
]


def run(listener: TaskListener, func: Any, *args: Any, **options: Any) -> list[Any]:
    return run_function(listener, func, args, stdout=io.StringIO(), stderr=io.StringIO(), **options)


def lines(text: str) -> set[str]:
    return set(text.splitlines())


def test_two_tasks_of_one_machine_are_one_host_with_shared_memory() -> None:
    def work(base: int) -> tuple[list[int], float, str]:
        import numpy as np

        import hvdgloo.numpy as hvd

        hvd.init()
        sys.stdout.write(f"rank {hvd.rank()} is here\n")
        places = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
        return (
            places,
            float(hvd.allreduce(np.array([base + hvd.rank()]), op=hvd.Sum)[0]),
            os.environ["HVDGLOO_HOSTNAME"],
        )

    out = io.StringIO()
    with gathered({"name": "executor 1"}, {"name": "executor 2"}) as (listener, tasks):
        results = run_function(listener, work, (10,), stdout=out, stderr=io.StringIO())
    name = socket.gethostname()
    assert results == [([0, 2, 0, 2, 0, 1], 21.0, name), ([1, 2, 1, 2, 0, 1], 21.0, name)]
    assert lines(out.getvalue()) == {"[0]<stdout>:rank 0 is here", "[1]<stdout>:rank 1 is here"}
    assert tasks.ended == {0: 0, 1: 0}


def test_a_worker_has_what_its_task_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folder, module path, environment, devices; the job's environment is added, and the launcher's is not."""
    options = []
    for index in range(2):
        folder = tmp_path / f"task{index}"
        (folder / "files").mkdir(parents=True)
        (folder / "files" / "mine.py").write_text(f"NAME = 'module of task {index}'")
        env = {"CUDA_VISIBLE_DEVICES": str(index), "OMP_NUM_THREADS": "3"}
        options.append({"cwd": str(folder), "path": [str(folder / "files"), *sys.path], "env": env})
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "ours.py").write_text("")
    (shared / "mine.py").write_text("NAME = 'the job s own'")

    def work() -> tuple[str, ...]:
        import mine
        import ours  # noqa: F401 - it is found behind the task's own folders

        names = (
            "CUDA_VISIBLE_DEVICES",
            "OMP_NUM_THREADS",
            "WANTED",
            "HVDGLOO_LOG_LEVEL",
            "OF_THE_TASK",
            "OF_THE_DRIVER",
        )
        return (os.getcwd(), mine.NAME, *(os.environ.get(name, "") for name in names))

    monkeypatch.setenv("OF_THE_TASK", "seen")  # whose environment is this process's, too
    with gathered(*options) as (listener, _):
        monkeypatch.setenv("OF_THE_DRIVER", "not seen")
        monkeypatch.setenv("HVDGLOO_LOG_LEVEL", "error")
        env = {"WANTED": "yes", "CUDA_VISIBLE_DEVICES": "7", "PYTHONPATH": str(shared)}
        results = run(listener, work, env=env)
    for index, found in enumerate(results):
        folder = str(tmp_path / f"task{index}")
        assert found == (folder, f"module of task {index}", str(index), "3", "yes", "error", "seen", "")


def test_tasks_that_share_no_memory_are_several_hosts() -> None:
    def work() -> tuple[int, int, str, str]:
        import hvdgloo.numpy as hvd

        hvd.init()
        return hvd.local_size(), hvd.cross_size(), os.environ["GROUP_RANK"], os.environ["GROUP_WORLD_SIZE"]

    machines = [{"machine": "container 1"}, {"machine": "container 2"}]
    with gathered(*machines) as (listener, _):
        assert run(listener, work) == [(1, 2, "0", "2"), (1, 2, "1", "2")]


def test_the_usual_machine_is_the_host_and_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    with gathered({}) as (listener, _):
        assert listener.arrived[0].machine.split() == [host_identity()]
    monkeypatch.setenv("CONTAINER_ID", "container_01")
    with gathered({}) as (listener, _):
        assert listener.arrived[0].machine.split() == [host_identity(), "container_01"]


def test_results_of_any_size_come_back() -> None:
    with gathered({}, {}) as (listener, _):
        assert [len(each) for each in run(listener, lambda: b"x" * 20_000_000)] == [20_000_000] * 2


def test_an_exception_is_raised_again_with_rank_and_place() -> None:
    def work() -> None:
        if os.environ["HVDGLOO_RANK"] == "1":
            raise ValueError("no good")
        time.sleep(60)

    with gathered({}, {"name": "executor 9"}) as (listener, _), pytest.raises(ValueError, match="no good") as caught:
        run(listener, work)
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert (cause.rank, cause.host) == (1, f"{socket.gethostname()} (executor 9)")


def test_a_worker_that_is_killed_is_named_with_its_place() -> None:
    def work() -> None:
        if os.environ["HVDGLOO_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with gathered({}, {"name": "executor 9"}) as (listener, _), pytest.raises(JobFailedError) as caught:
        run(listener, work)
    assert caught.value.signal == signal.SIGKILL
    assert f"rank 1 on host {socket.gethostname()} (executor 9) was killed by signal 9" in str(caught.value)


class Recorder:
    """Stands between tasks and the launcher, and keeps all that passes."""

    def __init__(self, target: tuple[str, int], connections: int) -> None:
        self.passed: list[bytes] = []
        self._target = target
        self._connections = connections
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE)
        self.endpoint = self._listener.getsockname()
        self._thread = threading.Thread(target=self._pass, daemon=True)
        self._thread.start()

    def join(self) -> bytes:
        """Everything, once all connections have ended."""
        self._thread.join(PATIENCE)
        return b"".join(self.passed)

    def _pass(self) -> None:
        others: dict[socket.socket, socket.socket] = {}
        with self._listener, selectors.DefaultSelector() as selector:
            for _ in range(self._connections):
                near = self._listener.accept()[0]
                far = socket.create_connection(self._target)
                others |= {near: far, far: near}
                for sock in (near, far):
                    selector.register(sock, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    sock = cast("socket.socket", key.fileobj)
                    data = b""
                    with suppress(OSError):
                        data = sock.recv(1 << 16)
                    if data:
                        self.passed.append(data)
                    else:
                        selector.unregister(sock)
                    with suppress(OSError):
                        others[sock].sendall(data) if data else others[sock].shutdown(socket.SHUT_WR)
        for sock in others:
            sock.close()


def test_the_secret_is_not_on_the_stream() -> None:
    """Nor its hexadecimal form, nor the key of probes; but the workers have it."""

    def work() -> str:
        import hvdgloo.numpy as hvd

        hvd.init()
        return os.environ["HVDGLOO_SECRET"]

    with TaskListener(2, addresses=["127.0.0.1"]) as listener:
        recorder = Recorder(listener.invitation.endpoints[0], 2)
        invitation = Invitation((recorder.endpoint,), listener.secret)
        tasks = Tasks(invitation, [{}, {}])
        listener.gather()
        secret = listener.secret
        found = run(listener, lambda: len(work()), nics=("lo",))  # so that addresses are looked at, with a key
        assert found == [64, 64]
    tasks.join()
    passed = recorder.join()
    assert len(passed) > 4000
    for hidden in (secret, secret.hex().encode(), probe_key(secret)):
        assert hidden not in passed


# Ends.


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Any]:
    """Two tasks that are processes; the second one may be killed."""
    with TaskListener(2, addresses=["127.0.0.1"], start_timeout=PATIENCE) as listener:
        tasks = [process(listener.invitation, index, name=f"executor {index}") for index in range(2)]
        listener.gather()
        yield listener, tasks
    for task in tasks:
        task.kill()
        task.wait(PATIENCE)
        assert task.stdin is not None
        task.stdin.close()


def marked(path: Path) -> Any:
    """A function whose workers leave their process ids, start a process, and do not end by themselves."""

    def work() -> None:
        child = subprocess.Popen(["sleep", "600"])
        rank = os.environ["HVDGLOO_RANK"]
        (path / f"{rank}.tmp").write_text(json.dumps([os.getpid(), child.pid, os.getppid()]))
        os.rename(path / f"{rank}.tmp", path / f"{rank}.json")
        time.sleep(600)

    return work


def started(path: Path) -> list[int]:
    eventually(lambda: all((path / f"{rank}.json").exists() for rank in range(2)))
    return [pid for rank in range(2) for pid in json.loads((path / f"{rank}.json").read_text())]


def gone(pids: list[int]) -> None:
    eventually(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_agent_ends_with_its_task_and_the_other_system_says_why(
    processes: Any, tmp_path: Path, how: signal.Signals
) -> None:
    listener, tasks = processes
    running = Task(lambda: run(listener, marked(tmp_path)))
    pids = started(tmp_path)
    began = time.monotonic()
    os.kill(tasks[1].pid, how)
    tasks[1].wait(PATIENCE)
    listener.fail("executor 1 was lost: exit code 137")
    error = running.failure(PATIENCE)
    took = time.monotonic() - began
    gone(pids)
    assert isinstance(error, JobFailedError)
    assert "executor 1 was lost: exit code 137" in str(error)
    assert took < PATIENCE / 2


def waiting(folder: Path) -> Any:
    """A function that ends when a file is there."""

    def work() -> None:
        (folder / f"ready{os.environ['RANK']}").touch()
        while not (folder / "enough").exists():
            time.sleep(0.01)

    return work


def test_a_driver_whose_interpreter_is_held_is_not_lost(processes: Any, tmp_path: Path) -> None:
    """Its machine still acknowledges what agents send there. With Spark, it may be any call of the user's program."""
    listener, _ = processes
    running = Task(lambda: run(listener, waiting(tmp_path), times=Times(heartbeat_timeout=0.5)))
    eventually(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
    hold_interpreter(2.0)
    (tmp_path / "enough").touch()
    running.result(PATIENCE)


def test_tasks_may_come_while_a_driver_s_interpreter_is_held() -> None:
    with TaskListener(1, addresses=["127.0.0.1"], start_timeout=30) as listener:
        task = process(listener.invitation, 0, connect_timeout=0.5)
        hold_interpreter(4.0)  # in which the task arrives
        assert len(listener.gather()) == 1
    with task:
        assert task.wait(PATIENCE) == 0


def test_a_driver_s_machine_that_acknowledges_nothing_is_lost() -> None:
    drop_all = ctypes.create_string_buffer(struct.pack("@HBBI", 0x06, 0, 0, 0))  # a filter that returns 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        agent = socket.create_connection(server.getsockname())
        driver, _ = server.accept()
    with agent, driver:
        channel = SealedChannel(
            agent.fileno(), os.dup(agent.fileno()), sending=FrameMac(b"s"), receiving=FrameMac(b"r"), secret=b""
        )
        channel.send(Beat())
        eventually(lambda: channel.unanswered() == 0.0)
        driver.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(drop_all)))
        channel.send(Beat())
        eventually(lambda: channel.unanswered() >= 0.5)
        os.close(channel.send_fd)


def test_without_a_word_from_outside_the_task_s_end_is_the_reason(processes: Any, tmp_path: Path) -> None:
    listener, tasks = processes
    running = Task(lambda: run(listener, marked(tmp_path)))
    pids = started(tmp_path)
    tasks[1].kill()
    error = running.failure(PATIENCE)
    gone(pids)
    assert f"{socket.gethostname()} (executor 1) ended its workers, because its task has ended" in str(error)


def test_what_goes_wrong_outside_ends_the_job(processes: Any, tmp_path: Path) -> None:
    listener, tasks = processes
    running = Task(lambda: run(listener, marked(tmp_path)))
    pids = started(tmp_path)
    listener.fail("the Spark job was cancelled")
    error = running.failure(PATIENCE)
    gone(pids)
    assert isinstance(error, JobFailedError)
    assert str(error).startswith("the job failed: the Spark job was cancelled")
    assert [task.wait(PATIENCE) for task in tasks] == [0, 0]


def test_an_agent_that_waits_for_the_beginning_ends_with_its_task(processes: Any) -> None:
    listener, tasks = processes
    agents = [child.pid for task in tasks for child in psutil.Process(task.pid).children(recursive=True)]
    assert agents
    for task in tasks:
        task.kill()
    gone(agents)
    eventually(lambda: listener.arrived == ())


_DRIVER = """
import sys, time
from hvdgloo.runner.inbound.job import run_function
from hvdgloo.runner.inbound.listener import TaskListener
from tests.support.inbound import process
from tests.processes.test_inbound import marked
from pathlib import Path
with TaskListener(2, addresses=["127.0.0.1"]) as listener:
    tasks = [process(listener.invitation, index) for index in range(2)]
    print(*(task.pid for task in tasks), flush=True)
    listener.gather()
    run_function(listener, marked(Path(sys.argv[1])))
"""


def test_nothing_is_left_of_a_launcher_that_was_killed(tmp_path: Path) -> None:
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    tasks = [int(pid) for pid in driver.stdout.readline().split()]
    pids = started(tmp_path)
    driver.kill()
    driver.wait(PATIENCE)
    driver.stdout.close()
    gone([*pids, *tasks])
