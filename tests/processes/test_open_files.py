"""Limits on open files: processes that would hold many connections name the limit to raise, before they begin."""

from __future__ import annotations

import re
import select
import sys
from contextlib import ExitStack
from functools import partial

import pytest

from hvdgloo.rendezvous import RendezvousClient, RendezvousServer
from tests.support.launching import Launcher, clean_environment, run_command, wait_for
from tests.support.rendezvous import SECRET, info
from tests.support.threads import Task

HARD = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
SOFT = ("sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh")
SENTENCE = r"needs (\d+) more open files for .*, but (\d+) are open, .* 256\. .* to (\d+), .*`ulimit -n \3`"
RANKS = 300


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in a text's sentence: how many files are needed, how many are open, and what limit would do."""
    found = re.search(SENTENCE, text)
    assert found is not None, text
    return tuple(map(int, found.groups()))


@pytest.mark.parametrize("command", [("worker.py",), ("doctor",)], ids=["job", "doctor"])
def test_a_launcher_of_many_agents(launcher: Launcher, command: tuple[str, ...]) -> None:
    hosts = ",".join(f"n{number}:1" for number in range(100))
    launcher.script("")
    options = ("--agent-command", "env HOST={host}", "-H", hosts)
    arguments = (*options, *command) if command != ("doctor",) else (*command, *options)
    done = launcher.run(*arguments, wrapper=HARD)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "this launcher needs 300 more open files for the commands that lead to 100 hosts" in done.stderr
    needed, held, enough = numbers(done.stderr)
    assert enough >= needed + held
    launcher.assert_nothing_left()


def test_a_rendezvous_server_of_many_workers() -> None:
    command = [*HARD, sys.executable, "-m", "hvdgloo.rendezvous", "-np", "300"]
    done = run_command(command, env={**clean_environment(), "HVDGLOO_SECRET": SECRET.hex()}, timeout=30)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "the rendezvous server needs 300 more open files for its workers' connections" in done.stderr
    numbers(done.stderr)


@pytest.mark.parametrize("wrapper", [HARD, SOFT], ids=["hard", "soft"])
def test_rank_0_of_many(wrapper: tuple[str, ...]) -> None:
    """All others have registered; rank 0 knows how many they are."""
    program = "import hvdgloo.numpy as hvd; hvd.init()"
    with ExitStack() as stack:
        server = stack.enter_context(RendezvousServer(secret=SECRET, hosts=[("h", RANKS)]))
        clients = [stack.enter_context(RendezvousClient(server.endpoint, SECRET)) for _ in range(1, RANKS)]
        others = [
            Task(partial(client.register, 0, info(rank=rank, host_name="h"), timeout=20))
            for rank, client in enumerate(clients, 1)
        ]
        done = run_command(
            [*wrapper, sys.executable, "-c", program],
            env={
                **clean_environment(),
                "HVDGLOO_RENDEZVOUS": server.endpoint,
                "HVDGLOO_SECRET": SECRET.hex(),
                "HVDGLOO_RANK": "0",
                "HVDGLOO_CONNECT_TIMEOUT": "1",
            },
            timeout=30,
            check=False,
        )
        assert [other.result().rank for other in others] == list(range(1, RANKS))
    assert done.returncode == 1
    assert "Too many open files" not in done.stderr
    if wrapper is SOFT:  # which is raised: it waits for others, which do not come
        assert "rank 0 waited 1 s" in done.stderr
        return
    assert "_net/" not in done.stderr, "the traceback ends at the caller's line"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("hvdgloo.errors.ConfigError: rank 0 (host h, pid ")
    assert f"needs {RANKS - 1} more open files for control connections of other ranks" in last
    numbers(last)


@pytest.mark.parametrize("limit", [48, 64, 268])
def test_two_ranks_train_where_few_files_may_be_open(launcher: Launcher, limit: int) -> None:
    """268 is what the launcher's own sentence recommends to who has fewer than it needs."""
    script = launcher.script(
        "import numpy as np, hvdgloo.numpy as hvd; hvd.init(); print(hvd.allreduce(np.ones(1), op=hvd.Sum))"
    )
    few = ("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh")
    done = launcher.run("-np", "2", "--no-prefix", "--log-ranks", "0", script, wrapper=few)
    assert (done.returncode, done.stdout) == (0, "[2.]\n"), done.stderr


def test_an_agent_of_many_workers(launcher: Launcher) -> None:
    """The launcher and its server would have enough."""
    few = ("sh", "-c", 'ulimit -n 84; exec "$@"', "sh")
    done = launcher.run("-np", "40", "true", wrapper=few)
    assert done.returncode == 126
    assert "rank 0 on host localhost could not be started: the agent on this host needs 80 more" in done.stderr
    assert "`ulimit -n " in done.stderr
    launcher.assert_nothing_left()


def test_connected_clients_stay_when_there_is_no_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has room for as many connections as there are workers closes none of them to make room."""
    monkeypatch.setattr(RendezvousServer, "_room", lambda _: 2)
    with ExitStack() as stack:
        server = stack.enter_context(RendezvousServer(secret=SECRET, size=2))
        clients = [stack.enter_context(RendezvousClient(server.endpoint, SECRET)) for _ in range(2)]
        tasks = [Task(partial(client.register, 0, info(host_name="h"), timeout=20)) for client in clients]
        assert sorted(task.result().rank for task in tasks) == [0, 1]
        before = [client.descriptors for client in clients]
        for client in clients:
            client.local_address(timeout=5)
        assert [client.descriptors for client in clients] == before
        newcomer = stack.enter_context(RendezvousClient(server.endpoint, SECRET))
        newcomer.local_address(timeout=5)
        assert wait_for(lambda: sum(map(hung_up, clients)) == 1)
        for client in clients:  # whose connection was closed, has another
            client.local_address(timeout=5)


def hung_up(client: RendezvousClient) -> bool:
    """Tell whether the server has closed the client's connection, which the client does not use at the moment."""
    return bool(select.select(client.descriptors, [], [], 0)[0])
