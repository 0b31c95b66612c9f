"""Agents by way of other commands than ssh: nsenter, ip netns exec, kubectl and srun (both false). Pains 17 and 18."""

from __future__ import annotations

import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.hosts import Bed, Host, HostSpec
from tests.support.launching import Launcher, wait_for

RUN = [sys.executable, "-m", "hvdgloo.runner"]
SUM = """
import socket
import numpy as np
import hvdgloo.numpy as hvd
hvd.init()
total = hvd.allreduce(np.ones(4), op=hvd.Sum)
print(socket.gethostname(), hvd.rank(), hvd.size(), int(total.sum()))
"""


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(line.partition(">:")[2] for line in done.stdout.splitlines())


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


CONNECT = 'import os, shlex, sys; os.execvp("ssh", ["ssh", sys.argv[1], "exec " + shlex.join(sys.argv[2:])])'
"""A program that has ssh run what it is given, without a shell taking the words apart."""


class TestATemplate:
    """The launcher runs on the machine itself, which is in no network of the bed's."""

    def test_nsenter(self, bed: Bed, launcher: Launcher) -> None:
        inits = [bed["h1"].init, bed["h2"].init]
        template = f"nsenter --target {{host}} -n -u -p -m -i --wd={launcher.folder} --"
        hosts = ",".join(f"{init}:1" for init in inits)
        done = launcher.run("-H", hosts, "--agent-command", template, warm.python(), launcher.script(SUM))
        assert lines(done) == ["h1 0 2 8", "h2 1 2 8"]
        launcher.assert_nothing_left()

    def test_ip_netns_exec(self, bed: Bed, launcher: Launcher) -> None:
        with named_namespaces([bed["h1"], bed["h3"]]) as names:
            hosts = ",".join(f"{name}:1" for name in names)
            done = launcher.run(
                "-H", hosts, "--agent-command", "ip netns exec {host}", warm.python(), launcher.script(SUM)
            )
        assert [line.split()[1:] for line in lines(done)] == [["0", "2", "8"], ["1", "2", "8"]]

    def test_a_shell_around_the_agent(self, launcher: Launcher) -> None:
        template = "sh -c 'export ACTIVATED=1; echo noise; exec {shell}' {host}"
        show = "import os; print(os.environ['ACTIVATED'])"
        done = launcher.run("-H", "a:1,b:1", "--agent-command", template, "python", "-c", show)
        assert lines(done) == ["1", "1"]
        assert "[a] noise" in done.stderr

    def test_a_module_in_the_folder_that_the_agent_starts_in_is_not_imported(self, launcher: Launcher) -> None:
        folder = launcher.folder / "elsewhere"
        folder.mkdir()
        (folder / "json.py").write_text("raise SystemExit('imported')")
        done = launcher.run("-H", "a:1", "--agent-command", f"sh -c 'cd {folder}; {{shell}}'", "echo", "fine")
        assert lines(done) == ["fine"]

    def test_a_program_that_is_not_there(self, launcher: Launcher) -> None:
        done = launcher.run("-H", "a:1", "--agent-command", "no-such-kubectl exec {host}", "true")
        assert done.returncode == 1
        assert "no-such-kubectl cannot be executed on this machine: No such file or directory" in done.stderr

    def test_a_field_that_a_host_does_not_have(self, launcher: Launcher) -> None:
        done = launcher.run("-H", "ann@a:1,b:1", "--agent-command", "x {user} {host}", "true")
        assert done.returncode == 2
        assert "--agent-command uses {user}, which host b does not have: give user@b" in done.stderr


class TestRecipes:
    """The recipes of docs/kubernetes.md, as they stand there, on the bed: pains 16 and 17."""

    FALSE = """#!/bin/sh
    # Pods and containers are hosts, and the container "trainer" is the host that it is on.
    while [ $# -gt 0 ]; do
        case "$1" in
            worker-0|trainer-0) host=h2; shift; break;;
            worker-1|trainer-1) host=h3; shift; break;;
            trainer) shift; break;;
        esac
        shift
    done
    [ "$1" != "--" ] || shift
    [ -n "$host" ] || exec "$@"
    exec {python} -c '{connect}' "$host" "$@"
    """

    def test_each_works(self, make_bed: Callable[..., Bed], tmp_path: Path) -> None:
        for name in ("kubectl", "docker"):
            program(tmp_path / name, self.FALSE.replace("{python}", sys.executable).replace("{connect}", CONNECT))
        start_up = f"module() {{ [ $1 = load ]; }}; PATH={tmp_path}:$PATH"
        bed = make_bed([HostSpec(name, bashrc=start_up) for name in ("h1", "h2", "h3")])
        text = (Path(__file__).parents[2] / "docs/kubernetes.md").read_text()
        recipes = re.findall(r"^\$ hvdgloo-run (-H \S+) --agent-command '([^'\n]+)' train\.py$", text, re.MULTILINE)
        assert len(recipes) == 6
        (tmp_path / "train.py").write_text(SUM)
        for hosts, template in recipes:
            if template.startswith("ip netns"):
                continue  # has a test of its own
            done = bed["h1"].run(
                [*RUN, *re.sub(r":\d", ":1", hosts).split(), "--agent-command", template, warm.python(), "train.py"],
                cwd=tmp_path,
                env={"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"},
                timeout=40.0,
            )
            assert len(lines(done)) == 2, template


class TestKubectl:
    def kubectl(self, folder: Path) -> Path:
        """``kubectl exec -i POD -- COMMAND``: pods are files that hold the number of a host's first process."""
        return program(
            folder / "kubectl",
            f"""#!/bin/sh
            echo "$@" >> {folder}/calls
            [ "$1 $2 $4" = "exec -i --" ] || {{ echo "error: unknown flag: $4" >&2; exit 1; }}
            pod=$3; shift 4
            [ -e {folder}/$pod ] || {{ echo "Error from server (NotFound): pods \\"$pod\\" not found" >&2; exit 1; }}
            exec nsenter --target $(cat {folder}/$pod) -n -u -p -m -i --wd={folder} -- "$@"
            """,
        )

    def test_pain_17_pods_that_come_late_are_waited_for(self, bed: Bed, launcher: Launcher) -> None:
        template = f"{self.kubectl(launcher.folder)} exec -i {{host}} --"
        script = launcher.script(SUM)
        (launcher.folder / "w-0").write_text(str(bed["h1"].init))
        process = launcher.start("-H", "w-0:1,w-1:2", "--agent-command", template, "--verbose", warm.python(), script)
        assert process.stderr is not None
        for line in process.stderr:
            if b'pods "w-1" not found' in line:
                break
        (launcher.folder / "w-1.new").write_text(str(bed["h2"].init))
        (launcher.folder / "w-1.new").rename(launcher.folder / "w-1")
        out, err = process.communicate(timeout=40)
        assert process.returncode == 0, err
        found = sorted(line.partition(">:")[2] for line in out.decode().splitlines())
        assert found == ["h1 0 3 12", "h2 1 3 12", "h2 2 3 12"]
        launcher.assert_nothing_left()

    def test_pain_20_a_pod_that_never_comes_is_named_with_kubectl_s_own_words(self, launcher: Launcher) -> None:
        template = f"{self.kubectl(launcher.folder)} exec -i {{host}} --"
        done = launcher.run("-H", "w-0:1", "--agent-command", template, "--start-timeout", "2", "true")
        assert done.returncode == 1
        assert "w-0" in done.stderr
        assert 'Error from server (NotFound): pods "w-0" not found' in done.stderr
        assert len((launcher.folder / "calls").read_text().splitlines()) >= 3

    def test_what_will_not_pass_is_told_at_once(self, launcher: Launcher) -> None:
        template = f"{self.kubectl(launcher.folder)} exec -i {{host}} -c main --"
        done = launcher.run("-H", "w-0:1", "--agent-command", template, "true")
        assert done.returncode == 1
        assert "kubectl ended with status 1: error: unknown flag: -c; look at --agent-command" in done.stderr
        assert len((launcher.folder / "calls").read_text().splitlines()) == 1

    def test_a_user_who_does_not_want_to_wait_need_not(self, launcher: Launcher) -> None:
        template = f"{self.kubectl(launcher.folder)} exec -i {{host}} --"
        done = launcher.run("-H", "w-0:1", "--agent-command", template, "--no-wait-for-hosts", "true")
        assert done.returncode == 1
        assert "host w-0 cannot be used: kubectl ended with status 1: Error from server (NotFound)" in done.stderr


class TestSlurm:
    """Hosts are nodes of an allocation, and a false srun leads to them, by ssh."""

    def environment(self, folder: Path, nodes: str, **more: str) -> dict[str, str]:
        program(
            folder / "srun",
            f"""#!/bin/sh
            echo "overlap=$SLURM_OVERLAP tasks=$SLURM_NTASKS $*" >> {folder}/calls
            while :; do
                case "$1" in
                    --nodelist=*) node=${{1#*=}};;
                    --*) ;;
                    *) break;;
                esac
                shift
            done
            [ "$node" != "h3" ] || [ ! -e {folder}/broken ] || {{ echo "srun: error: node failure" >&2; exit 1; }}
            exec {sys.executable} -c '{CONNECT}' "$node" "$@"
            """,
        )
        path = f"{folder}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return {"PATH": path, "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": nodes, **more}

    def calls(self, folder: Path) -> list[str]:
        log = folder / "calls"
        return sorted(line.split(" -c ")[0] for line in log.read_text().splitlines()) if log.exists() else []

    def launch(
        self, host: Host, folder: Path, env: dict[str, str], *arguments: str
    ) -> subprocess.CompletedProcess[str]:
        return host.run([*warm.launcher(), *arguments], cwd=folder, env=env, timeout=50.0)

    def test_pain_18_hosts_and_ways_are_slurm_s(self, bed: Bed, tmp_path: Path) -> None:
        (tmp_path / "worker.py").write_text(SUM)
        env = self.environment(tmp_path, "h[1-3]", SLURM_NTASKS="4", SLURM_TASKS_PER_NODE="1,2,1")
        done = self.launch(bed["h1"], tmp_path, env, warm.python(), "worker.py")
        assert lines(done) == ["h1 0 4 16", "h2 1 4 16", "h2 2 4 16", "h3 3 4 16"]
        assert "hosts of Slurm job 4711: h1:1, h2:2, h3:1, slots by SLURM_TASKS_PER_NODE" in done.stderr
        steps = self.calls(tmp_path)
        assert [step.split()[3] for step in steps] == ["--nodelist=h2", "--nodelist=h3"]
        assert all(step.startswith("overlap=1 tasks= --jobid=4711 ") for step in steps)

    def test_a_smaller_np_uses_fewer_nodes(self, bed: Bed, tmp_path: Path) -> None:
        env = self.environment(tmp_path, "h[1-3]", SLURM_NTASKS_PER_NODE="2")
        assert lines(self.launch(bed["h1"], tmp_path, env, "-np", "3", "hostname")) == ["h1", "h1", "h2"]
        assert len(self.calls(tmp_path)) == 1

    def test_a_launcher_outside_of_the_allocation_s_nodes(self, bed: Bed, tmp_path: Path) -> None:
        env = self.environment(tmp_path, "h[2-3]")
        assert lines(self.launch(bed["h1"], tmp_path, env, "hostname")) == ["h2", "h3"]

    @pytest.mark.parametrize(
        ("flags", "steps", "hosts"),
        [
            (["-H", "h3:1"], 0, ["h3"]),
            (["-H", "h2:1"], 1, ["h2"]),
            (["-H", "h2:1,h3:1"], 1, ["h2", "h3"]),
            (["-H", "h2:1", "--no-slurm"], 0, ["h2"]),
            (["-np", "1", "--no-slurm"], 0, ["h1"]),
        ],
    )
    def test_pain_18_who_gives_hosts_gets_these(
        self, bed: Bed, tmp_path: Path, flags: list[str], steps: int, hosts: list[str]
    ) -> None:
        env = self.environment(tmp_path, "h[1-2]")
        done = self.launch(bed["h1"], tmp_path, env, *flags, "hostname")
        assert lines(done) == hosts
        assert len(self.calls(tmp_path)) == steps
        assert ("h3 is not part of Slurm job 4711" in done.stderr) == (len(hosts) == 2)

    def test_a_step_that_fails_is_reported_with_srun_s_words(self, bed: Bed, tmp_path: Path) -> None:
        env = self.environment(tmp_path, "h[1-3]")
        (tmp_path / "broken").touch()
        done = self.launch(bed["h1"], tmp_path, env, "hostname")
        assert done.returncode == 1
        assert "h3: srun ended with status 1: srun: error: node failure" in done.stderr
        wait_for(lambda: not bed["h2"].processes(), 10.0, "the end of the agent on h2")

    def test_a_launcher_in_each_task_is_refused(self, bed: Bed, tmp_path: Path) -> None:
        env = self.environment(tmp_path, "h[1-3]", SLURM_STEP_NUM_TASKS="3")
        done = self.launch(bed["h1"], tmp_path, env, "hostname")
        assert done.returncode == 2
        assert "hvdgloo-run was started 3 times, by srun; start it once" in done.stderr


@contextmanager
def named_namespaces(hosts: list[Host]) -> Iterator[list[str]]:
    """Names for the network namespaces of hosts, as ``ip netns`` knows them."""
    names: list[str] = []
    try:
        for host in hosts:
            name = f"hvdgloo-{uuid.uuid4().hex[:8]}"
            subprocess.run(["ip", "netns", "attach", name, str(host.init)], check=True, timeout=10)
            names.append(name)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=True, timeout=10)
