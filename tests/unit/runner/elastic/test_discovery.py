"""The sources of an elastic job's hosts: scripts that misbehave, and lists that change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdgloo.runner.elastic.constants import RESET_LIMIT_EXCEEDED_MESSAGE
from hvdgloo.runner.elastic.discovery import (
    MAX_OUTPUT,
    DiscoveryError,
    FixedHosts,
    HostDiscoveryScript,
    HostManager,
    Listing,
    address,
    host_entry,
)
from hvdgloo.runner.job.spec import HostEntry
from tests.support.launching import is_running
from tests.support.rendezvous import until
from tests.support.threads import Task

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Writes a shell script; returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "hosts.sh"
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
        return str(path)

    return write


def found(path: str, **options: Any) -> dict[str, int]:
    return HostDiscoveryScript(path, **options).find_available_hosts_and_slots()


def test_a_name_and_back() -> None:
    for entry in (
        HostEntry("h1", 4),
        HostEntry("h1", None, "me"),
        HostEntry("fd00::1", 1),
        HostEntry("fd00::1", 2, "me"),
    ):
        assert host_entry(address(entry), entry.slots) == entry


def trouble(path: str, **options: Any) -> str:
    with pytest.raises(DiscoveryError) as caught:
        found(path, **options)
    text = str(caught.value)
    assert text.startswith(f"host discovery script {path}: ")
    return text.removeprefix(f"host discovery script {path}: ")


class TestAScript:
    def test_lines(self, script: Script) -> None:
        path = script("echo h2:4; echo; echo '  h1  '; echo me@h3:2; echo '[fd00::1]:3'; echo fd00::2; printf last:1")
        hosts = found(path, slots=7)
        assert hosts == {"h2": 4, "h1": 7, "me@h3": 2, "fd00::1": 3, "fd00::2": 7, "last": 1}
        assert list(hosts)[:3] == ["h2", "h1", "me@h3"], "their order is kept"

    def test_without_slots_there_is_one_or_the_host_decides(self, script: Script) -> None:
        assert found(script("echo h1")) == {"h1": 1}
        assert found(script("echo h1; echo h2:3"), slots=None) == {"h1": None, "h2": 3}

    def test_a_host_that_is_listed_twice(self, script: Script) -> None:
        assert list(found(script("echo h1:1; echo h2:1; echo h1:3")).items()) == [("h1", 3), ("h2", 1)]

    def test_nothing(self, script: Script) -> None:
        assert found(script("exit 0")) == {}

    def test_ten_thousand_hosts(self, script: Script) -> None:
        hosts = found(script("i=0; while [ $i -lt 10000 ]; do echo host-$i:8; i=$((i + 1)); done"))
        assert len(hosts) == 10_000
        assert hosts["host-9999"] == 8

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("no such host", "'no such host' is not a host"),
            ("h1:", "'h1:' is not a host"),
            ("h1:many", "'h1:many' is not a host"),
            ("h1:-1", "'h1:-1' is not a host"),
            ("h1:0", "host h1 has no slots"),
            ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host"),
            ("Error: $(x)", "'Error: $(x)' is not a host"),
            *((f"h1:4{gap}h2:4", "write for example: h1:4, and each host on a line of its own") for gap in (",", " ")),
        ],
    )
    def test_what_is_no_host_is_named_with_its_line(self, script: Script, line: str, says: str) -> None:
        text = trouble(script(f"echo h0:1\ncat <<'END'\n{line}\nEND"))
        assert text.startswith("line 2: ")
        assert says in text
        assert text.count(";") <= 1, "no second hint that contradicts the first"

    def test_it_fails_and_its_last_lines_are_shown(self, script: Script) -> None:
        text = trouble(script("echo h1:1; for i in 1 2 3 4 5 6 7; do echo kubectl: no $i >&2; done; exit 3"))
        assert text.split("\n") == [
            "it exited with status 3",
            *(f"    kubectl: no {number}" for number in range(3, 8)),
        ]

    def test_it_is_ended_with_its_children_when_the_answer_is_not_needed(self, script: Script, tmp_path: Path) -> None:
        pids = tmp_path / "pids"
        discovery = HostDiscoveryScript(script(f"sleep 1000 & echo $$ $! >{pids}.new; mv {pids}.new {pids}; wait"))
        asking = Task(discovery.find_available_hosts_and_slots)
        until(pids.exists, "the script to have started")

        def ended() -> bool:
            discovery.interrupt()  # as long as it takes, as the driver does: at first it may only just be known
            return not asking.thread.is_alive()

        until(ended, "the script to be ended")
        with pytest.raises(DiscoveryError, match="killed by signal 9"):
            asking.result()
        for pid in map(int, pids.read_text().split()):
            until(lambda pid=pid: not is_running(pid), "the script and its child to be ended")

    def test_it_is_killed(self, script: Script) -> None:
        assert trouble(script("kill -9 $$")) == "it was killed by signal 9 (SIGKILL)"

    def test_it_hangs_and_so_does_its_child(self, script: Script) -> None:
        path = script('sleep 60 & echo "$!" >"$0.pid"; echo why >&2; wait')
        started = time.monotonic()
        assert trouble(path, timeout=2) == "it did not end within 2 s\n    why"
        assert time.monotonic() - started < 20
        child = int(Path(f"{path}.pid").read_text(encoding="ascii"))
        until(lambda: not is_running(child), "the child to end")

    def test_a_gigabyte(self, script: Script) -> None:
        text = trouble(script("exec head -c 1000000000 /dev/zero"))
        assert text == f"it printed more than {MAX_OUTPUT} bytes"

    def test_a_gigabyte_of_errors_is_not_kept(self, script: Script) -> None:
        path = script("head -c 20000000 /dev/zero >&2; echo >&2; echo the reason >&2; exit 1")
        assert trouble(path, timeout=30).endswith("the reason")

    def test_it_is_not_text(self, script: Script) -> None:
        assert trouble(script(r"printf 'h1\377'")) == "its output is not UTF-8"

    def test_it_is_not_there(self, tmp_path: Path) -> None:
        assert trouble(str(tmp_path / "none.sh")) == "it cannot be executed: No such file or directory"

    def test_it_may_not_be_executed(self, script: Script) -> None:
        path = script("echo h1")
        Path(path).chmod(0o644)
        assert trouble(path) == "it cannot be executed: Permission denied"

    def test_one_that_does_not_say_what_runs_it_is_the_shell_s(self, script: Script) -> None:
        path = script("")
        Path(path).write_text("for host in h1 h2; do echo $host:2; done\n", encoding="utf-8")
        assert found(path) == {"h1": 2, "h2": 2}

    def test_arguments_are_passed_on_by_a_shell_as_with_horovod(self, script: Script, tmp_path: Path) -> None:
        path = script('echo "$2:$1"')
        assert found(f"{path} 3 'h7'") == {"h7": 3}
        assert found(f"N=4; {path} $N h7 | cat") == {"h7": 4}
        (tmp_path / "with a space").mkdir()
        moved = Path(path).rename(tmp_path / "with a space" / "hosts.sh")
        moved.write_text("#!/bin/sh\necho h8:1\n", encoding="utf-8")
        assert found(str(moved)) == {"h8": 1}, "the name of a file is no command line, whatever is in it"

    def test_a_command_line_that_fails_is_told_by_the_shell(self) -> None:
        text = trouble("no-such-program-of-ours --all")
        assert text.startswith("it exited with status 127\n")
        assert "no-such-program-of-ours: not found" in text or "command not found" in text


class Answers:
    """A discovery whose answers the test has written down."""

    def __init__(self, *answers: Mapping[Any, Any] | Exception) -> None:
        self._answers = list(answers)

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def listings(*answers: Mapping[Any, Any] | Exception) -> list[Listing]:
    manager = HostManager(Answers(*answers))
    return [manager.update_available_hosts() for _ in answers]


class TestBelievingIt:
    def test_a_host_that_is_added_counts_at_once(self) -> None:
        first, second = listings({"h1": 2}, {"h1": 2, "h2": 1})
        assert first == Listing((("h1", 2),), True)
        assert second == Listing((("h1", 2), ("h2", 1)), True)

    def test_one_that_is_missing_counts_as_removed_the_second_time(self) -> None:
        all_of_it, half, still = listings({"h1": 2, "h2": 2}, {"h1": 2}, {"h1": 2})
        assert half == Listing(all_of_it.hosts, False)
        assert still == Listing((("h1", 2),), True)

    def test_half_of_a_list_once_changes_nothing(self) -> None:
        assert not any(listing.changed for listing in listings({"h1": 2, "h2": 2}, {"h2": 2}, {"h1": 2, "h2": 2})[2:])
        assert {len(listing.hosts) for listing in listings({"h1": 1, "h2": 1}, {}, {"h1": 1, "h2": 1})} == {2}

    def test_fewer_slots_count_the_second_time_and_more_at_once(self) -> None:
        hosts = [listing.hosts[0][1] for listing in listings({"h": 2}, {"h": 4}, {"h": 1}, {"h": 1})]
        assert hosts == [2, 4, 4, 1]

    def test_a_failure_in_between_is_no_answer(self) -> None:
        listed = listings({"h1": 1, "h2": 1}, {"h1": 1}, DiscoveryError("it hangs"), {"h1": 1, "h2": 1})
        assert [len(listing.hosts) for listing in listed] == [2, 2, 2, 2]

    def test_a_script_that_is_deleted_and_comes_back(self, script: Script) -> None:
        path = script("echo h1:2")
        manager = HostManager(HostDiscoveryScript(path))
        hosts = manager.update_available_hosts().hosts
        Path(path).unlink()
        gone = manager.update_available_hosts()
        assert (gone.hosts, gone.changed) == (hosts, False)
        assert gone.notice == (
            f"host discovery script {path}: it cannot be executed: No such file or directory\n"
            "The job goes on with the hosts that were listed before"
        )
        assert manager.update_available_hosts().notice == "", "once is enough"
        script("echo h1:2; echo h2:2")
        back = manager.update_available_hosts()
        assert (back.hosts, back.notice) == ((("h1", 2), ("h2", 2)), "hosts can be discovered again")

    def test_the_first_failure_is_an_error(self) -> None:
        with pytest.raises(DiscoveryError, match="it exited with status 1"):
            listings(DiscoveryError("it exited with status 1"))

    def test_later_ones_are_told_once_per_change(self) -> None:
        one, other = DiscoveryError("it hangs"), DiscoveryError("it exited with status 1")
        notices = [listing.notice for listing in listings({"h": 1}, one, one, other, {"h": 1}, {"h": 1}, one)]
        kept = "\nThe job goes on with the hosts that were listed before"
        assert notices == [
            "",
            f"it hangs{kept}",
            "",
            f"it exited with status 1{kept}",
            "hosts can be discovered again",
            "",
            f"it hangs{kept}",
        ]

    def test_a_users_own_object_may_raise_anything(self) -> None:
        with pytest.raises(DiscoveryError, match="host discovery: KeyError: 'pods'"):
            listings(KeyError("pods"))

    @pytest.mark.parametrize("answer", [{"h": 0}, {"h": "2"}, {"": 1}, {5: 1}, {"h": True}])
    def test_and_return_anything(self, answer: Mapping[Any, Any]) -> None:
        with pytest.raises(DiscoveryError, match="is not a host with its slots"):
            listings(answer)

    @pytest.mark.parametrize("name", ["-oProxyCommand=x", "h1 h2", "a@b@c", "h1:4"])
    def test_and_name_anything(self, name: str) -> None:
        """Names that go on a command line of ssh's are checked, wherever they come from."""
        with pytest.raises(DiscoveryError, match=r"is not (a host|the name of a host)"):
            HostManager(Answers({name: 1})).update_available_hosts()

    def test_slots_that_are_left_to_the_host(self) -> None:
        manager = HostManager(Answers({"h1": None, "h2": 2}, {"h1": 4, "h2": None}, {"h1": 4}, {"h1": 4}))
        listings = [manager.update_available_hosts() for _ in range(4)]
        assert [listing.hosts for listing in listings] == [
            (("h1", None), ("h2", 2)),
            (("h1", 4), ("h2", None)),
            (("h1", 4), ("h2", None)),
            (("h1", 4),),
        ]

    def test_fixed_hosts_can_be_set(self) -> None:
        fixed = FixedHosts({"h1": 2})
        manager = HostManager(fixed)
        assert manager.update_available_hosts().hosts == (("h1", 2),)
        fixed.set({"h1": 2, "h2": 2})
        manager.update_available_hosts()
        assert manager.current_hosts == (("h1", 2), ("h2", 2))


def test_horovods_text_has_one_place_for_the_limit() -> None:
    for limit in (0, 1, 3):
        text = RESET_LIMIT_EXCEEDED_MESSAGE.format(limit)
        assert text.endswith(f"exceeds --reset-limit {limit}"), "a sentence whatever the number is"
