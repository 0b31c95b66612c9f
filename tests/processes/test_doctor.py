"""``hvdgloo-run doctor``: on this machine, and on hosts that are reached by ssh. Pains 15, 19."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hosts import Bed, Host, HostSpec
from tests.support.launching import Launcher, wait_for

RUN = [sys.executable, "-m", "hvdgloo.runner"]


pytestmark = pytest.mark.usefixtures("nothing_left")


class TestThisMachine:
    def test_it_is_well(self, launcher: Launcher) -> None:
        done = launcher.run("doctor", "-np", "1")
        assert done.returncode == 0, done.stdout + done.stderr
        head, row = done.stdout.splitlines()[:2]
        assert head.split() == ["host", "verdict", "python", "cores", "memory", "/dev/shm", "files", "clock"]
        assert row.split()[0] == "localhost"
        assert row.split()[-1] == "same"
        assert done.stderr == ""

    def test_as_json_and_with_flags_on_either_side(self, launcher: Launcher) -> None:
        for arguments in (["doctor", "-H", "localhost:500", "--json"], ["-H", "localhost:500", "doctor", "--json"]):
            done = launcher.run(*arguments)
            assert done.returncode == 0
            data = json.loads(done.stdout)
            assert (data["ok"], data["hosts"][0]["host"], data["hosts"][0]["slots"]) == (True, "localhost", 500)
            assert any("500 workers share" in finding["text"] for finding in data["findings"])
            assert data["hosts"][0]["facts"]["executable"] == sys.executable
            assert set(data["hosts"][0]["facts"]["packages"]) >= {"hvdgloo", "numpy"}

    def test_a_program_that_is_called_doctor_can_be_run(self, launcher: Launcher) -> None:
        program = Path(launcher.folder / "doctor")
        program.write_text("#!/bin/sh\necho well\n")
        program.chmod(0o755)
        done = launcher.run("-np", "1", "--", "doctor", env={"PATH": f"{launcher.folder}:/usr/bin:/bin"})
        assert done.stdout == "[0]<stdout>:well\n", done.stderr

    @pytest.mark.parametrize("command", ["doctor", "--check-build", "--version"])
    def test_its_output_is_not_read(self, launcher: Launcher, command: str) -> None:
        """``hvdgloo-run doctor | head -1``: no traceback."""
        reading, writing = os.pipe()
        os.close(reading)
        process = launcher.start(command, stdout=writing)
        os.close(writing)
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (128 + signal.SIGPIPE, b"")

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["doctor", "missing.py"], "there is no file missing.py"),
            (["doctor", "--hostt", "h1"], "did you mean --hosts"),
            (["doctor", "-H", "h1:x"], "'h1:x' is not a host"),
            (["--json", "-np", "1", "true"], "--json is for hvdgloo-run doctor"),
        ],
    )
    def test_mistakes_on_the_command_line(self, launcher: Launcher, arguments: list[str], text: str) -> None:
        done = launcher.run(*arguments)
        assert done.returncode == 2
        assert text in done.stderr


def doctor(host: Host, *arguments: str, status: int, cwd: str = "/") -> str:
    done = host.run([*host.launcher(), "doctor", *arguments], cwd=cwd)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def rows(text: str, block: int = 0) -> dict[str, list[str]]:
    """A table's lines by their first word."""
    return {line.split()[0]: line.split() for line in text.split("\n\n")[block].splitlines()}


class TestHosts:
    def test_all_is_well(self, bed: Bed) -> None:
        text = doctor(bed["h1"], "-H", "h1:1,h2:1,h3:1", status=0)
        assert {name: row[1] for name, row in rows(text).items()} == {
            "host": "verdict",
            **dict.fromkeys(("h1", "h2", "h3"), "ok"),
        }
        assert text.endswith("All is well: all 3 hosts are ready for a job.\n")
        reached = [line for line in text.splitlines() if "(eth0)" in line]
        assert [line.split()[-1] for line in reached] == ["all", "all", "all"]
        assert "172.17.0.1 (docker0)  none" in text, "each host's own"
        for host in bed:
            wait_for(lambda host=host: not host.processes(), what=f"the end of the agent on {host.name}")
            assert host.listening() == host.shared_memory() == set()

    def test_pain_15_one_bad_host_does_not_hide_the_others(self, bed: Bed) -> None:
        text = doctor(bed["h1"], "-H", "nowhere.invalid:1,h2:1", "--connect-timeout-seconds", "2", status=1)
        assert rows(text)["nowhere.invalid"] == ["nowhere.invalid", "STOP"]
        assert rows(text)["h2"][1] == "ok"
        assert "STOP:    nowhere.invalid: its name cannot be looked up" in text

    def test_pain_19_another_python_and_its_packages(self, bed: Bed, tmp_path: Path) -> None:
        """The comparison uses the packages that the hosts' interpreters would import, found without importing them."""
        for name, torch in (("h1", "9.8"), ("h2", "9.7")):
            interpreter(tmp_path / name, {"torch": torch, "mxnet": "1.9"} if name == "h1" else {"torch": torch})
        # The file system is shared, so one path leads to another interpreter on each host.
        chooser = tmp_path / "python"
        program(chooser, f'exec {tmp_path}/"$(hostname)"/python "$@"')
        data = json.loads(
            doctor(bed["h3"], "-H", "h1:1,h2:1", "--remote-python", str(chooser), "--json", "--", "true", status=0)
        )
        facts = {host["host"]: host["facts"] for host in data["hosts"]}
        assert facts["h1"]["packages"]["torch"] == "9.8"
        assert "mxnet" not in facts["h2"]["packages"]
        texts = [finding["text"] for finding in data["findings"]]
        assert "torch differs: 9.8 on h1; 9.7 on h2" in texts
        assert "mxnet is not installed, as it is on h1" in texts

    def test_a_clock_that_is_wrong(self, bed: Bed, tmp_path: Path) -> None:
        interpreter(tmp_path, {}, customize="import time; right = time.time; time.time = lambda: right() + 100")
        text = doctor(bed["h1"], "-H", "h2:1", "--remote-python", str(tmp_path / "python"), status=0)
        # Under load the answer's way may take longer than the question's.
        assert re.search(r"its clock is (99\.[5-9]|100\.[0-5]) s ahead of the launcher's", text)
        assert float(rows(text)["h2"][-2]) == pytest.approx(100, abs=0.5)

    def test_pain_19_a_working_directory_and_a_script_that_one_host_lacks(self, make_bed: Callable[..., Bed]) -> None:
        bed = make_bed(["h1", HostSpec("h2", private_tmp=True), HostSpec("h3", private_tmp=True)])
        bed["h3"].run(["mkdir", "/tmp/job"], check=True)
        bed["h2"].run(["mkdir", "/tmp/job"], check=True)
        bed["h2"].path("/tmp/job/train.py").touch()
        text = doctor(bed["h2"], "-H", "h2:1,h3:1", "train.py", status=1, cwd="/tmp/job")
        assert "STOP:    h3: there is no file train.py" in text
        bed["h3"].run(["rmdir", "/tmp/job"], check=True)
        text = doctor(bed["h2"], "-H", "h2:1,h3:1", "train.py", status=1, cwd="/tmp/job")
        assert re.search("STOP: +h3: .* directory /tmp/job", text)
        assert "train.py" not in text

    def test_pain_14_hosts_that_reach_each_other_one_way_only(self, make_bed: Callable[..., Bed]) -> None:
        bed = make_bed(["h1", "h2", "h3"])
        bed.block("h2", "h3", reject=True)
        text = doctor(bed["h1"], "-H", "h1:1,h2:1,h3:1", status=1)
        assert rows(text)["h3"][1] == "STOP"
        assert rows(text)["h2"][1] == "ok"
        assert "(eth0)     all but h2 (" in text
        assert "h2 -> h3: 10.77.1.12 (eth0)" in text

    def test_pain_17_by_another_way_than_ssh(self, bed: Bed, tmp_path: Path) -> None:
        kubectl = tmp_path / "kubectl"
        program = "import os, shlex, sys\nos.execvp('ssh', ['ssh', sys.argv[1], shlex.join(sys.argv[2:])])\n"
        kubectl.write_text(f"#!{sys.executable}\n{program}")
        kubectl.chmod(0o755)
        text = doctor(bed["h1"], "-H", "h2:1,h3:1", "--agent-command", f"{kubectl} {{host}}", status=0)
        assert [rows(text)[host][1] for host in ("h2", "h3")] == ["ok", "ok"]

    def test_pain_18_the_nodes_of_a_slurm_allocation(self, bed: Bed, tmp_path: Path) -> None:
        program = (
            "import os, shlex, sys\n"
            "node = next(word for word in sys.argv if word.startswith('--nodelist='))[11:]\n"
            "rest = list(sys.argv[1:])\n"
            "while rest[0].startswith('--'): rest.pop(0)\n"
            "os.execvp('ssh', ['ssh', node, shlex.join(rest)])\n"
        )
        (tmp_path / "srun").write_text(f"#!{sys.executable}\n{program}")
        (tmp_path / "srun").chmod(0o755)
        path = f"{tmp_path}:/usr/local/bin:/usr/bin:/bin"
        slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "h[2-3]", "PATH": path}
        done = bed["h1"].run([*bed["h1"].launcher(), "doctor"], cwd="/", env=slurm)
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(rows(done.stdout)) == ["host", "h2", "h3"]

    def test_ctrl_c_ends_it_at_once(self, bed: Bed) -> None:
        # No host has this address, so ssh waits for an answer that does not come.
        process = bed["h1"].popen([*RUN, "doctor", "-H", "h2:1,10.77.1.250:1", "--verbose"])
        assert process.stderr is not None
        wait_for(lambda: bed["h2"].processes(), what="the agent on h2")
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGINT
        assert time.monotonic() - started < 5
        for host in bed:
            wait_for(lambda host=host: not host.processes(), 5, f"the end of everything on {host.name}")


def interpreter(folder: Path, packages: dict[str, str], customize: str = "") -> None:
    """A ``python`` in which other packages are installed."""
    site = folder / "site"
    site.mkdir(parents=True)
    for name, version in packages.items():
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise SystemExit('this was not to be imported')")
        (site / f"{name}-{version}.dist-info").mkdir()
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (site / "sitecustomize.py").write_text(customize)
    program(folder / "python", f'PYTHONPATH={site} exec {sys.executable} "$@"')


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
