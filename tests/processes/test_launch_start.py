"""The start of workers, their environment, and refusals: pains 19, 20, 28 (threads), 30 (secrets)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hvdgloo.run
from hvdgloo.config import GLOO_PROVIDERS
from tests.support import warm
from tests.support.frameworks import need_installed
from tests.support.launching import Launcher, clean_environment, run_command

DUMP = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv, sys.executable, os.getcwd()]))"


def dumps(done: subprocess.CompletedProcess[str]) -> dict[int, Any]:
    assert done.returncode == 0, done.stderr
    return {int(line[1]): json.loads(line.partition(">:")[2]) for line in done.stdout.splitlines()}


def test_every_worker_knows_its_place(launcher: Launcher) -> None:
    done = launcher.run("-np", "3", launcher.script(DUMP), "--lr", "1e-3", "-np", "7")
    assert "behind the program" not in done.stderr
    found = dumps(done)
    ports = set()
    for rank, (environ, argv, _, cwd) in found.items():
        assert argv == ["worker.py", "--lr", "1e-3", "-np", "7"]
        assert cwd == str(launcher.folder)
        for family in ("HVDGLOO", "HOROVOD"):
            places = {name: environ[f"{family}_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
            assert places == {"RANK": str(rank), "SIZE": "3", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "3"}
            assert (environ[f"{family}_CROSS_RANK"], environ[f"{family}_CROSS_SIZE"]) == ("0", "1")
            assert environ[f"{family}_HOSTNAME"] == "localhost"
        assert environ["HVDGLOO_EPOCH"] == "0"
        assert environ["HVDGLOO_ADDRESS"] == "127.0.0.1"
        host, _, port = environ["HVDGLOO_RENDEZVOUS"].partition(":")
        assert (environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == (host, port)
        assert (environ["HOROVOD_CONTROLLER"], environ["HOROVOD_CPU_OPERATIONS"]) == ("gloo", "gloo")
        assert (environ["RANK"], environ["WORLD_SIZE"]) == (str(rank), "3")
        assert (environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"]) == (str(rank), "3")
        assert (environ["ROLE_NAME"], environ["ROLE_RANK"], environ["ROLE_WORLD_SIZE"]) == ("default", str(rank), "3")
        assert (environ["GROUP_RANK"], environ["GROUP_WORLD_SIZE"], environ["NODE_RANK"]) == ("0", "1", "0")
        assert environ["TORCHELASTIC_RUN_ID"] == environ["HVDGLOO_JOB_ID"]
        assert (environ["TORCHELASTIC_RESTART_COUNT"], environ["TORCHELASTIC_MAX_RESTARTS"]) == ("0", "0")
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert environ["PYTHONUNBUFFERED"] == "1"
        assert len(bytes.fromhex(environ["HVDGLOO_SECRET"])) >= 16
        assert environ["HVDGLOO_JOB_ID"]
        ports.add(environ["MASTER_PORT"])
    assert sorted(found) == [0, 1, 2]
    assert len(ports) == 1
    assert not 32768 <= int(ports.pop()) <= 60999, "outgoing connections could take it"


def test_pain_19_the_user_s_environment_arrives_unharmed(launcher: Launcher) -> None:
    odd = {"ODD": "spaces 'quotes' \"double\" $HOME \n newline ü", "EMPTY": "", "BASH_FUNC_f%%": "() { :; }"}
    environ = {os.fsencode(k): os.fsencode(v) for k, v in clean_environment().items()}
    environ.update({os.fsencode(k): os.fsencode(v) for k, v in odd.items()})
    environ[b"BYTES"] = b"\xff\xfe"
    script = launcher.script(
        "import json, os; print(json.dumps([ascii(os.environ[k]) for k in os.environ['ASK'].split()]))"
    )
    environ[b"ASK"] = b"ODD EMPTY BASH_FUNC_f%% BYTES"
    done = run_command(
        [sys.executable, "-m", "hvdgloo.runner", "-np", "1", script], cwd=launcher.folder, env=environ, timeout=30
    )
    assert json.loads(done.stdout.partition(">:")[2]) == [*(ascii(v) for v in odd.values()), "'\\udcff\\udcfe'"]


@pytest.mark.parametrize(
    "command",
    [
        ["worker.py", "a b", "$x"],
        ["--", "worker.py", "a b", "$x"],
        ["python", "worker.py", "a b", "$x"],
        ["-m", "package.module", "a b", "$x"],
        ["./run.sh", "a b", "$x"],
        [sys.executable, "worker.py", "a b", "$x"],
    ],
    ids=["file", "dashes", "python", "module", "program", "interpreter"],
)
def test_ways_to_name_a_program(launcher: Launcher, command: list[str]) -> None:
    launcher.script(DUMP)
    (launcher.folder / "package").mkdir()
    launcher.script(DUMP, "package/module.py")
    shell = launcher.folder / "run.sh"
    shell.write_text(f'#!/bin/sh\nexec {sys.executable} worker.py "$@"\n')
    shell.chmod(0o755)
    # A search path without any python: "python" still means the interpreter that hvdgloo is installed for.
    found = dumps(launcher.run("-np", "2", *command, env={"PATH": "/nonexistent:/bin:/usr/bin"}))
    for _, argv, executable, _ in found.values():
        assert argv[1:] == ["a b", "$x"]
        assert executable == sys.executable


def test_a_user_s_module_of_any_name_disturbs_neither_launcher_nor_agent(launcher: Launcher) -> None:
    for name in ("runner", "rendezvous", "signal", "select", "json", "subprocess", "selectors", "psutil"):
        launcher.script("raise SystemExit('the wrong module was imported')", f"{name}.py")
    hvdgloo_run = Path(sys.executable).parent / "hvdgloo-run"
    command = [str(hvdgloo_run)] if hvdgloo_run.exists() else [sys.executable, "-P", "-m", "hvdgloo.runner"]
    done = run_command([*command, "-np", "2", "--", "echo", "fine"], cwd=launcher.folder, timeout=30)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:fine", "[1]<stdout>:fine"]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["-np", "2", "missing.py"], 2, "there is no file missing.py in"),
        (["-np", "2", "python", "missing.py"], 2, "there is no file missing.py in"),
        (["-np", "2", "no-such-program"], 2, "there is no program no-such-program in the search path"),
        (["tpo"], 2, "there is no program tpo in the search path; did you mean top?"),
        (["report"], 2, "there is no program report in the search path; did you mean report compare?"),
        (["timelin", "merge"], 2, "there is no program timelin in the search path; did you mean timeline merge?"),
        (["tunee", "-np", "2", "worker.py"], 2, "did you mean tune?"),
        (["-np", "2", "plain"], 2, "did you mean ./plain?"),
        (["-np", "2", "./plain"], 2, "./plain is not executable"),
        (["-np", "2", "-m", "no_such_module"], 2, "there is no module named 'no_such_module'"),
        (["-np", "2"], 2, "there is no command to run"),
        (["-nq", "2", "worker.py"], 2, "there is no option -nq; did you mean -np"),
        (["--fusion-treshold-mb", "2", "worker.py"], 2, "did you mean --fusion-threshold-mb"),
        (["-np", "0", "worker.py"], 2, "at least 1, not '0'"),
        (["-np", "two", "worker.py"], 2, "-np"),
        (["-np", "4", "-H", "localhost:2", "worker.py"], 2, "only 2 slots"),
        (["-np", "100000", "worker.py"], 2, "-np 100000: "),
        (["-np", "60000", "worker.py"], 2, "60000 processes would run on host localhost"),
        (["-H", "localhost:2,localhost:1", "worker.py"], 2, "host localhost is given twice"),
        (
            ["-H", "localhost:2", "localhost:2", "worker.py"],
            2,
            "localhost:2 was taken for the program to run; separate hosts",
        ),
        (["-H", "h1:2", ",h2:2", "worker.py"], 2, "separate hosts by commas, without spaces: -H h1:4,h2:4"),
        (["-H", "", "worker.py"], 2, "--hosts (-H) names no host; write for example: -H h1:4,h2:4"),
        (["-H", "localhost:x", "worker.py"], 2, "'localhost:x' is not a host with a number of slots"),
        (["-H", "localhost:2,127.0.0.1:2", "worker.py"], 2, "are all this machine"),
        (["-H", "no-such-host.invalid:2", "worker.py"], 1, "host no-such-host.invalid cannot be used"),
        (["--mpi", "-np", "2", "worker.py"], 2, "--mpi: there is only the Gloo controller"),
        (["-np", "1", "--min-np", "2", "worker.py"], 2, "--min-np 2 exceeds -np 1"),
        (["--fusion-threshold-mb", "-5", "worker.py"], 2, "--fusion-threshold-mb -5"),
        (["--log-level", "LOUD", "worker.py"], 2, "expected one of TRACE"),
        (["--stdin", "2", "-np", "2", "worker.py"], 2, "there are only ranks 0 to 1"),
        (["--config-file", "none.yaml", "worker.py"], 2, "--config-file none.yaml"),
        (["--hostfile", "none", "worker.py"], 2, "--hostfile none"),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    launcher: Launcher, arguments: list[str], status: int, text: str
) -> None:
    launcher.script("open('started', 'w').write('1')")
    (launcher.folder / "plain").write_text("not executable")
    done = launcher.run(*arguments)
    assert done.returncode == status
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (launcher.folder / "started").exists()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "own name", "[::1]"])
def test_names_of_this_machine(launcher: Launcher, host: str) -> None:
    import socket

    name = socket.gethostname() if host == "own name" else host
    if host == "[::1]" and not _has_ipv6_loopback():
        pytest.skip("no IPv6 loopback")
    found = dumps(launcher.run("-H", f"{name}:2", launcher.script(DUMP)))
    assert sorted(found) == [0, 1]
    assert found[0][0]["HVDGLOO_HOSTNAME"] == name.strip("[]")


def _has_ipv6_loopback() -> bool:
    import socket

    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_fewer_processes_than_slots_takes_exactly_that_many(launcher: Launcher) -> None:
    found = dumps(launcher.run("-np", "2", "-H", "localhost:4", launcher.script(DUMP)))
    assert sorted(found) == [0, 1]
    assert found[0][0]["WORLD_SIZE"] == "2"
    assert found[1][0]["LOCAL_WORLD_SIZE"] == "2"


def test_without_a_number_all_slots_are_taken(launcher: Launcher) -> None:
    (launcher.folder / "hosts").write_text("# my machine\n\nlocalhost slots=3  # all of it\n")
    found = dumps(launcher.run("--hostfile", "hosts", launcher.script(DUMP)))
    assert sorted(found) == [0, 1, 2]


def test_without_hosts_and_gpus_one_process_is_started_and_that_is_said(launcher: Launcher) -> None:
    done = launcher.run(launcher.script(DUMP), "-np", "2", env={"CUDA_VISIBLE_DEVICES": ""})
    assert sorted(dumps(done)) == [0]
    assert "starting 1 process (there is no GPU)" in done.stderr or "one for each" in done.stderr
    assert "-np follows the program" in done.stderr
    assert "write hvdgloo-run -np 2 worker.py\n" in done.stderr


def test_pain_28_threads_share_the_cores_and_the_user_s_choice_stays(launcher: Launcher) -> None:
    cores = len(os.sched_getaffinity(0))
    script = launcher.script(DUMP)
    done = launcher.run("-np", "2", script)
    for environ, *_ in dumps(done).values():
        assert environ["OMP_NUM_THREADS"] == environ["MKL_NUM_THREADS"] == str(max(1, cores // 2))
    assert "OMP_NUM_THREADS" not in done.stderr, "it would be said at every start"
    assert launcher.run("-np", "2", "--verbose", "true").stderr.count("OMP_NUM_THREADS=") == 1
    chosen = launcher.run("-np", "2", script, env={"OMP_NUM_THREADS": "7"})
    for environ, *_ in dumps(chosen).values():
        assert environ["OMP_NUM_THREADS"] == "7"
        assert "MKL_NUM_THREADS" not in environ
    assert "OMP_NUM_THREADS" not in chosen.stderr
    pinned = run_command(
        ["taskset", "-c", "0", sys.executable, "-m", "hvdgloo.runner", "-np", "1", script],
        cwd=launcher.folder,
        env=clean_environment(),
        timeout=30,
    )
    if os.cpu_count() != 1:
        assert dumps(pinned)[0][0]["OMP_NUM_THREADS"] == "1"


def test_many_more_workers_than_cores_are_remarked_on(launcher: Launcher) -> None:
    core = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
    for workers, remarks in ((8, 0), (9, 1)):
        done = launcher.run("-np", str(workers), "--", "true", wrapper=core)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(f"{workers} workers on 1 core of localhost: ") == remarks, done.stderr


def test_flags_and_files_set_the_workers_variables(launcher: Launcher) -> None:
    (launcher.folder / "settings.yaml").write_text(
        "params: {fusion_threshold_mb: 16, cycle_time_ms: 2.5, hierarchical_allreduce: true}\n"
        "stall_check: {enabled: false, warning_time_seconds: 30}\nlogging: {level: DEBUG}\n"
    )
    done = launcher.run(
        "--config-file", "settings.yaml", "--fusion-threshold-mb", "64", "--log-without-timestamp", "--tcp",
        "-np", "1", launcher.script(DUMP), env={"HVDGLOO_LOG_LEVEL": "ERROR"},
    )  # fmt: skip
    environ = dumps(done)[0][0]
    assert environ["HVDGLOO_FUSION_THRESHOLD"] == str(64 * 1024 * 1024), "the flag wins over the file"
    assert environ["HVDGLOO_CYCLE_TIME"] == "2.5"
    assert environ["HVDGLOO_STALL_CHECK_DISABLE"] == "1"
    assert environ["HVDGLOO_STALL_CHECK_TIME_SECONDS"] == "30"
    assert environ["HVDGLOO_LOG_LEVEL"] == "DEBUG", "the file wins over the environment"
    assert environ["HVDGLOO_LOG_HIDE_TIME"] == "1"
    assert "--tcp: " in done.stderr
    assert "params.hierarchical_allreduce has no effect here" in done.stderr


def test_pain_30_no_secret_is_on_any_command_line(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os
        secret = os.environ["HVDGLOO_SECRET"].encode()
        lines = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                lines[pid] = open(f"/proc/{pid}/cmdline", "rb").read()
            except OSError:
                pass
        assert any(b"hvdgloo.runner" in line for line in lines.values()), "the launcher's, and its agent's"
        print([pid for pid, line in lines.items() if secret in line or bytes.fromhex(secret.decode()) in line])
        """
    )
    done = launcher.run("-np", "2", "--verbose", script)
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:[]", "[1]<stdout>:[]"]


def test_pain_30_the_agent_s_environment_has_no_secret(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os
        def parent(pid):
            return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        agent = os.getppid()
        for pid in (agent, parent(agent), parent(parent(agent))):
            print("HVDGLOO_SECRET" in open(f"/proc/{pid}/environ").read())
        """
    )
    done = launcher.run("-np", "1", script)
    assert done.stdout.splitlines() == ["[0]<stdout>:False"] * 3


def test_help_version_and_build_table(launcher: Launcher) -> None:
    help_text = launcher.run("--help-all")
    assert help_text.returncode == 0
    for flag in ("--fusion-threshold-mb MB", "--cycle-time-ms MS", "--start-timeout SECONDS", "--no-stall-check"):
        assert flag in help_text.stdout
    assert launcher.run("-v").stdout.count(".") == 2
    table = launcher.run("--check-build").stdout
    assert table.startswith("hvdgloo v")
    assert "    [X] Gloo" in table
    assert "    [X] Shared memory" in table
    assert "    [ ] MPI" in table


def test_settings_without_effect_are_told_once(launcher: Launcher) -> None:
    script = launcher.script("import hvdgloo.numpy as hvd; hvd.init()")
    absent = next((package for package in GLOO_PROVIDERS if find_spec(package) is None), "auto")
    done = launcher.run("-np", "2", "--gloo-provider", absent, script, timeout=50, env={"HVDGLOO_CYCEL_TIME": "1"})
    assert done.returncode == 0
    assert done.stderr.count(f"HVDGLOO_GLOO_PROVIDER={absent} (--gloo-provider) has no effect") == (absent != "auto")
    told = "there is no setting HVDGLOO_CYCEL_TIME, so it has no effect; did you mean HVDGLOO_CYCLE_TIME?"
    assert done.stderr.count(told) == 1
    assert done.stderr.startswith(f"hvdgloo-run: {told}\n"), "before anything is started"


def test_a_flag_of_the_launcher_that_the_program_does_not_know_is_told(launcher: Launcher) -> None:
    script = launcher.script("import argparse; p = argparse.ArgumentParser(); p.add_argument('--page'); p.parse_args()")
    done = launcher.run("-np", "1", script, "--page", "1", "--as-gloo")
    assert done.returncode == 2
    said = "--as-gloo follows the program, so the program receives it; to give it to hvdgloo-run, write"
    assert f"hvdgloo-run: {said} hvdgloo-run --as-gloo {script} --page 1\n" in done.stderr


def test_thread_affinity(launcher: Launcher) -> None:
    core = min(os.sched_getaffinity(0))
    script = launcher.script(
        """
        import os, threading
        import hvdgloo.numpy as hvd
        hvd.init()
        engine = ("hvdgloo-control", "hvdgloo-data")
        threads = [thread for thread in threading.enumerate() if thread.name.startswith(engine)]
        print([sorted(os.sched_getaffinity(thread.native_id)) for thread in threads])
        hvd.barrier()  # the other rank's end would end the threads of this one
        """
    )
    python = warm.python(*warm.NUMPY)
    done = launcher.run("-np", "2", "--thread-affinity", f"{core},{core}", python, script, timeout=50)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:[[{core}], [{core}]]" for rank in range(2)]
    done = launcher.run("-np", "1", "--thread-affinity", "4711", python, script, timeout=50)
    assert "HVDGLOO_THREAD_AFFINITY: core 4711 cannot be used" in done.stderr
    assert done.returncode == 0


def test_the_user_s_own_torch_distributed_works_in_a_worker(launcher: Launcher) -> None:
    need_installed("torch")
    script = launcher.script(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        value = torch.ones(3) * (dist.get_rank() + 1)
        dist.all_reduce(value)
        print(value.tolist())
        dist.destroy_process_group()
        """
    )
    done = launcher.run("-np", "2", warm.python(), script, timeout=50)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:[3.0, 3.0, 3.0]" for rank in range(2)], done.stderr


LEFT_OVER = {
    "HVDGLOO_RENDEZVOUS": "nonsense",
    "HVDGLOO_SECRET": "nonsense",
    "HVDGLOO_SECRET_FILE": "/nonexistent",
    "HVDGLOO_JOB_ID": "nonsense",
    "HVDGLOO_AGENT_ID": "nonsense",
    "HVDGLOO_EPOCH": "nonsense",
    "HVDGLOO_RANK": "nonsense",
    "HOROVOD_RANK": "nonsense",
    "HVDGLOO_INDEX": "nonsense",
    "HVDGLOO_HOSTNAME": "nonsense",
    "HVDGLOO_ADDRESS": "nonsense",
}

SUM = """
import os, sys
import numpy as np
import hvdgloo.numpy as hvd
hvd.init()
print(hvd.allreduce(np.ones(1), op=hvd.Sum)[0], *sorted(n for n in os.environ if n in sys.argv[1:]))
"""


def test_what_another_job_has_left_in_the_environment_does_not_matter(launcher: Launcher) -> None:
    script = launcher.script(SUM)
    done = launcher.run("-np", "2", script, "HVDGLOO_SECRET_FILE", "HVDGLOO_INDEX", env=LEFT_OVER, timeout=50)
    assert sorted(done.stdout.splitlines()) == ["[0]<stdout>:2.0", "[1]<stdout>:2.0"], done.stderr


def test_run_does_not_mind_it_either(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LEFT_OVER.items():
        monkeypatch.setenv(name, value)
    assert hvdgloo.run.run(lambda: os.environ.get("HVDGLOO_SECRET_FILE"), np=2) == [None, None]


def test_a_job_inside_a_worker_of_another_job(launcher: Launcher) -> None:
    launcher.script(SUM, "inner.py")
    script = launcher.script(
        """
        import subprocess, sys
        import numpy as np
        import hvdgloo.numpy as hvd
        hvd.init()
        if hvd.rank() == 1:
            subprocess.run([sys.executable, "-m", "hvdgloo.runner", "-np", "3", "inner.py"], check=True)
        print("outer", hvd.allreduce(np.ones(1), op=hvd.Sum)[0])
        """
    )
    done = launcher.run("-np", "2", script, timeout=50)
    inner = [f"[1]<stdout>:[{rank}]<stdout>:3.0" for rank in range(3)]
    outer = [f"[{rank}]<stdout>:outer 2.0" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == sorted(inner + outer), done.stderr


def test_pain_20_who_has_not_come_to_init_is_said(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, time
        from hvdgloo.rendezvous import RendezvousClient, WorkerInfo, host_identity
        rank = int(os.environ["RANK"])
        while rank == 1 and not os.path.exists("said"):
            time.sleep(0.01)
        server, secret = os.environ["HVDGLOO_RENDEZVOUS"], bytes.fromhex(os.environ["HVDGLOO_SECRET"])
        with RendezvousClient(server, secret) as client:
            me = WorkerInfo(rank, None, "localhost", host_identity(), "127.0.0.1", 1, os.getpid())
            print(client.register(0, me, timeout=20).rank)
        """
    )
    process = launcher.start("-np", "2", "--verbose", script)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line.decode()
        if "hvd.init() has waited" in said:
            break
    report = r"hvd\.init\(\) has waited .* for rank 1 \(localhost, process \d+\), which has not"
    assert re.search(report, said), said
    (launcher.folder / "said").touch()
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 0, rest


@pytest.mark.parametrize("flags", [[], ["--min-np", "1"]], ids=["fixed", "elastic"])
def test_a_spawned_process_that_runs_the_program_again_is_told_why_it_cannot_join(
    launcher: Launcher, flags: list[str]
) -> None:
    program = """
    import multiprocessing
    import hvdgloo.numpy as hvd
    hvd.init()
    if __name__ == "__main__":
        child = multiprocessing.get_context("spawn").Process(target=print)
        child.start()
        child.join()
        assert child.exitcode == 1
    """
    done = launcher.run("-np", "2", *flags, launcher.script(program))
    assert done.returncode == 0, done.stderr
    who = r"worker \S+" if flags else "rank [01]"
    assert len(set(re.findall(rf"this process was started by {who} itself \(pid \d+", done.stderr))) == 2
    assert done.stderr.count('put hvd.init() under if __name__ == "__main__"') == 2
