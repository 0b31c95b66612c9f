"""Templates of agents' command lines, and what their last words mean. Pain 17."""

from __future__ import annotations

import pytest

from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.processes.bootstrap import agent_argv
from hvdgloo.runner.transport.failures import Cause, Ending, Retry
from hvdgloo.runner.transport.template import diagnose, fill_in, parse_template

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
            "something that was not foreseen",
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
