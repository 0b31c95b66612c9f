"""The economy of a start: packages that are not needed yet are in none of a job's processes."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

from tests.support import warm
from tests.support.launching import Launcher, clean_environment, run_command

WEB = {"cheroot", "flask", "jinja2", "prometheus_client", "requests", "werkzeug"}
MAIL_AND_TLS = {"email", "http.client", "ssl"}
FRAMEWORKS = {"jax", "tensorflow", "torch"}
LOOKING = {"hvdgloo._observe.samples", "hvdgloo._observe.observatory", "hvdgloo.rendezvous._page_server.gate"}
"""Modules that are needed only once the job has observers."""
RARELY = {"asyncio", "cloudpickle", "multiprocessing", "psutil", "yaml"}


def run(program: str, *arguments: str, folder: Path) -> set[str]:
    """The modules that a program names in the last line of its output, as JSON."""
    done = run_command(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        cwd=folder,
        env={**clean_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_launcher_of_a_job_without_rendezvous_imports_no_web_framework(tmp_path: Path) -> None:
    modules = run(
        """
        import json, sys
        from hvdgloo.runner.cli.main import main
        sys.argv[1:] = ["-np", "2", "true"]
        assert main() == 0
        print(json.dumps(sorted(sys.modules)))
        """,
        folder=tmp_path,
    )
    assert "hvdgloo.runner.launch" in modules
    # The HTTP server itself is not among these: on a busy machine the job may outlive its head start.
    assert not modules & ((WEB - {"cheroot"}) | FRAMEWORKS | RARELY | {"numpy"})
    assert not modules & LOOKING


MEETING = """
    import json, sys
    from hvdgloo.rendezvous import RendezvousClient
    from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
    from hvdgloo.runner.rendezvous_host import open_rendezvous

    hosts = (HostEntry("here", 1),)
    spec = LaunchSpec(("true",), hosts, 1, "/", {}, b"s" * 32)
    with open_rendezvous(None, spec, ["127.0.0.1"], hosts=hosts, head_start=600.0) as rendezvous:
        rendezvous.serve()
        if sys.argv[1] == "a client":
            with RendezvousClient(f"127.0.0.1:{rendezvous.port}", spec.secret) as client:
                client.store("scope").set("key", b"value")
                assert client.store("scope").get("key") == b"value"
    print(json.dumps(sorted(sys.modules)))
"""


def test_the_server_is_imported_when_a_client_connects(tmp_path: Path) -> None:
    modules = run(MEETING, "a client", folder=tmp_path)
    assert "cheroot" in modules
    assert not modules & (WEB - {"cheroot"}), "what workers ask for is answered without them"


def test_a_server_that_is_not_needed_is_never_imported_and_ends_at_once(tmp_path: Path) -> None:
    assert not run(MEETING, "no client", folder=tmp_path) & (WEB | MAIL_AND_TLS)


def test_the_page_and_the_metrics_bring_their_packages_when_they_are_asked_for(tmp_path: Path) -> None:
    modules = run(
        """
        import json, sys, urllib.request
        from hvdgloo.rendezvous import RendezvousServer

        def get(path):
            headers = {"Authorization": "Bearer " + server.token}
            request = urllib.request.Request("http://" + server.endpoint + path, None, headers)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return answer.read().decode()
            except urllib.error.HTTPError as refusal:
                return refusal.read().decode()

        with RendezvousServer(secret=b"s" * 32, size=2) as server:
            assert json.loads(get("/v1/status"))["epochs"][0]["arrived"] == 0
            assert not {"flask", "prometheus_client"} & set(sys.modules)
            assert "hvdgloo_rendezvous_workers_expected{epoch=\\"0\\"} 2.0" in get("/metrics")
            assert "flask" not in sys.modules
            assert "this server has no page" in get("/")
            numbers = get("/metrics")
        assert 'hvdgloo_rendezvous_requests_total{method="GET",route="/metrics",status="200"} 1.0' in numbers
        assert 'hvdgloo_rendezvous_request_seconds_bucket{le="+Inf",route="/"} 1.0' in numbers
        print(json.dumps(sorted(sys.modules)))
        """,
        folder=tmp_path,
    )
    assert {"flask", "prometheus_client"} <= modules


def test_an_agent_imports_what_every_host_needs(launcher: Launcher) -> None:
    """One that was reached by a command, as over ssh: a Python of its own."""
    agent = launcher.folder / "agent.py"
    agent.write_text(
        textwrap.dedent(
            """
            import json, os, sys
            from hvdgloo.runner.agent import agent
            status = agent.main()
            with open("modules", "a") as file:  # watchdog and agent, a line each
                file.write(json.dumps(sorted(sys.modules)) + "\\n")
            os._exit(status)
            """
        )
    )
    # What comes after the script's name, the usual command line, is not looked at.
    template = f"env PYTHONPATH={os.pathsep.join(sys.path)} {sys.executable} {agent} {{command}}"
    done = launcher.run("--agent-command", template, "-H", "elsewhere:2", "true", fresh=True)
    assert done.returncode == 0, done.stderr
    lines = launcher.file("modules").read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        assert not set(json.loads(line)) & (WEB | MAIL_AND_TLS | FRAMEWORKS | RARELY | LOOKING | {"numpy", "msgpack"})


def test_a_numpy_worker_has_in_the_end_what_it_has_used(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import json, sys
        import numpy as np
        before = set(sys.modules)
        import hvdgloo.numpy as hvd
        imported = set(sys.modules) - before
        hvd.init()
        assert hvd.allreduce(np.ones(1), name="x", op=hvd.Sum)[0] == 2
        with open(f"modules{hvd.rank()}", "w") as file:
            json.dump([sorted(imported), sorted(set(sys.modules) - before)], file)
        """
    )
    done = launcher.run("-np", "2", script, fresh=True)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        imported, used = map(set, json.loads(launcher.file(f"modules{rank}").read_text()))
        assert not used & (WEB | MAIL_AND_TLS | FRAMEWORKS | RARELY)
        ours = {"hvdgloo._backends.hierarchical", "hvdgloo._backends.gloo", "hvdgloo._engine.timeline"}
        assert not used & ours, "several hosts and traces alone need these"
        assert ("hvdgloo._engine.coordinator" in used) == (rank == 0)
        assert "hvdgloo._engine.engine" in used
        # What joins the job comes with init().
        assert not imported & {"hvdgloo._engine.engine", "hvdgloo.rendezvous._client.client", "hashlib", "socket"}


def test_a_torch_worker_does_not_search_for_garbage_while_it_imports(tmp_path: Path) -> None:
    """That search would go through all of torch's objects, and the imports make enough objects to start it."""
    program = """
        import gc, sys
        import torch
        for name in [name for name in sys.modules if name.startswith("hvdgloo")]:
            del sys.modules[name]

        def note(phase, info):
            global collections
            collections += 1
            modules = [sys.modules[name] for name in OURS if name in sys.modules]
            begun.update(module.__name__ for module in modules if module.__spec__._initializing)

        OURS = "hvdgloo.torch._frontend", "hvdgloo.torch.functions", "hvdgloo.torch.optimizer", "hvdgloo._job.join"
        collections, begun = 0, set()
        gc.callbacks.append(note)
        gc.set_threshold(50)
        import hvdgloo.torch as hvd
        assert gc.isenabled()
        hvd.init()
        assert gc.isenabled()
        assert {*OURS} <= {*sys.modules}
        assert collections
        assert not begun, begun
    """
    with open(tmp_path / "said", "wb") as said, open(os.devnull) as nothing:
        worker = warm.Process(
            ["-c", textwrap.dedent(program)],
            env=clean_environment(),
            stdin=nothing.fileno(),
            stdout=said.fileno(),
            stderr=said.fileno(),
        )
        assert worker.wait(60) == 0, (tmp_path / "said").read_text()


def test_the_command_forks_its_agent_with_nothing_of_its_own(launcher: Launcher) -> None:
    script = launcher.script(
        """
        import os, signal
        agent = os.getppid()
        print(open(f"/proc/{agent}/comm").read().strip(), open(f"/proc/{agent}/cmdline").read().split("\\0")[1:3])
        print(sorted(map(int, os.listdir("/proc/self/fd")))[:4], os.readlink(f"/proc/{agent}/cwd"))
        print([s.name for s in signal.valid_signals() if signal.getsignal(s) == signal.SIG_IGN])
        """
    )
    done = launcher.run("-np", "1", script, fresh=True)
    assert done.returncode == 0, done.stderr
    lines = [line.partition(":")[2] for line in done.stdout.splitlines()]
    assert lines[0] == "hvdgloo-agent ['-m', 'hvdgloo.runner']"
    # 3 is the listing's own.
    assert lines[1] == "[0, 1, 2, 3] /"
    assert lines[2] == "['SIGPIPE', 'SIGXFSZ']", "Python's own"


def test_a_program_that_calls_the_command_line_is_not_forked(launcher: Launcher) -> None:
    launcher.script("import os; print(open(f'/proc/{os.getppid()}/cmdline').read().split('\\0')[1:3])")
    done = run_command(
        [sys.executable, "-c", "from hvdgloo.runner.cli.main import main; main(['-np', '1', 'worker.py'])"],
        cwd=launcher.folder,
        env={**clean_environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.stdout == "[0]<stdout>:['-m', 'hvdgloo.runner.agent']\n", done.stderr
