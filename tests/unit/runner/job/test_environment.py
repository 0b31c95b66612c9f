"""Templates, and which variables travel: values in, values out. Pains 17 and 19."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdgloo.errors import ConfigError
from hvdgloo.runner.agent.preflight import lacking
from hvdgloo.runner.job.command import needs, resolve_elsewhere
from hvdgloo.runner.job.environment import (
    for_other_hosts,
    is_host_specific,
    parse_exports,
    read_env_file,
    working_directory,
)
from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.processes.bootstrap import agent_argv
from hvdgloo.runner.protocol.frames import Lacking, Require
from hvdgloo.runner.transport.failures import Cause, Ending, Retry, preflight_failure
from hvdgloo.runner.transport.template import diagnose, fill_in, parse_template
from tests.support.launching import of_a_service

AGENT = agent_argv("/opt/py")


class TestTemplates:
    def filled(self, template: str, host: HostEntry | None = None, port: int | None = None) -> tuple[str, ...]:
        reach = Reach(python="/opt/py", ssh_port=port, agent_command=parse_template(template))
        return fill_in(reach.agent_command, host or HostEntry("w0", 1), reach)

    def test_the_agent_s_command_line_comes_last(self) -> None:
        assert self.filled("kubectl exec -i {host} --") == ("kubectl", "exec", "-i", "w0", "--", *AGENT)

    def test_or_where_it_is_wanted(self) -> None:
        assert self.filled("env A=1 {command} ") == ("env", "A=1", *AGENT)
        words = self.filled("sh -c 'cd /x; {command}'")
        assert words[:2] == ("sh", "-c")
        assert words[2].startswith("cd /x; /opt/py -c '")
        assert self.filled("cloud ssh {host} --command {shell}")[:4] == ("cloud", "ssh", "w0", "--command")
        assert len(self.filled("cloud ssh {host} --command {shell}")) == 5

    def test_a_shell_s_rules_for_words(self) -> None:
        assert self.filled("a 'b c' d\\ e \"f\"")[:4] == ("a", "b c", "d e", "f")

    def test_fields(self) -> None:
        ann = HostEntry("w0", 1, "ann")
        assert self.filled("x {user} {host} {destination} {port}", ann, 22)[1:5] == ("ann", "w0", "ann@w0", "22")
        assert self.filled("x {destination}")[1] == "w0"
        assert self.filled("x '{{host}}'")[1] == "{host}"

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            ("", "it is empty"),
            ("'", "No closing quotation"),
            ("x {pod}", r"there is no \{pod\}, only \{host\}"),
            ("x {", "--agent-command x"),
            ("x {}", "there is no"),
            ("x {host.name}", "there is no"),
        ],
    )
    def test_mistakes(self, template: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            parse_template(template)

    @pytest.mark.parametrize(("field", "hint"), [("user", "user@w0"), ("port", "--ssh-port")])
    def test_what_a_host_does_not_have(self, field: str, hint: str) -> None:
        with pytest.raises(ConfigError, match=f"host w0 does not have: give {hint}"):
            self.filled(f"x {{{field}}}")

    @pytest.mark.parametrize(
        "words",
        [
            'Error from server (NotFound): pods "w0" not found',
            'error: unable to upgrade connection: container not found ("main")',
            "Error from server (BadRequest): pod w0 does not have a host assigned",
            "Error: No such container: w0",
            "Error response from daemon: container 0a1b is not running",
            "The connection to the server localhost:8080 was refused - did you specify the right host or port?",
            "something that nobody has foreseen",
            "",
        ],
    )
    def test_pain_17_what_is_not_known_to_last_is_tried_again(self, words: str) -> None:
        reach = Reach(agent_command=("/usr/bin/kubectl",))
        found = diagnose(Ending(1, tuple(words.splitlines())), reach)
        assert (found.cause, found.retry) == (Cause.NOT_THERE, Retry.UNTIL_THE_DEADLINE)
        assert found.text.startswith("kubectl ended with status 1")
        impatient = Reach(agent_command=("kubectl",), wait_for_hosts=False)
        assert diagnose(Ending(1, tuple(words.splitlines())), impatient).retry is Retry.NEVER

    @pytest.mark.parametrize(
        ("words", "status", "cause"),
        [
            ("error: unknown shorthand flag: 'y' in -y", 1, Cause.CONFIGURATION),
            ('Error from server (Forbidden): pods "w0" is forbidden', 1, Cause.AUTHENTICATION),
            ("error: You must be logged in to the server (Unauthorized)", 1, Cause.AUTHENTICATION),
            ("permission denied while trying to connect to the Docker daemon socket", 1, Cause.AUTHENTICATION),
            ("nsenter: failed to execute /opt/py: No such file or directory", 127, Cause.PYTHON),
            ('exec of "/opt/py" failed: No such file or directory', 255, Cause.PYTHON),
            (
                'OCI runtime exec failed: unable to start container process: exec: "/opt/py": stat /opt/py: '
                "no such file or directory: unknown\ncommand terminated with exit code 126",
                126,
                Cause.PYTHON,
            ),
            ("ModuleNotFoundError: No module named 'hvdgloo'\ncommand terminated with exit code 1", 1, Cause.HVDGLOO),
        ],
    )
    def test_what_will_not_pass_is_told_at_once(self, words: str, status: int, cause: Cause) -> None:
        reach = Reach(python="/opt/py", agent_command=("kubectl",))
        found = diagnose(Ending(status, tuple(words.splitlines())), reach)
        assert (found.cause, found.retry) == (cause, Retry.NEVER)


class TestVariables:
    @pytest.mark.parametrize(
        "name",
        [
            "SSH_AUTH_SOCK", "DISPLAY", "HOSTNAME", "XDG_RUNTIME_DIR", "TMPDIR", "HOME", "USER", "PWD", "_",
            "TMUX_PANE", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "DBUS_SESSION_BUS_ADDRESS", "KUBERNETES_PORT",
            "WEB_SERVICE_HOST", "WEB_PORT_80_TCP_ADDR",
        ],
    )  # fmt: skip
    def test_pain_19_what_describes_this_host_stays_here(self, name: str) -> None:
        assert is_host_specific(name)
        assert for_other_hosts({name: "x"}, frozenset(), export_all=True) == {}
        assert for_other_hosts({name: "x"}, frozenset({name}), export_all=True) == {name: "x"}

    @pytest.mark.parametrize(
        "name",
        [
            "PATH",
            "PYTHONPATH",
            "LD_LIBRARY_PATH",
            "CONDA_PREFIX",
            "NCCL_DEBUG",
            "OMP_NUM_THREADS",
            "MY_DISPLAY",
            "LANG",
        ],
    )
    def test_pain_19_everything_else_travels(self, name: str) -> None:
        assert for_other_hosts({name: "x"}, frozenset(), export_all=True) == {name: "x"}
        assert for_other_hosts({name: "x"}, frozenset(), export_all=False) == {}
        assert for_other_hosts({name: "x"}, frozenset({name}), export_all=False) == {name: "x"}

    def test_settings_travel_in_any_case(self) -> None:
        environ = {"HVDGLOO_CYCLE_TIME": "1", "HOROVOD_LOG_LEVEL": "debug"}
        assert for_other_hosts(environ, frozenset(), export_all=False) == environ

    @pytest.mark.parametrize("service", ["HVDGLOO", "HOROVOD", "HVDGLOO_RENDEZVOUS", "WEB"])
    def test_pain_19_a_kubernetes_service_stays_here(self, service: str) -> None:
        """Another cluster's service may have the same name and another address."""
        brought = of_a_service(service)
        assert for_other_hosts({**brought, "HVDGLOO_PORT_RANGE": "1-9"}, frozenset(), export_all=True) == {
            "HVDGLOO_PORT_RANGE": "1-9"
        }
        assert for_other_hosts(brought, frozenset(brought), export_all=False) == brought

    def test_exports(self) -> None:
        assert parse_exports(["A", "B=1=2", "C="], {"A": "here"}) == {"A": "here", "B": "1=2", "C": ""}

    @pytest.mark.parametrize("text", ["", "=1", "A B=1", "A\0"])
    def test_what_is_no_variable(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"-x .*expected NAME or NAME=VALUE"):
            parse_exports([text], {})

    @pytest.mark.parametrize("text", ["BAD NAME=s3cret", "A=s3cret\0"])
    def test_pain_30_a_value_is_not_shown(self, text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse_exports([text], {})
        assert str(caught.value) == f"-x {text.partition('=')[0]}: expected NAME or NAME=VALUE"

    def test_a_variable_that_is_not_set(self) -> None:
        with pytest.raises(ConfigError, match="-x NOPE: NOPE is not set here; give it a value"):
            parse_exports(["NOPE"], {})

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "env"
        path.write_text(
            "# comment\n\nA=1\nexport B=two words\nC='quoted # text'\nD=\"x\"\nE\nF=$HOME\n  G = 7\nH=\nI='\n"
        )
        assert read_env_file(str(path), {"E": "here"}) == {
            "A": "1", "B": "two words", "C": "quoted # text", "D": "x", "E": "here", "F": "$HOME", "G": "7", "H": "",
            "I": "'",
        }  # fmt: skip

    def test_mistakes_name_file_and_line(self, tmp_path: Path) -> None:
        path = tmp_path / "env"
        path.write_text("A=1\n\nNOPE\n")
        with pytest.raises(ConfigError, match=rf"--env-file {path}, line 3: NOPE is not set here"):
            read_env_file(str(path), {})
        with pytest.raises(ConfigError, match="absent: No such file"):
            read_env_file(str(tmp_path / "absent"), {})


class TestTheWorkingDirectory:
    def test_pain_19_goes_by_the_name_that_the_user_knows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, name = tmp_path / "real", tmp_path / "name"
        real.mkdir()
        name.symlink_to(real)
        monkeypatch.chdir(real)
        assert working_directory({"PWD": str(name)}) == str(name)
        assert working_directory({}) == str(real)
        # What a program has left there that changed its folder.
        assert working_directory({"PWD": str(tmp_path)}) == str(real)
        assert working_directory({"PWD": str(tmp_path / "absent")}) == str(real)
        assert working_directory({"PWD": "."}) == str(real)

    def test_one_that_was_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        with pytest.raises(ConfigError, match="the current folder no longer exists"):
            working_directory({"PWD": str(gone)})


class TestRequirements:
    def test_what_is_there(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").touch()
        (tmp_path / "tool").touch(mode=0o755)
        required = Require(str(tmp_path), ["train.py"], ["./tool", "sh"], "")
        assert lacking(required, {"PATH": "/bin"}) == Lacking()
        assert preflight_failure(lacking(required, {"PATH": "/bin"}), str(tmp_path)) is None

    def test_what_is_not(self, tmp_path: Path) -> None:
        (tmp_path / "plain").touch(mode=0o644)
        found = lacking(Require(str(tmp_path), ["train.py"], ["./plain", "no-such-tool"], "/bin"), {})
        assert found.things == ("file train.py", "program ./plain", "program no-such-tool")
        diagnosis = preflight_failure(found, "/data")
        assert diagnosis is not None
        assert diagnosis.cause is Cause.PROGRAM
        assert diagnosis.text.startswith("there is no file train.py and no program ./plain and no program no-such-tool")

    def test_pain_19_no_working_directory(self, tmp_path: Path) -> None:
        gone = str(tmp_path / "gone")
        diagnosis = preflight_failure(lacking(Require(gone, ["train.py"]), {}), gone)
        assert diagnosis is not None
        assert (diagnosis.cause, diagnosis.retry) == (Cause.DIRECTORY, Retry.NEVER)
        assert f"there is no working directory {gone}; hvdgloo-run copies no files" in diagnosis.text

    @pytest.mark.parametrize(
        ("command", "argv", "files", "programs"),
        [
            (["train.py", "-v"], ("/opt/py", "train.py", "-v"), ["train.py"], ()),
            (["-m", "a.b"], ("/opt/py", "-m", "a.b"), [], ()),
            (["python", "-c", "1"], ("/opt/py", "-c", "1"), [], ()),
            (["python3", "x.py"], ("/opt/py", "x.py"), ["x.py"], ()),
            (["nvidia-smi"], ("nvidia-smi",), (), ["nvidia-smi"]),
            (["./run.sh", "a"], ("./run.sh", "a"), (), ["./run.sh"]),
        ],
    )
    def test_a_command_s_meaning_elsewhere(
        self, command: list[str], argv: tuple[str, ...], files: list[str], programs: list[str]
    ) -> None:
        assert resolve_elsewhere(command, python="/opt/py") == argv
        assert needs(argv, "/opt/py") == (files, programs)
