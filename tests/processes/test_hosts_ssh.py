"""Launches on other hosts by real ssh, and the failures that ssh has to offer. Pains 15, 17, 19 and 30."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hosts import Bed, Host, HostSpec
from tests.support.launching import wait_for

MakeBed = Callable[..., Bed]
RUN = [sys.executable, "-m", "hvdgloo.runner"]
BASE_PYTHON = os.path.realpath(sys.executable)
"""An interpreter that hvdgloo is not installed for."""


def launch(
    host: Host, *arguments: str, cwd: Path | str = "/tmp", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return host.run([*host.launcher(), *arguments], cwd=cwd, env=env, timeout=50.0)


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return sorted(line.partition(">:")[2] for line in done.stdout.splitlines())


def logins(host: Host) -> int:
    return host.sshd_log().count("Accepted publickey for")


class TestWhatWorkersFind:
    def show(
        self, bed: Bed, folder: Path, expression: str, *flags: str, env: dict[str, str] | None = None
    ) -> list[str]:
        program = f"import os, sys, socket; print(socket.gethostname(), {expression})"
        return lines(launch(bed["h1"], "-H", "h1:1,h2:1", *flags, "python", "-c", program, cwd=folder, env=env))

    def test_pain_19_interpreter_and_working_directory_are_the_launcher_s(self, bed: Bed, tmp_path: Path) -> None:
        found = self.show(bed, tmp_path, "os.getcwd(), sys.executable")
        assert found == [f"{host} {tmp_path} {sys.executable}" for host in ("h1", "h2")]

    def test_pain_19_the_working_directory_keeps_the_name_that_the_user_knows(self, bed: Bed, tmp_path: Path) -> None:
        name, real = tmp_path / "name", tmp_path / "real"
        real.mkdir()
        name.symlink_to(real)
        found = self.show(bed, name, "os.getcwd(), os.environ['PWD']", env={"PWD": str(name)})
        assert found == [f"{host} {real} {name}" for host in ("h1", "h2")]

    def test_pain_19_variables_travel_except_this_host_s(self, bed: Bed, tmp_path: Path) -> None:
        env = {"MINE": "tr\u00e4vels 'quoted' $HOME\nline", "DISPLAY": ":7", "TMPDIR": "/elsewhere"}
        found = self.show(
            bed,
            tmp_path,
            "[os.environ.get(name) for name in ('MINE', 'DISPLAY', 'TMPDIR', 'HOME')], 'SSH_CONNECTION' in os.environ",
            env=env,
        )
        assert found == [
            f"h1 {[env['MINE'], ':7', '/elsewhere', bed['h1'].home]} False",
            f"h2 {[env['MINE'], None, None, bed['h2'].home]} True",
        ]

    def test_pain_19_variables_can_be_chosen(self, bed: Bed, tmp_path: Path) -> None:
        (tmp_path / "env").write_text("FILED='by file'\nBOTH=file\n")
        flags = ["-x", "DISPLAY", "-x", "NEW=a=b", "-x", "BOTH=flag", "--env-file", "env", "--export", "named"]
        found = self.show(
            bed,
            tmp_path,
            "[os.environ.get(name) for name in ('DISPLAY', 'NEW', 'BOTH', 'FILED', 'OTHER')], 'PATH' in os.environ",
            *flags,
            env={"DISPLAY": ":7", "OTHER": "stays"},
        )
        assert found == [
            "h1 [':7', 'a=b', 'flag', 'by file', 'stays'] True",
            "h2 [':7', 'a=b', 'flag', 'by file', None] True",
        ]

    def test_pain_19_another_interpreter_there(self, bed: Bed, tmp_path: Path) -> None:
        wrapper = tmp_path / "other python"
        wrapper.write_text(f'#!/bin/sh\nOTHER=1 exec {sys.executable} "$@"\n')
        wrapper.chmod(0o755)
        found = self.show(bed, tmp_path, "os.environ.get('OTHER')", "--remote-python", str(wrapper))
        assert found == ["h1 None", "h2 1"]

    def test_a_module_in_the_working_directory_is_not_the_agent_s(self, bed: Bed, tmp_path: Path) -> None:
        (tmp_path / "json.py").write_text("raise SystemExit('imported')")
        done = bed["h1"].run([sys.executable, "-I", "-m", "hvdgloo.runner", "-H", "h2:1", "hostname"], cwd=tmp_path)
        assert lines(done) == ["h2"]

    def test_pain_30_nothing_of_it_is_on_a_command_line(self, bed: Bed, tmp_path: Path) -> None:
        """Looked at from outside, on both hosts, while the job runs."""
        program = (
            "import os, time; open(os.environ['RANK'], 'w').write(os.environ['HVDGLOO_SECRET']); "
            "[time.sleep(0.01) for _ in iter(lambda: os.path.exists('end'), True)]"
        )
        flags = ["-H", "h1:1,h2:1", "-x", "TOKEN"]
        process = bed["h1"].popen(
            [*RUN, *flags, "python", "-c", program], cwd=tmp_path, env={"TOKEN": "token-4711", "QUIET": "quiet-4711"}
        )
        for rank in "01":
            wait_for(lambda rank=rank: (tmp_path / rank).exists() and (tmp_path / rank).stat().st_size == 64, 30.0)  # type: ignore[misc]
        secret = (tmp_path / "0").read_text()
        seen = [
            Path(f"/proc/{found.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            for host in (bed["h1"], bed["h2"])
            for found in (*host.processes(), *host.sessions())
        ]
        folders = {found.cwd() for found in bed["h2"].processes() if "agent.main" in " ".join(found.cmdline())}
        (tmp_path / "end").touch()
        assert process.wait(20) == 0
        agents = [line for line in seen if "agent.main" in line and not line.startswith("ssh")]
        assert len(agents) == 2, seen  # agent and watchdog on h2
        assert folders == {"/"}  # where they keep no file system busy
        assert any(line.startswith("ssh ") for line in seen)
        # The program's own text names the variable: two workers, the launcher, and its forks on h1 (the agent, and the
        # process that watches over it).
        assert sum("HVDGLOO_SECRET" in line for line in seen) == sum("import os, time;" in line for line in seen) == 5
        assert not [line for line in seen for hidden in (secret, "token-4711", "quiet-4711") if hidden in line]


class TestHowManyWhere:
    def test_a_smaller_np_takes_exactly_that_many_and_goes_nowhere_else(self, bed: Bed) -> None:
        before = logins(bed["h2"]), logins(bed["h3"])
        done = launch(bed["h1"], "-np", "3", "-H", "h1:2,h2:2,h3:2", "hostname")
        assert lines(done) == ["h1", "h1", "h2"]
        assert (logins(bed["h2"]) - before[0], logins(bed["h3"]) - before[1]) == (1, 0)

    def test_a_larger_np_is_an_error_before_anything_starts(self, bed: Bed, tmp_path: Path) -> None:
        (tmp_path / "hosts").write_text("h2 slots=1\nh3 slots=2\n")
        before = logins(bed["h2"])
        done = launch(bed["h1"], "-np", "9", "--hostfile", "hosts", "hostname", cwd=tmp_path)
        assert done.returncode == 2
        assert "only 3 slots (h2:1, h3:2)" in done.stderr
        assert logins(bed["h2"]) == before

    def test_hosts_without_slots(self, bed: Bed) -> None:
        assert lines(launch(bed["h1"], "-H", "h1,h2", "hostname")) == ["h1", "h2"]
        assert lines(launch(bed["h1"], "-np", "1", "-H", "h3,h2", "hostname")) == ["h3"]
        done = launch(bed["h1"], "-np", "3", "-H", "h3,h2", "hostname")
        assert done.returncode == 2
        assert "only 2 slots (h3:1, h2:1)" in done.stderr

    def test_this_machine_by_its_own_name_needs_no_ssh(self, bed: Bed) -> None:
        before = logins(bed["h1"])
        for name in ("h1", "localhost", bed["h1"].address):
            assert lines(launch(bed["h1"], "-H", f"{name}:1,h2:1", "hostname")) == ["h1", "h2"]
        assert logins(bed["h1"]) == before

    def test_one_machine_under_two_names(self, bed: Bed) -> None:
        done = launch(bed["h1"], "-H", f"h1:1,h2:1,{bed['h2'].address}:1", "hostname")
        assert done.returncode == 1
        assert f"{bed['h2'].address}: it is the same machine as h2 (h2)" in done.stderr
        assert done.stdout == ""
        done = launch(bed["h1"], "-H", "h1:1,localhost:1", "hostname")
        assert done.returncode == 2
        assert "h1, localhost are all this machine; give it once" in done.stderr


class TestFailures:
    """Each in one line that names the host and says what to do; and nothing is left running."""

    def fails(self, host: Host, *arguments: str, env: dict[str, str] | None = None, cwd: Path | str = "/tmp") -> str:
        command = () if arguments[-1].endswith(".py") else ("hostname",)
        done = launch(host, *arguments, *command, env=env, cwd=cwd)
        assert done.returncode == 1, done
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        text: str = done.stderr.removeprefix("hvdgloo-run: ").strip()
        return text

    def test_pain_15_one_line_for_each(self, bed: Bed, tmp_path: Path) -> None:
        h1 = bed["h1"]
        no_known = "-o UserKnownHostsFile=/dev/null"
        cases = [
            (["-H", "nosuch:1"], "host nosuch cannot be used: its name cannot be looked up; correct it"),
            (["-H", "h2:1", "-p", "23"], "host h2 cannot be used: it refuses the connection on port 23"),
            (["-H", "192.0.2.1:1"], "host 192.0.2.1 cannot be used: there is no route to it"),
            (
                ["-H", "h2:1", f"--ssh-args={no_known}"],
                f"its host key is not known here, .*by hand .ssh {no_known} h2.",
            ),
            (
                ["-H", "h2:1", f"--ssh-args=-F /dev/null -o StrictHostKeyChecking=no {no_known} -o IdentityFile=none"],
                r"it refuses the login: root@h2: Permission denied \(publickey\)",
            ),
            (["-H", "h2:1", "--ssh-args=-o Nonsense=1"], "ssh does not accept its options: .*nonsense"),
            (["-H", "h2:1", "--remote-python", "/no/python"], "there is no Python at /no/python .*--remote-python"),
        ]
        for arguments, expected in cases:
            found = self.fails(h1, *arguments)
            assert "\n" not in found
            assert re.search(expected, found), found

    def test_pain_15_a_host_key_that_has_changed(self, bed: Bed, tmp_path: Path) -> None:
        known = bed["h1"].path(f"{bed['h1'].home}/.ssh/known_hosts").read_text().splitlines()
        key = known[2].split(maxsplit=1)[1]
        (tmp_path / "known").write_text(f"h2 {key}\n")
        found = self.fails(bed["h1"], "-H", "h2:1", f"--ssh-args=-o UserKnownHostsFile={tmp_path}/known")
        assert found.startswith("host h2 cannot be used: its host key has changed; ")
        assert "ssh-keygen -R h2" in found

    def test_pain_15_all_failing_hosts_are_in_one_report(self, bed: Bed) -> None:
        before = logins(bed["h2"])
        found = self.fails(bed["h1"], "-H", "nosuch:1,h2:1,192.0.2.1:1,h1:1").splitlines()
        assert found[0] == "2 of 4 hosts cannot be used:"
        assert "  nosuch: its name cannot be looked up" in found[1]
        assert "192.0.2.1: there is no route" in found[2]
        assert logins(bed["h2"]) <= before + 1
        wait_for(lambda: not bed["h2"].processes(), 10.0, "the end of the agent on h2")

    def test_pain_15_no_ssh_at_all(self, bed: Bed, tmp_path: Path) -> None:
        (tmp_path / "hostname").symlink_to("/bin/hostname")
        done = bed["h1"].run(["env", f"PATH={tmp_path}", *RUN, "-H", "h2:1", "hostname"], cwd=tmp_path)
        assert done.returncode == 1
        assert "; install an ssh client" in done.stderr

    def test_pain_15_nothing_answers(self, make_bed: MakeBed) -> None:
        bed = make_bed(["h1", "h2"])
        bed.block("h1", "h2")
        found = self.fails(bed["h1"], "-H", "h2:1", "--connect-timeout-seconds", "1")
        assert found.startswith("host h2 cannot be used: nothing answers within 1 s; is it up")

    def test_pain_15_hvdgloo_is_missing_or_another_one(self, make_bed: MakeBed, tmp_path: Path) -> None:
        bed = make_bed(["h1", "h2"])
        checkout = Path(__file__).parents[2]
        bed["h2"].run(["mount", "-t", "tmpfs", "none", str(checkout)], cwd="/", check=True)
        found = self.fails(bed["h1"], "-H", "h2:1", "--remote-python", BASE_PYTHON)
        assert f"hvdgloo is not installed for {BASE_PYTHON} there; install it ({BASE_PYTHON} -m pip install" in found
        assert f"have {checkout} there too, from which this launcher runs" in found
        old = tmp_path / "old" / "hvdgloo"
        old.mkdir(parents=True)
        (old / "__init__.py").touch()
        (old / "version.py").write_text("__version__ = '0.0.1'\n")
        wrapper = tmp_path / "python"
        wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/old exec {BASE_PYTHON} "$@"\n')
        wrapper.chmod(0o755)
        found = self.fails(bed["h1"], "-H", "h2:1", "--remote-python", str(wrapper))
        assert found.startswith("host h2 cannot be used: it has hvdgloo 0.0.1, the launcher has ")

    def test_pain_19_what_workers_need_is_looked_up_before_any_starts(self, make_bed: MakeBed) -> None:
        bed = make_bed([HostSpec(name, private_tmp=True) for name in ("h1", "h2", "h3")])
        for host, folder in (("h1", "/tmp/job"), ("h3", "/tmp/job")):
            bed[host].run(["mkdir", folder], cwd="/", check=True)
        script = bed["h1"].path("/tmp/job/worker.py")
        script.write_text("open('started', 'w')")
        found = self.fails(bed["h1"], "-H", "h1:1,h2:1,h3:1", "worker.py", cwd="/tmp/job")
        assert found.startswith("2 of 3 hosts cannot be used")
        assert "h2: there is no working directory /tmp/job" in found
        assert "h3: there is no file worker.py (looked in /tmp/job)" in found
        assert not script.with_name("started").exists()


class TestWaysThroughSsh:
    def test_port_user_key_jump_host_and_a_talkative_login_shell(self, make_bed: MakeBed, tmp_path: Path) -> None:
        bed = make_bed(
            [
                "h1",
                HostSpec(
                    "h2",
                    sshd_options=("Port 22", "Port 2222"),
                    users=("ann",),
                    bashrc="echo Welcome to h2; echo noise >&2",
                ),
                "h3",
            ]
        )
        h1 = bed["h1"]
        key = tmp_path / "key"
        key.write_text(h1.path(f"{h1.home}/.ssh/id_ed25519").read_text())
        key.chmod(0o600)
        options = f"-F /dev/null -o UserKnownHostsFile={tmp_path}/known -o StrictHostKeyChecking=accept-new"
        done = launch(h1, "-H", "ann@h2:1", "-p", "2222", "-i", str(key), f"--ssh-args={options}", "hostname")
        assert lines(done) == ["h2"]
        assert "hvdgloo-run: [h2] Welcome to h2\n" in done.stderr
        assert "hvdgloo-run: [h2] noise\n" in done.stderr
        assert "Accepted publickey for ann" in bed["h2"].sshd_log()
        done = launch(h1, "-H", "h3:1", "--ssh-args=-J h2", "hostname")
        assert lines(done) == ["h3"]
        assert f"from {bed['h2'].address}" in bed["h3"].sshd_log()

    def test_pain_13_an_address_of_version_6(self, make_bed: MakeBed) -> None:
        bed = make_bed([HostSpec(name, ipv4=False, ipv6=True) for name in ("h1", "h2")])
        done = launch(bed["h1"], "-H", f"root@[{bed['h2'].address}]:1,[{bed['h1'].address}]:1", "hostname")
        assert lines(done) == ["h1", "h2"]

    def test_pain_17_a_host_that_comes_up_late_is_waited_for(self, make_bed: MakeBed) -> None:
        bed = make_bed(["h1", "h2"])
        process = bed["h1"].popen(
            [*RUN, "-H", "h2:1", "-p", "2222", "--wait-for-hosts", "--verbose", "hostname"], cwd="/tmp"
        )
        assert process.stderr is not None
        for line in process.stderr:
            if "refuses the connection on port 2222" in line:
                break
        home = bed["h2"].home
        bed["h2"].run(
            ["/usr/sbin/sshd", "-p", "2222", "-f", f"{home}/sshd_config", "-E", f"{home}/sshd.log"], cwd="/", check=True
        )
        out, _ = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "[0]<stdout>:h2\n")

    def test_connections_that_sshd_drops_are_tried_again(self, make_bed: MakeBed) -> None:
        """MaxStartups: while others have not logged in, sshd hangs up on newcomers."""
        bed = make_bed(["h1", HostSpec("h2", sshd_options=("MaxStartups 1:100:1", "LoginGraceTime 60"))])
        hold = f"import socket; s = socket.create_connection(('{bed['h2'].address}', 22)); print(s.recv(9)); input()"
        holder = bed["h1"].popen([sys.executable, "-c", hold], stdin=subprocess.PIPE)
        assert holder.stdout is not None
        wait_for(lambda: "SSH" in bed["h2"].sshd_log() or bed["h2"].sessions(), what="the holder's connection")
        process = bed["h1"].popen([*RUN, "-H", "h2:1", "hostname"], cwd="/tmp")
        wait_for(lambda: "MaxStartups" in bed["h2"].sshd_log(), what="a dropped connection")
        assert process.poll() is None
        holder.communicate("\n", timeout=10)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out) == (0, "[0]<stdout>:h2\n"), err

    @pytest.mark.extended
    def test_many_hosts_get_through_a_throttling_sshd(self, make_bed: MakeBed) -> None:
        """Fourteen names of one machine: all of their agents come up, and are then refused as the same."""
        bed = make_bed(["h1", HostSpec("h2", sshd_options=("MaxStartups 2:70:12",))])
        config = bed["h1"].path(f"{bed['h1'].home}/.ssh/config")
        config.write_text(f"Host n*\n  HostName h2\n  HostKeyAlias h2\n{config.read_text()}")
        done = launch(bed["h1"], "-H", ",".join(f"n{number}:1" for number in range(14)), "hostname")
        assert done.returncode == 1
        assert "13 of 14 hosts cannot be used" in done.stderr
        assert done.stderr.count("it is the same machine as n0 (h2)") == 13
        assert "MaxStartups" in bed["h2"].sshd_log()
        assert logins(bed["h2"]) == 14

    def test_ctrl_c_while_nothing_answers(self, make_bed: MakeBed) -> None:
        bed = make_bed(["h1", "h2"])
        bed.block("h1", "h2")
        process = bed["h1"].popen([*RUN, "-H", "h2:1", "hostname"], cwd="/tmp")
        wait_for(lambda: any(found.name() == "ssh" for found in bed["h1"].processes()), what="ssh")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert process.returncode == 130
        assert "interrupted before the workers were started" in err
        assert not bed["h1"].processes()
