"""The options of an elastic job, and contradictions: found before anything is started."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hvdgloo.run
from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous._elastic.events import Join, Rules
from hvdgloo.runner.cli import config_file
from hvdgloo.runner.cli.flags import build_parser, split
from hvdgloo.runner.cli.main import command_line, main
from hvdgloo.runner.elastic.discovery import DiscoveryError, FixedHosts, HostDiscoveryScript
from hvdgloo.runner.elastic.options import ElasticOptions
from hvdgloo.runner.elastic.slurm_nodes import SlurmNodes
from hvdgloo.runner.job.outcome import JobOutcome
from hvdgloo.runner.job.spec import ElasticSpec, LaunchSpec
from hvdgloo.runner.launch_result import LaunchResult


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, with a discovery script; no batch system is around."""
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "HVDGLOO_ELASTIC_TIMEOUT", "HVDGLOO_ELASTIC_JOIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho h1:4\necho h2\n")
    script.chmod(0o755)
    (tmp_path / "plain.sh").write_text("#!/bin/sh\necho h1\n")
    return tmp_path


def launch_spec(*argv: str) -> LaunchSpec:
    """Return the spec that a command line describes."""
    parser = build_parser()
    flags, command = split(argv, parser.values)
    return command_line(parser, parser.given(flags), command or ["/bin/true"]).spec


def asked(*argv: str) -> ElasticSpec:
    spec = launch_spec(*argv).elastic
    assert spec is not None
    return spec


def listed(spec: ElasticSpec) -> Mapping[str, int | None]:
    return spec.discovery.find_available_hosts_and_slots()


SCRIPT = ["--host-discovery-script", "./hosts.sh"]

FLAGS = """
    -np 4 --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh --slots-per-host 3 --elastic-timeout 50
    --reset-limit 0 --blacklist-cooldown-range 10 100 --failures-per-host 2 --join now --discovery-interval 0.5
    --discovery-timeout 7 --start-timeout 33
"""
HOROVODS_FLAGS = FLAGS.replace("--min-np", "--min-num-proc").replace("--max-np", "--max-num-proc")
FILE = """
num_proc: 4
timeouts: {start_seconds: 33}
elastic: {min_np: 2, max_np: 8, host_discovery_script: ./hosts.sh, slots_per_host: 3, timeout_seconds: 50,
  reset_limit: 0, blacklist_cooldown_range: [10, 100], failures_per_host: 2, join: now,
  discovery_interval_seconds: 0.5, discovery_timeout_seconds: 7}
"""
# The first ones in Horovod's positions.
ARGUMENTS = (int, (), None, 4, 2, 8, 3, 0, (10, 100), None, None, "./hosts.sh", 33)
MORE_ARGUMENTS = {"elastic_timeout": 50, "failures_per_host": 2, "env": {"HVDGLOO_ELASTIC_JOIN": "now"}}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """Return the specs that ``hvdgloo.run.run`` launches; all workers end with 0 at once."""
    specs: list[LaunchSpec] = []

    def launch(spec: LaunchSpec, _: object) -> LaunchResult:
        specs.append(spec)
        return LaunchResult(JobOutcome(), ())

    monkeypatch.setattr("hvdgloo.run.launch", launch)
    return specs


@pytest.mark.parametrize("source", ["flags", "Horovod's flags", "a file", "arguments of run"])
def test_options_mean_the_same_wherever_they_are_written(source: str, folder: Path, launched: list[LaunchSpec]) -> None:
    if source == "arguments of run":
        hvdgloo.run.run(*ARGUMENTS, **MORE_ARGUMENTS)
        (spec,) = launched
    else:
        (folder / "job.yaml").write_text(FILE)
        flags = {"flags": FLAGS, "Horovod's flags": HOROVODS_FLAGS, "a file": "--config-file job.yaml"}
        spec = launch_spec(*flags[source].split())
    assert spec.elastic is not None
    assert spec.elastic.rules == Rules(
        size=4, smallest=2, largest=8, elastic_timeout=50, reset_limit=0, failures_per_host=2, cooldown=(10, 100),
        join=Join.NOW, hosts_may_come=True, launched=True,
    )  # fmt: skip
    assert spec.start_timeout == 33
    assert isinstance(spec.elastic.discovery, HostDiscoveryScript)
    assert listed(spec.elastic) == {"h1": 4, "h2": 3}
    assert spec.elastic.interval == (1 if source == "arguments of run" else 0.5)


class TestWhatIsAskedFor:
    @pytest.mark.parametrize("script", ["./hosts.sh now", "cd . && ./hosts.sh", "HOSTS=2 ./hosts.sh", "hosts.sh"])
    def test_a_script_may_be_a_command_line(self, folder: Path, script: str) -> None:
        assert listed(asked("-np", "2", "--host-discovery-script", script)) == {"h1": 4, "h2": None}

    def test_defaults(self) -> None:
        spec = asked("-np", "4", *SCRIPT)
        rules = spec.rules
        assert (rules.size, rules.smallest, rules.largest) == (4, 4, None)
        assert (rules.elastic_timeout, rules.reset_limit, rules.cooldown) == (600, None, None)
        assert (rules.failures_per_host, rules.join, spec.interval) == (1, Join.READY, 1)
        assert listed(spec) == {"h1": 4, "h2": None}, "h2 has a slot for each of its GPUs"

    def test_without_a_number_of_workers_the_fewest_are_enough_to_start(self) -> None:
        assert asked("--min-np", "2", *SCRIPT).rules.size == 2
        spec = launch_spec("-H", "h1:4,me@h2:4", "--min-np", "4")
        assert spec.elastic is not None
        assert (spec.elastic.rules.size, spec.np, [host.name for host in spec.hosts]) == (4, 4, ["h1", "h2"])
        assert listed(spec.elastic) == {"h1": 4, "me@h2": 4}
        assert not spec.elastic.rules.hosts_may_come

    def test_one_host_is_left_out_at_the_third_failure(self) -> None:
        """Or a job on a single machine could not survive any."""
        assert asked("-np", "4", "--min-np", "2").rules.failures_per_host == 3
        assert asked("-H", "h1:4", "--min-np", "2").rules.failures_per_host == 3
        assert asked("-H", "h1:4", "--min-np", "2", "--failures-per-host", "1").rules.failures_per_host == 1
        assert asked("-H", "h1:4,h2:4", "--min-np", "2").rules.failures_per_host == 1
        assert listed(asked("-np", "4", "--min-np", "2")) == {"localhost": 4}

    def test_slots_per_host_is_for_hosts_without(self) -> None:
        assert listed(asked("-H", "h1,h2:2", "--min-np", "2", "--slots-per-host", "5")) == {"h1": 5, "h2": 2}

    def test_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "77")
        assert asked("-np", "4", "--min-np", "2").rules.elastic_timeout == 77
        monkeypatch.setenv("HVDGLOO_ELASTIC_TIMEOUT", "78")
        monkeypatch.setenv("HVDGLOO_ELASTIC_JOIN", "now")
        rules = asked("-np", "4", "--min-np", "2").rules
        assert (rules.elastic_timeout, rules.join) == (78, Join.NOW)

    def test_flags_win_over_a_file(self, folder: Path) -> None:
        (folder / "job.yaml").write_text(FILE)
        assert asked("--config-file", "job.yaml", "--min-np", "3").rules.smallest == 3
        spec = asked("--config-file", "job.yaml", "-H", "h1:8")
        assert isinstance(spec.discovery, FixedHosts), "hosts on the command line win over a script in the file"

    @pytest.mark.parametrize("value", ["10", "[10]", "[1, 2, 3]"])
    def test_a_file_s_range_has_two_ends(self, folder: Path, value: str) -> None:
        (folder / "job.yaml").write_text(f"elastic: {{blacklist_cooldown_range: {value}}}\n")
        with pytest.raises(ConfigError, match=r"elastic.blacklist_cooldown_range: .* expected a list of 2 values"):
            config_file.read("job.yaml", build_parser())

    def test_a_fixed_job_has_none_of_it(self) -> None:
        assert launch_spec("-np", "4").elastic is None

    def test_nics_of_hosts_that_are_not_known_yet(self) -> None:
        assert launch_spec("-np", "4", *SCRIPT, "--nics", "h7=eth0").nics.rules("h7").items == ("eth0",)
        with pytest.raises(ConfigError, match="h7 is not one of the hosts"):
            launch_spec("-np", "4", "-H", "h1:4", "--min-np", "2", "--nics", "h7=eth0")


CONTRADICTIONS: list[tuple[list[str], str]] = [
    (["-np", "2", "--min-np", "3"], "--min-np 3 exceeds -np 2, the number of workers that the job starts with"),
    (
        ["-np", "4", "--min-np", "2", "--max-np", "3"],
        "--max-np 3 is below -np 4, the number of workers that the job starts with",
    ),
    (["--min-np", "3", "--max-np", "2"], "--max-np 2 is below -np 3"),
    (["--min-np", "0"], "at least 1, not '0'"),
    (["--max-np", "2"], "--max-np is for elastic jobs: add --min-np N or a discovery script, or leave it out"),
    (["--reset-limit", "0"], "--reset-limit is for elastic jobs"),
    (["--reset-limit", "-1", "--min-np", "2"], "--reset-limit: expected a whole number, at least 0, not '-1'"),
    (["-np", "1", "--elastic-timeout", "5"], "--elastic-timeout is for elastic jobs"),
    (["-np", "1", "--join", "now"], "--join is for elastic jobs"),
    (["--slots-per-host", "2"], "--slots-per-host is for elastic jobs"),
    (
        ["--failures-per-host", "0", "--min-np", "2"],
        "at least 1, not '0'",
    ),
    (
        ["--min-np", "2", "--blacklist-cooldown-range", "0", "9"],
        "--blacklist-cooldown-range 0 9: give two times from 1",
    ),
    (["--min-np", "2", "--blacklist-cooldown-range", "9", "3601"], "to 3600 seconds, the shorter one first"),
    (["--min-np", "2", "--blacklist-cooldown-range", "9", "8"], "--blacklist-cooldown-range 9 8: give two times"),
    (
        ["--min-np", "2", "--blacklist-cooldown-range", "9"],
        "'true' is not a number of seconds",
    ),
    (["--min-np", "2", "--elastic-timeout", "0"], "--elastic-timeout 0: '0' cannot be used"),
    (["--min-np", "2", "--join", "later"], "--join later: 'later' cannot be used: expected one of ready, now"),
    (
        ["--min-np", "2", "--discovery-interval", "5"],
        "--discovery-interval is for --host-discovery-script; leave it out",
    ),
    (
        ["-np", "2", *SCRIPT, "--discovery-interval", "0"],
        "--discovery-interval: '0' is not a number of seconds",
    ),
    (
        [*SCRIPT],
        "--host-discovery-script needs -np N, the number of slots that must be available before the job starts",
    ),
    (["-np", "2", *SCRIPT, "-H", "h1:2"], "give either --hosts or --host-discovery-script, not both"),
    (["-np", "2", *SCRIPT, "--hostfile", "x"], "give either --hostfile or --host-discovery-script, not both"),
    (["-np", "2", "--host-discovery-script", "none.sh"], "--host-discovery-script none.sh: there is no such file"),
    (["-np", "2", "--host-discovery-script", "plain.sh"], "plain.sh: it is not executable; chmod +x it"),
    (["-np", "2", "--host-discovery-script", "."], "--host-discovery-script .: is a directory"),
    (["-np", "2", "--host-discovery-script", "none/hosts.sh -v"], "none/hosts.sh -v: there is no such file"),
    (["-np", "2", "--host-discovery-script", "./plain.sh -v"], "./plain.sh -v: it is not executable; chmod +x it"),
    (["-np", "2", "--host-discovery-script", "hosts.sh -v"], "in the search path; did you mean ./hosts.sh -v?"),
    (
        ["-np", "2", "--host-discovery-script", "slurm"],
        "lists the nodes of a Slurm job, but there is no Slurm job here",
    ),
    (["-H", "h1:2,h2:2", "-np", "5", "--min-np", "2"], "5 processes were requested"),
    (["-np", "65537", *SCRIPT], "-np 65537: a job has at most 65536 processes"),
    (["-np", "2", "--min-np", "1", "--max-restarts", "1"], "--max-restarts is for jobs of a fixed size"),
    (["-np", "2", "--min-np", "1", "--stdin", "0"], "--stdin is for jobs of a fixed size"),
    (
        ["-np", "2", "--max-restarts", "1", "--stdin", "0"],
        "--stdin cannot be combined with --max-restarts: input that one start has read",
    ),
    (["-np", "2", "--max-restarts", "-1"], "--max-restarts: expected a whole number, at least 0, not '-1'"),
    (["-np", "2", "--min-np", "1", "--max-np", "4", "--log-ranks", "4"], "--log-ranks 4: there are only ranks 0 to 3"),
    (["-np", "1", "--min-np", "1", "--no-prefix"], "--no-prefix is for the output of a single rank"),
]


@pytest.mark.parametrize(("argv", "text"), CONTRADICTIONS, ids=[" ".join(argv) for argv, _ in CONTRADICTIONS])
def test_contradictions_are_found_before_anything_starts(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr("hvdgloo.runner.launch.launch", start)
    assert main([*argv, "true"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hvdgloo-run: ")
    assert text in said


def test_and_what_is_right_starts() -> None:
    """Or else nothing above would prove anything."""
    spec = launch_spec("-np", "1", "--min-np", "1", "--max-np", "4", "--log-ranks", "3", "--no-prefix")
    assert spec.elastic is not None
    assert launch_spec("-np", "2", "--max-restarts", "1").max_restarts == 1


class Hosts:
    """An object that lists hosts, which is nothing else."""

    def find_available_hosts_and_slots(self) -> dict[str, int | None]:
        return {"h1": 2}


class TestRun:
    """``hvdgloo.run.run`` takes the same."""

    def test_what_only_we_have(self, launched: list[LaunchSpec]) -> None:
        hosts = Hosts()
        hvdgloo.run.run(int, np=2, host_discovery=hosts, elastic_timeout=20, failures_per_host=7)
        hvdgloo.run.run(int, min_num_proc=2)
        hvdgloo.run.run(int, np=2, max_restarts=3)
        spec = launched[0].elastic
        assert spec is not None
        assert spec.discovery is hosts
        assert (spec.rules.elastic_timeout, spec.rules.failures_per_host, launched[0].hosts) == (20, 7, ())
        second = launched[1].elastic
        assert second is not None
        assert (second.rules.size, listed(second)) == (2, {"localhost": 2})
        assert (launched[2].max_restarts, launched[2].elastic) == (3, None)

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            ({"np": 2, "min_num_proc": 3}, "--min-np 3 exceeds -np 2"),
            ({"min_num_proc": 0}, r"run\(min_num_proc=0\): it must be at least 1"),
            ({"min_num_proc": 1.5}, r"run\(min_num_proc=1.5\): it is not a whole number"),
            ({"max_num_proc": 2}, "--max-np is for elastic jobs"),
            ({"np": 2, "max_num_proc": 1, "min_num_proc": 1}, "--max-np 1 is below -np 2"),
            ({"elastic_timeout": 5}, "--elastic-timeout is for elastic jobs"),
            ({"min_num_proc": 1, "elastic_timeout": "5 s"}, r"run\(elastic_timeout='5 s'\)"),
            ({"min_num_proc": 1, "cooldown_range": 5}, r"run\(cooldown_range=5\): give two times"),
            ({"min_num_proc": 1, "cooldown_range": "ab"}, r"run\(cooldown_range='ab'\): give two times"),
            ({"min_num_proc": 1, "cooldown_range": (5, 4000)}, "--blacklist-cooldown-range 5 4000"),
            (
                {"host_discovery": Hosts()},
                "--host-discovery-script needs -np N, the number of slots that must be available",
            ),
            ({"np": 1, "host_discovery": {"h1": 2}}, r"it has no method find_available_hosts_and_slots\(\)"),
            ({"np": 1, "host_discovery": Hosts(), "hosts": "h1:1"}, "either hosts or what discovers the hosts"),
            ({"np": 1, "host_discovery_script": "./hosts.sh", "hostfile": "x"}, "either a hostfile or what discovers"),
            ({"np": 1, "host_discovery": Hosts(), "host_discovery_script": "./hosts.sh"}, "a discovery script or an"),
            ({"min_num_proc": 1, "max_restarts": 1}, "--max-restarts is for jobs of a fixed size"),
            ({"max_restarts": -1}, r"run\(max_restarts=-1\): it must be at least 0"),
        ],
    )
    def test_contradictions(self, arguments: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            hvdgloo.run.run(int, **arguments)


class TestDoctor:
    def spec(self, *flags: str) -> LaunchSpec:
        parser = build_parser()
        given: argparse.Namespace = parser.given(list(flags))
        return command_line(parser, given, (), doctor=True).spec

    def test_it_examines_the_hosts_that_are_listed_now(self) -> None:
        spec = self.spec("-np", "9", "--min-np", "2", *SCRIPT)
        assert [(host.name, host.slots) for host in spec.hosts] == [("h1", 4), ("h2", None)]
        assert (spec.elastic, spec.np) == (None, None)

    def test_a_script_that_fails_is_told(self, folder: Path) -> None:
        (folder / "hosts.sh").write_text("#!/bin/sh\necho no cluster >&2\nexit 3\n")
        with pytest.raises(DiscoveryError, match=r"it exited with status 3\n    no cluster"):
            self.spec("-np", "9", *SCRIPT)

    def test_its_help_has_the_flags(self) -> None:
        assert "--host-discovery-script" in build_parser().doctor_help()


class TestSlurm:
    @pytest.fixture(autouse=True)
    def allocation(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-4]")
        monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def program(self, folder: Path, name: str, text: str) -> None:
        (folder / name).write_text(f'#!/bin/sh\necho "$@" >{folder}/args\n{text}\n')
        (folder / name).chmod(0o755)

    def test_its_nodes_that_are_up(self, folder: Path) -> None:
        self.program(folder, "sinfo", "echo n3 allocated; echo n1 mixed; echo n1 mixed; echo n2 down*; echo n4 alloc")
        spec = launch_spec("-np", "2", "--host-discovery-script", "slurm")
        assert spec.elastic is not None
        assert isinstance(spec.elastic.discovery, SlurmNodes)
        assert listed(spec.elastic) == {"n1": 2, "n3": 2}
        assert (folder / "args").read_text() == "--noheader --Node --nodes=n1,n2,n3,n4 --format=%N %T\n"
        assert (spec.hosts, spec.reach.slurm_nodes) == ((), frozenset({"n1", "n2", "n3", "n4"})), "srun leads there"

    @pytest.mark.parametrize(
        ("state", "up"),
        [
            *((state, True) for state in ("allocated", "mixed", "idle", "completing", "draining", "ALLOCATED$")),
            *((state, True) for state in ("mixed@", "mixed-", "allocated+", "reserved", "planned")),
            *((state, False) for state in ("down", "down*", "allocated*", "drained", "fail", "failing", "idle~")),
            *((state, False) for state in ("mixed#", "reboot^", "idle%", "maint", "unknown", "future", "idle!")),
        ],
    )
    def test_states(self, folder: Path, state: str, up: bool) -> None:
        self.program(folder, "sinfo", f"echo 'n2 {state}'")
        assert listed(asked("-np", "2", "--host-discovery-script", "slurm")) == ({"n2": 2} if up else {})

    @pytest.mark.parametrize(
        ("state", "up"),
        [
            *((state, True) for state in ("ALLOCATED", "MIXED+DRAIN", "IDLE+COMPLETING", "ALLOCATED+RESERVED")),
            *((state, False) for state in ("DOWN", "DOWN*+DRAIN", "ALLOCATED*", "MIXED+NOT_RESPONDING", "IDLE+FAIL")),
            *((state, False) for state in ("IDLE+POWERED_DOWN", "IDLE~", "UNKNOWN")),
        ],
    )
    def test_scontrol_where_there_is_no_sinfo(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, state: str, up: bool
    ) -> None:
        self.program(folder, "scontrol", f"echo 'NodeName=n2 Arch=x86_64 CoresPerSocket=8 State={state} Weight=1'")
        monkeypatch.setenv("PATH", str(folder))
        (folder / "echo").symlink_to("/bin/echo")
        assert listed(asked("-np", "2", "--host-discovery-script", "slurm")) == ({"n2": 2} if up else {})
        assert (folder / "args").read_text() == "show node n1,n2,n3,n4 --oneliner\n"

    def test_it_fails(self, folder: Path) -> None:
        self.program(folder, "sinfo", "echo slurm_load_node: down >&2; exit 1")
        with pytest.raises(DiscoveryError, match=r"^sinfo: it exited with status 1\n    slurm_load_node: down$"):
            listed(asked("-np", "2", "--host-discovery-script", "slurm"))

    @pytest.mark.parametrize(("name", "line"), [("sinfo", "n1"), ("scontrol", "NodeName=n1")])
    def test_it_says_something_else(self, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: str) -> None:
        self.program(folder, name, f"echo {line}")
        monkeypatch.setenv("PATH", str(folder))
        with pytest.raises(DiscoveryError, match=f"^{name}: '{line}' is not a node with its state"):
            listed(asked("-np", "2", "--host-discovery-script", "slurm"))

    def test_a_script_of_that_name(self, folder: Path) -> None:
        self.program(folder, "slurm", "echo h9:1")
        assert listed(asked("-np", "1", "--host-discovery-script", "./slurm")) == {"h9": 1}

    def test_hosts_of_the_job_without_a_script(self) -> None:
        spec = asked("-np", "8", "--min-np", "2")
        assert listed(spec) == {"n1": 2, "n2": 2, "n3": 2, "n4": 2}
        assert not spec.rules.hosts_may_come


def test_options_without_anything_are_a_fixed_job_s() -> None:
    options = ElasticOptions()
    assert not options.elastic
    assert not options.discovered
