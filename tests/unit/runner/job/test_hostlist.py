"""The user's hosts, and the distribution of workers: values in, values out."""

from __future__ import annotations

import getpass
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo.errors import ConfigError
from hvdgloo.runner.host_admission import Reached
from hvdgloo.runner.host_setup import HostWorkers
from hvdgloo.runner.job.host_sources import take_inventory
from hvdgloo.runner.job.hostlist import check_load, parse_hosts, place, read_hostfile, remark_on_load, shortlist
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec, Reach
from hvdgloo.runner.network.interfaces import Address
from hvdgloo.runner.protocol.frames import Hello
from hvdgloo.runner.transport.failures import Ending
from hvdgloo.runner.transport.local import LocalSpawner
from hvdgloo.runner.transport.select import AnyHostSpawner, choose_spawner, hosts_here


def spec(np: int | None, **more: int) -> LaunchSpec:
    return LaunchSpec(command=("true",), hosts=(), np=np, cwd="/", environ={}, secret=b"s" * 32, **more)  # type: ignore[arg-type]


def hello(gpus: int = 0, cores: int = 8) -> Hello:
    return Hello(1, "", "name", "identity", 1, cores, gpus, 20000)


class TestTheHostsOption:
    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("h1:4", [HostEntry("h1", 4)]),
            ("h1:4,h2:2", [HostEntry("h1", 4), HostEntry("h2", 2)]),
            (" h1:4 , h2 ", [HostEntry("h1", 4), HostEntry("h2")]),
            ("user@node-1.cluster:3", [HostEntry("node-1.cluster", 3, "user")]),
            ("a@h1,b@h2:2", [HostEntry("h1", None, "a"), HostEntry("h2", 2, "b")]),
            ("[fe80::1%eth0]:2,10.0.0.5:1", [HostEntry("fe80::1%eth0", 2), HostEntry("10.0.0.5", 1)]),
            ("[::1]", [HostEntry("::1")]),
            ("root@[fd00::5]:2", [HostEntry("fd00::5", 2, "root")]),
            # As a batch system's list has it: a host for each slot.
            ("h1,h2,h1,h1", [HostEntry("h1", 3), HostEntry("h2")]),
        ],
    )
    def test_forms(self, text: str, hosts: list[HostEntry]) -> None:
        assert parse_hosts(text) == tuple(hosts)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", r"--hosts \(-H\) names no host"),
            ("h1:1,,h2:1", r"--hosts h1:1,,h2:1, item 2 is empty"),
            ("h1:1,h2:", r"item 2: 'h2:' is not a host"),
            ("h1:0", "host h1 has no slots"),
            ("h1:-1", "'h1:-1' is not a host"),
            ("h1:x", "'h1:x' is not a host"),
            ("h1:1:2", "'h1:1:2' is not a host"),
            ("fd00::5", "an IPv6 address must be in brackets"),
            ("[fd00::5", "is not a host"),
            (":4", "':4' is not a host"),
            ("h 1:2", "'h 1:2' is not a host"),
            ("h1:2 h2:2", r"'h1:2 h2:2' is not a host .* h1:4,h2:4 \(with commas, without spaces\)$"),
            ("@h1:2", "'@h1:2' is not a host"),
            ("a@b@h1:2", "is not a host"),
            # ssh would take it for an option.
            ("-oProxyCommand=x:1", "is not a host"),
            ("-l@h1:1", "is not a host"),
            (
                "h1:1,h2:1,h1:2",
                "item 3: host h1 is given twice .first in --hosts h1:1,h2:1,h1:2, item 1.; give it once",
            ),
            ("h1,h1:2", "host h1 is given twice"),
            ("a@h1:1,b@h1:1", "host h1 is given twice"),
            ("a@h1,b@h1", "host h1 is given twice"),
        ],
    )
    def test_what_cannot_be_understood_is_quoted(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=f"--hosts.*{message}" if not message.startswith("--hosts") else message):
            parse_hosts(text)

    @given(st.text(max_size=30))
    def test_any_text_is_hosts_or_a_mistake(self, text: str) -> None:
        try:
            hosts = parse_hosts(text)
        except ConfigError:
            return
        assert hosts
        assert len({host.name for host in hosts}) == len(hosts)
        assert all(host.name and not host.name.startswith("-") and host.slots != 0 for host in hosts)


class TestAHostfile:
    def read(self, folder: Path, text: str) -> tuple[HostEntry, ...]:
        path = folder / "hosts"
        path.write_text(text)
        return read_hostfile(str(path))

    def test_horovod_s_form(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, "h1 slots=4\nh2 slots=2\n") == (HostEntry("h1", 4), HostEntry("h2", 2))

    def test_all_forms_comments_and_blank_lines(self, tmp_path: Path) -> None:
        text = (
            "\ufeff# cluster\r\nh1 slots=4   # fast\n\n \t\n"
            "h2:2\nh3\nh4 slots = 8 max_slots=8\nh5 max-slots=3 slots=1\n"
            "ann@h6 slots=2\nfd00::5 slots=3\n[fd00::6]:2\nh7:1#c"
        )
        assert self.read(tmp_path, text) == (
            HostEntry("h1", 4),
            HostEntry("h2", 2),
            HostEntry("h3"),
            HostEntry("h4", 8),
            HostEntry("h5", 1),
            HostEntry("h6", 2, "ann"),
            HostEntry("fd00::5", 3),
            HostEntry("fd00::6", 2),
            HostEntry("h7", 1),
        )

    def test_a_batch_system_s_list(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, "h1\nh1\nh2\nh1\n") == (HostEntry("h1", 3), HostEntry("h2"))

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("h1:1,h2:1", "line 2: 'h1:1,h2:1' is not a host with a number of slots; write for example: h1 slots=4"),
            ("h1 4", "line 2: '4' is not understood; write for example: h1 slots=4"),
            ("h1 slots=four", "line 2: 'four' is not a number of slots"),
            ("h1 slots=²", "line 2: '²' is not a number of slots"),
            ("h1 slots=-1", "line 2: '-1' is not a number of slots"),
            ("h1 slots=", "line 2: 'slots=' is not understood"),
            ("h1 slots=0", "line 2: host h1 has no slots"),
            ("h1:2 slots=3", "line 2: host h1 has two numbers of slots"),
            ("h1 slots=2 slots=3", "line 2: host h1 has two numbers of slots"),
            ("h1 cpus=2", "line 2: 'cpus=2' is not understood"),
            ("h1,h2", "line 2: 'h1,h2' is not a host"),
            ("h1\0 slots=2", r"line 2: 'h1\\x00' is not a host"),
            ("a\0@h1 slots=2", r"line 2: 'a\\x00@h1' is not a host"),
            ("h1\x1b[2J:2", r"line 2: 'h1\\x1b\[2J:2' is not a host"),
            ("h1 slots=2\0", r"line 2: '2\\x00' is not a number of slots"),
            ("h0 slots=1", r"line 2: host h0 is given twice \(first in --hostfile .*, line 1\)"),
        ],
    )
    def test_file_and_line_are_named(self, tmp_path: Path, line: str, message: str) -> None:
        with pytest.raises(ConfigError, match=f"--hostfile {tmp_path}/hosts, {message}"):
            self.read(tmp_path, f"h0 slots=2\n{line}\n")

    def test_a_file_without_hosts_or_without_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="there are no hosts in it"):
            self.read(tmp_path, "# nothing\n\n")
        with pytest.raises(ConfigError, match=r"--hostfile .*absent: No such file"):
            read_hostfile(str(tmp_path / "absent"))
        with pytest.raises(ConfigError, match="embedded null byte"):
            read_hostfile("hosts\0")
        (tmp_path / "binary").write_bytes(b"h1\xff\n")
        with pytest.raises(ConfigError, match="not UTF-8 text"):
            read_hostfile(str(tmp_path / "binary"))


class TestHowManyWhere:
    @pytest.mark.parametrize(
        ("hosts", "np", "needed"),
        [
            ([HostEntry("a", 4), HostEntry("b", 4)], 2, ["a"]),
            ([HostEntry("a", 4), HostEntry("b", 4)], 4, ["a"]),
            ([HostEntry("a", 4), HostEntry("b", 4)], 5, ["a", "b"]),
            ([HostEntry("a", 4), HostEntry("b", 4)], None, ["a", "b"]),
            # What a host without slots has is known later; it counts for one.
            ([HostEntry("a"), HostEntry("b"), HostEntry("c")], 2, ["a", "b"]),
            ([HostEntry("a"), HostEntry("b", 2)], 9, ["a", "b"]),
        ],
    )
    def test_agents_are_started_only_where_they_can_be_needed(
        self, hosts: list[HostEntry], np: int | None, needed: list[str]
    ) -> None:
        assert [host.name for host in shortlist(hosts, np)] == needed

    def test_more_than_the_slots_is_an_error_with_both_numbers_before_anything_starts(self) -> None:
        with pytest.raises(ConfigError, match=r"5 processes .* only 3 slots \(a:1, b:2\); .*-H a:3,b:3"):
            shortlist([HostEntry("a", 1), HostEntry("b", 2)], 5)

    def test_the_same_error_once_the_agents_have_said_what_there_is(self) -> None:
        hosts = shortlist([HostEntry("a"), HostEntry("b")], 5)
        with pytest.raises(ConfigError, match=r"5 processes .* only 3 slots \(a:2, b:1\)"):
            place(hosts, [hello(gpus=2), hello()], spec(5))

    def test_a_host_without_slots_has_one_for_each_gpu_else_one(self) -> None:
        slots = place(
            [HostEntry("a"), HostEntry("b"), HostEntry("c", 3)], [hello(gpus=2), hello(), hello(gpus=8)], spec(None)
        )
        assert [slot.hostname for slot in slots] == ["a", "a", "b", "c", "c", "c"]

    def test_a_host_that_turns_out_not_to_be_needed_takes_no_part(self) -> None:
        slots = place([HostEntry("a"), HostEntry("b")], [hello(gpus=8), hello(gpus=8)], spec(2))
        assert {slot.hostname for slot in slots} == {"a"}

    def test_the_rank_for_standard_input_is_checked_when_np_is_known(self) -> None:
        with pytest.raises(ConfigError, match=r"--stdin 1: .*rank 0"):
            place([HostEntry("a")], [hello()], spec(None, stdin_rank=1))

    @pytest.mark.parametrize(("np", "slots"), [(10**9, 10**9), (100_000, None), (None, 10**11)])
    def test_absurd_numbers_are_refused_at_once(self, np: int | None, slots: int | None) -> None:
        with pytest.raises(ConfigError, match="at most 65536 processes"):
            place(shortlist([HostEntry("a", slots)], np), [hello()], spec(np))

    def test_a_host_may_claim_any_number_of_slots(self) -> None:
        assert len(place([HostEntry("a", 10**11)], [hello()], spec(3))) == 3

    def test_a_load_that_a_host_cannot_bear_is_refused(self) -> None:
        check_load("a", 256, 2)
        check_load("a", 4096, 128)
        with pytest.raises(ConfigError, match="257 processes would run on host a, which has 2 cores; at most 256"):
            check_load("a", 257, 2)

    def test_many_more_workers_than_cores_are_worth_a_word(self) -> None:
        assert remark_on_load([HostEntry("a", 16), HostEntry("b", 1)], [2, 1]) == ""
        assert remark_on_load([HostEntry("a", 100)], [2]).startswith("100 workers on 2 cores of a: ")
        assert remark_on_load([HostEntry("a", 9), HostEntry("b", 90), HostEntry("c", 1)], [1, 2, 2]).startswith(
            "90 workers on 2 cores of b (and likewise on 1 more): "
        )


def workers_on(spec: LaunchSpec, host: HostEntry, hello: Hello) -> HostWorkers:
    """Return the workers of a host that was admitted."""
    reached = Reached(Address("eth0", "10.0.0.1", 24), "10.0.0.1")
    admission = SimpleNamespace(reached=lambda _: reached, endpoint=lambda _: ("10.0.0.1", 1))
    return HostWorkers(
        spec, LocalSpawner(), "job", cast(Any, SimpleNamespace(host=host, hello=hello)), cast(Any, admission)
    )


@pytest.mark.parametrize(("cores", "machine", "threads"), [(64, 64, None), (4, 64, "4"), (4, 0, "4")])
def test_pain_28_threads_follow_the_host_s_own_machine_and_not_the_launcher_s(
    cores: int, machine: int, threads: str | None
) -> None:
    host = HostEntry("a", 1)
    hello = Hello(1, "", "a", "identity", 1, cores, 0, 20000, machine)
    workers = workers_on(spec(1), host, hello)
    assert workers.threads(1).get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("nics", "told"),
    [((), None), (("eth0",), "=eth0"), (("^docker0",), "=eth0"), (("b=eth1",), None), (("b=eth1", "a=eth*"), "=eth0")],
    ids=str,
)
def test_nccl_is_told_an_interface_where_nics_chooses_one(nics: tuple[str, ...], told: str | None) -> None:
    hosts = (HostEntry("a", 1), HostEntry("b", 1))
    both = replace(spec(2), hosts=hosts, network_interfaces=nics)
    hello = Hello(1, "", "a", "identity", 1, 4, 0, 20000, 4)
    environ = workers_on(both, hosts[0], hello).environment
    assert environ.get("NCCL_SOCKET_IFNAME") == told
    assert environ["GLOO_SOCKET_IFNAME"] == "eth0"


class TestThisMachine:
    @pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "127.0.1.1", "::1", socket.gethostname()])
    def test_its_names_and_addresses(self, name: str) -> None:
        assert hosts_here([HostEntry(name)], Reach()) == [HostEntry(name)]

    @pytest.mark.parametrize("name", ["192.0.2.1", "no-such-host.invalid", "fd00::dead", "-", "a" * 300])
    def test_others(self, name: str) -> None:
        assert hosts_here([HostEntry(name)], Reach()) == []

    def test_another_user_of_this_machine_is_reached_by_ssh(self) -> None:
        assert hosts_here([HostEntry("localhost", 1, "another-user")], Reach()) == []
        assert hosts_here([HostEntry("localhost", 1, getpass.getuser())], Reach()) != []

    def test_names_of_pods_are_not_looked_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("looked up"))
        assert hosts_here([HostEntry("worker-0")], Reach(agent_command=("kubectl",))) == []
        assert hosts_here([HostEntry("n1")], Reach(slurm_job="1", slurm_nodes=frozenset({"n1"}))) == []

    def test_slow_name_servers_hold_up_no_launch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        release = threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(30) and [])
        started = time.monotonic()
        assert hosts_here([HostEntry(f"h{number}") for number in range(40)], Reach(), lookup_timeout=0.2) == []
        assert time.monotonic() - started < 2
        release.set()

    def test_thousands_of_names_do_not_have_a_thread_each(self, monkeypatch: pytest.MonkeyPatch) -> None:
        threads = set()

        def look_up(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
            threads.add(threading.get_ident())
            return [(None, None, None, "", ("127.0.0.1" if name == "h4999" else "192.0.2.1", 0))]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        hosts = [HostEntry(f"h{number}") for number in range(5000)]
        assert hosts_here(hosts, Reach(), lookup_timeout=30) == [HostEntry("h4999")]
        assert len(threads) <= 256

    def test_it_needs_no_ssh(self) -> None:
        assert isinstance(choose_spawner([HostEntry("localhost", 1)], Reach()), LocalSpawner)

    def test_it_comes_once(self) -> None:
        with pytest.raises(ConfigError, match=r"localhost, 127\.0\.0\.1 are all this machine; .*-H localhost:3"):
            choose_spawner([HostEntry("localhost", 1), HostEntry("127.0.0.1", 2)], Reach())


class TestInventory:
    def test_without_hosts_it_is_this_machine(self) -> None:
        assert take_inventory({}, np=3).hosts == (HostEntry("localhost", 3),)
        found = take_inventory({})
        assert found.hosts == (HostEntry("localhost", found.np),)
        assert "-np chooses another number" in found.notices[0]

    def test_hosts_without_slots_leave_their_number_open(self) -> None:
        assert take_inventory({}, hosts="h1,h2:3").np is None

    def test_one_source(self) -> None:
        with pytest.raises(ConfigError, match="either hosts or a hostfile"):
            take_inventory({}, hosts="h1", hostfile="f")


class TestHostsThatComeLater:
    """Elastic jobs learn their hosts while they run."""

    def test_several_may_be_this_machine_and_others_are_reached_as_ever(self) -> None:
        spawner = AnyHostSpawner(Reach(agent_command=("kubectl", "exec", "-i", "{user}", "{host}", "--")))
        spawner.learn([HostEntry("localhost", 1), HostEntry("pod-1", 1, "me")])
        spawner.learn([HostEntry("127.0.0.1", 1), HostEntry("localhost", 2), HostEntry("pod-2", 1)])
        local = [name for name in ("localhost", "127.0.0.1", "pod-1", "pod-2") if spawner.is_local(HostEntry(name))]
        assert local == ["localhost", "127.0.0.1"]
        said = spawner.diagnose(HostEntry("pod-1", None, "me"), Ending(1, ("Error from server (NotFound)",)))
        assert said.text.startswith("kubectl")

    def test_a_template_that_does_not_fit_one_of_them_is_that_one_s_trouble(self) -> None:
        spawner = AnyHostSpawner(Reach(agent_command=("true", "{user}")))
        spawner.learn([HostEntry("pod-1", 1, "me"), HostEntry("pod-2", 1)])
        with pytest.raises(ConfigError, match=r"uses \{user\}, which host pod-2 does not have"):
            spawner.start(HostEntry("pod-2"))
        stream = spawner.start(HostEntry("pod-1", None, "me"))
        assert stream.wait(10) == 0
        for pipe in (stream.stdin, stream.stdout, stream.stderr):
            pipe.close()
