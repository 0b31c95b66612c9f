"""ssh's command line, and what its last words mean. Pain 15.

The words are from OpenSSH 7 to 9 on Linux and macOS. What can be provoked here is also met in real sessions, in
tests/processes/test_hosts_ssh.py.
"""

from __future__ import annotations

import shlex
import sys

import pytest

from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.processes.bootstrap import agent_argv
from hvdgloo.runner.transport.failures import Cause, Ending, Retry
from hvdgloo.runner.transport.ssh import diagnose, ssh_argv
from hvdgloo.version import __version__
from tests.support.launching import run_command

HOST = HostEntry("h2", 2)
PYTHON = "/opt/env/bin/python"
REACH = Reach(python=PYTHON, connect_timeout=7)

CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Someone could be eavesdropping on you right now (man-in-the-middle attack)!
It is also possible that a host key has just been changed.
Host key for h2 has changed and you have requested strict checking.
Host key verification failed."""
BAD_KEY_FILE = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @
Permissions 0644 for '/Users/ann/.ssh/id_ed25519' are too open.
Load key "/Users/ann/.ssh/id_ed25519": bad permissions
ann@h2: Permission denied (publickey)."""
JUMP_REFUSED = """\
channel 0: open failed: connect failed: Connection refused
stdio forwarding failed
kex_exchange_identification: Connection closed by remote host
Connection closed by UNKNOWN port 65535"""
JUMP_NAME = """\
channel 0: open failed: connect failed: Name or service not known
stdio forwarding failed
ssh_exchange_identification: Connection closed by remote host"""

OWN_WORDS = [
    ("ssh: Could not resolve hostname h2: Name or service not known", Cause.NAME),
    ("ssh: Could not resolve hostname h2: nodename nor servname provided, or not known", Cause.NAME),
    ("ssh: Could not resolve hostname h2: No address associated with hostname", Cause.NAME),
    ("ssh: connect to host h2 port 22: Connection refused", Cause.REFUSED),
    ("ssh: connect to host h2 port 22: Connection timed out", Cause.TIMED_OUT),
    ("ssh: connect to host h2 port 22: Operation timed out", Cause.TIMED_OUT),
    ("Timeout, server h2 not responding.", Cause.TIMED_OUT),
    ("Connection timed out during banner exchange\nConnection to 10.0.0.2 port 22 timed out", Cause.TIMED_OUT),
    ("ssh: connect to host h2 port 22: No route to host", Cause.NO_ROUTE),
    ("ssh: connect to host h2 port 22: Network is unreachable", Cause.NO_ROUTE),
    ("ssh: connect to host h2 port 22: Host is down", Cause.NO_ROUTE),
    ("Host key verification failed.", Cause.HOST_KEY_UNKNOWN),
    (
        "No ED25519 host key is known for h2 and you have requested strict checking.\nHost key verification failed.",
        Cause.HOST_KEY_UNKNOWN,
    ),
    (CHANGED, Cause.HOST_KEY_CHANGED),
    ("ann@h2: Permission denied (publickey).", Cause.AUTHENTICATION),
    ("ann@h2: Permission denied (publickey,gssapi-keyex,gssapi-with-mic,password).", Cause.AUTHENTICATION),
    ("Permission denied (publickey,keyboard-interactive).", Cause.AUTHENTICATION),
    (
        "Received disconnect from 10.0.0.2 port 22:2: Too many authentication failures\nDisconnected from 10.0.0.2",
        Cause.AUTHENTICATION,
    ),
    (BAD_KEY_FILE, Cause.AUTHENTICATION),
    (
        "Warning: Identity file /x not accessible: No such file or directory.\nann@h2: Permission denied (publickey).",
        Cause.AUTHENTICATION,
    ),
    (JUMP_REFUSED, Cause.REFUSED),
    (JUMP_NAME, Cause.NAME),
    ("command-line: line 0: Bad configuration option: nonsense", Cause.CONFIGURATION),
    ("/Users/ann/.ssh/config: line 3: Bad configuration option: usekeychain", Cause.CONFIGURATION),
    ("Bad owner or permissions on /Users/ann/.ssh/config", Cause.CONFIGURATION),
    ("unknown option -- y\nusage: ssh [-46AaCfGgKkMNnqsTtVvXxYy] [-B bind_interface]", Cause.CONFIGURATION),
    (
        "Unable to negotiate with 10.0.0.2 port 22: no matching host key type found. Their offer: ssh-rsa,ssh-dss",
        Cause.CONFIGURATION,
    ),
    ("Cannot execute command-line and remote command.", Cause.CONFIGURATION),
]
PASSING = [
    "kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.2 port 22",
    "kex_exchange_identification: read: Connection reset by peer\nConnection reset by 10.0.0.2 port 22",
    "ssh_exchange_identification: read: Connection reset by peer",
    "ssh_exchange_identification: Connection closed by remote host",
    "kex_exchange_identification: write: Broken pipe",
    "Connection reset by 10.0.0.2 port 22",
    "Connection closed by 10.0.0.2 port 22",
    "Connection closed by remote host",
    "ssh_dispatch_run_fatal: Connection to 10.0.0.2 port 22: Broken pipe",
]


def ending(words: str, status: int = 255) -> Ending:
    return Ending(status, tuple(words.splitlines()))


@pytest.mark.parametrize(("words", "cause"), OWN_WORDS)
def test_pain_15_failures_are_told_apart(words: str, cause: Cause) -> None:
    found = diagnose(HOST, ending(words), REACH)
    assert found.cause is cause
    assert found.retry is Retry.NEVER
    assert "\n" not in found.text
    assert "{" not in found.text


@pytest.mark.parametrize("words", PASSING)
def test_dropped_connections_are_tried_again(words: str) -> None:
    found = diagnose(HOST, ending(words), REACH)
    # The bare "closed by remote host" may as well come in the middle of a session.
    assert found.cause is Cause.DROPPED or words == "Connection closed by remote host"
    assert found.retry is (Retry.A_FEW_TIMES if found.cause is Cause.DROPPED else Retry.NEVER)
    assert "\n" not in found.text


def test_a_name_server_that_is_out_of_order_is_asked_again() -> None:
    found = diagnose(HOST, ending("ssh: Could not resolve hostname h2: Temporary failure in name resolution"), REACH)
    assert (found.cause, found.retry) == (Cause.NAME, Retry.A_FEW_TIMES)


@pytest.mark.parametrize("words", [words for words, cause in OWN_WORDS[:10] if cause is not Cause.HOST_KEY_UNKNOWN])
def test_pain_17_hosts_that_are_not_up_are_waited_for_on_demand(words: str) -> None:
    found = diagnose(HOST, ending(words), Reach(python=PYTHON, wait_for_hosts=True))
    assert found.retry is Retry.UNTIL_THE_DEADLINE


@pytest.mark.parametrize(
    ("words", "status", "cause", "text"),
    [
        (f"bash: line 1: {PYTHON}: No such file or directory", 127, Cause.PYTHON, "name another one with"),
        (f"bash: line 1: exec: {PYTHON}: not found", 127, Cause.PYTHON, "no Python at"),
        (f"sh: 1: exec: {PYTHON}: not found", 127, Cause.PYTHON, "no Python at"),
        (f"zsh:1: no such file or directory: {PYTHON}", 127, Cause.PYTHON, "no Python at"),
        (f"{PYTHON}: Command not found.", 127, Cause.PYTHON, "no Python at"),
        (f"fish: Unknown command: {PYTHON}", 127, Cause.PYTHON, "no Python at"),
        (f"bash: line 1: {PYTHON}: Permission denied", 126, Cause.PYTHON, "no Python at"),
        ("  File x\nModuleNotFoundError: No module named 'hvdgloo'", 1, Cause.HVDGLOO, "-m pip install hvdgloo=="),
        ("ImportError: No module named hvdgloo.version", 1, Cause.HVDGLOO, "is not installed for /opt/env/bin/python"),
        ("hvdgloo agent: No module named flask", 1, Cause.HVDGLOO, "lacks the module flask"),
        ("AttributeError: type object 'str' has no attribute 'fromhex'", 1, Cause.PYTHON, "too old"),
        ("hvdgloo agent: version 0.0.9 is installed here", 1, Cause.VERSION, f"0.0.9, the launcher has {__version__}"),
        ("This account is currently not available.", 1, Cause.OTHER, "status 1: This account is currently not"),
        ("", 0, Cause.OTHER, "ended with status 0 and said nothing"),
        ("", -9, Cause.OTHER, "was killed by signal 9"),
        ("a\nb\nc\nd", 255, Cause.OTHER, "ssh ended with status 255: b; c; d"),
    ],
)
def test_what_is_wrong_on_the_host_itself(words: str, status: int, cause: Cause, text: str) -> None:
    found = diagnose(HOST, ending(words, status), REACH)
    assert found.cause is cause
    assert text in found.text
    assert found.retry is Retry.NEVER


def test_ssh_s_words_count_only_if_ssh_itself_failed() -> None:
    found = diagnose(HOST, ending("server: Connection refused", 1), REACH)
    assert found.cause is Cause.OTHER


def test_the_mend_can_be_typed() -> None:
    reach = Reach(ssh_port=2222, ssh_identity_file="my key", ssh_args=("-J", "gate"))
    user = HostEntry("h2", 1, "ann")
    unknown = diagnose(user, ending("Host key verification failed."), reach)
    assert "(ssh -J gate -p 2222 -i 'my key' ann@h2)" in unknown.text
    changed = diagnose(user, ending(CHANGED), reach)
    assert "(ssh-keygen -R '[h2]:2222')" in changed.text
    refused = diagnose(user, ending("ssh: connect to host h2 port 2222: Connection refused"), reach)
    assert "refuses the connection on port 2222" in refused.text
    late = diagnose(HOST, ending("ssh: connect to host h2 port 22: Connection timed out"), REACH)
    assert "nothing answers within 7 s" in late.text
    silent = diagnose(HOST, ending("Timeout, server h2 not responding."), REACH)
    assert "it was reached, and then nothing more came from it" in silent.text
    denied = diagnose(HOST, ending("ann@h2: Permission denied (publickey)."), REACH)
    assert "ssh -o BatchMode=yes h2" in denied.text


class TestTheCommandLine:
    def test_the_user_s_own_options_come_first_for_ssh_takes_the_first(self) -> None:
        reach = Reach(ssh_port=2222, ssh_identity_file="key", ssh_args=("-o", "BatchMode=no"), connect_timeout=0.2)
        argv = list(ssh_argv(HostEntry("h2", 1, "ann"), reach))
        assert argv[:7] == ["ssh", "-o", "BatchMode=no", "-p", "2222", "-i", "key"]
        assert argv.index("BatchMode=no") < argv.index("BatchMode=yes")
        assert "ConnectTimeout=1" in argv
        assert argv[argv.index("-l") + 1] == "ann"
        assert argv[-3:-1] == ["--", "h2"]

    def test_nothing_is_forwarded_and_no_terminal_is_asked_for(self) -> None:
        argv = ssh_argv(HOST, Reach())
        assert "-T" in argv
        assert "ClearAllForwardings=yes" in argv
        assert not {"-A", "-X", "-Y", "-t"} & set(argv)
        assert not any("StrictHostKeyChecking" in word for word in argv)

    @pytest.mark.parametrize(("silence", "interval"), [(0.5, 1), (5.0, 2), (60.0, 20)])
    def test_a_client_whose_launcher_is_gone_ends_after_a_silence_too(self, silence: float, interval: int) -> None:
        argv = ssh_argv(HOST, Reach(silence=silence))
        assert f"ServerAliveInterval={interval}" in argv
        assert "ServerAliveCountMax=3" in argv
        assert "ControlMaster=no" in argv

    @pytest.mark.parametrize("shell", ["sh", "bash"])
    def test_a_login_shell_hands_the_words_on_as_they_are(self, shell: str) -> None:
        command = ssh_argv(HOST, Reach(python="/a b/$HOME'x/python"))[-1]
        words = run_command([shell, "-c", command.replace("exec ", "printf '%s\\0' ", 1)], check=True).stdout
        assert tuple(words.split("\0")[:-1]) == agent_argv("/a b/$HOME'x/python")

    def test_the_agent_s_words_survive_other_shells(self) -> None:
        """csh replaces "!" even in single quotes, and fish backslashes: the lines hold neither, nor line ends."""
        program = agent_argv("python")[2]
        assert not set(program) & set("'\\!\n")
        assert len(shlex.join(agent_argv("python"))) < 2000

    def test_the_agent_s_lines_are_python(self) -> None:
        compile(agent_argv(sys.executable)[2], "bootstrap", "exec")
