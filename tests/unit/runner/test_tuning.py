"""``hvdgloo-run tune``: what is measured, what is concluded, and what is shown of it; no job is started here."""

from __future__ import annotations

import io
import json
import signal
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdgloo._engine.engine import Engine
from hvdgloo._engine.messages import Request
from hvdgloo._engine.settings import Choice
from hvdgloo._engine.submission import PersistentRequest
from hvdgloo._engine.tuning import _Log
from hvdgloo.config import Config
from hvdgloo.errors import ConfigError, JobFailedError, LaunchError
from hvdgloo.runner import host_setup
from hvdgloo.runner.cli import config_file
from hvdgloo.runner.cli.flags import build_parser
from hvdgloo.runner.cli.main import main, split_all
from hvdgloo.runner.job.outcome import Failure, JobOutcome
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec
from hvdgloo.runner.launch_result import LaunchResult
from hvdgloo.runner.surroundings import Surroundings
from hvdgloo.runner.tuning import campaign, measure, report
from hvdgloo.runner.tuning.campaign import Campaign
from hvdgloo.runner.tuning.measure import Found, Measured, Setup, record
from hvdgloo.runner.tuning.workload import FIRST_BYTES, Workload, of_steps, resnet50
from hvdgloo.types import Collective, DType, TensorSpec
from tests.support.world import World

MIB = 1 << 20
START = Setup(25 * MIB, 32 * MIB, 0.0, 128 << 10, 1024)
BEST = replace(START, gradient_bucket=8 * MIB, hierarchical_threshold=512 << 10)
FUSED = replace(START, fusion_threshold=4 * MIB, cycle_time=0.001)


class TestWorkload:
    def test_resnet50_has_its_number_of_parameters(self) -> None:
        assert len(resnet50()) == 161
        assert sum(resnet50()) == 4 * 25_557_032
        assert resnet50()[:2] == (4 * 1000, 4 * 2048 * 1000)  # the last layer's gradients come first

    def test_buckets_are_the_optimizer_s(self) -> None:
        pytest.importorskip("torch")
        import torch

        from hvdgloo.torch._buckets import _FIRST_BYTES, plan

        sizes = (300_000, 900_000, 4_000_000, 12_000, 8_000_000, 40, 400_000)
        parameters = {str(i): torch.empty(size // 4) for i, size in enumerate(sizes)}
        for limit in (MIB, 4 * MIB, 25 * MIB):
            planned = [[int(name) for name in names] for names in plan(parameters, list(parameters), limit)]
            expected = [(sum(sizes[i] for i in names), names[-1]) for names in planned]
            assert Workload(sizes).sent(limit) == expected
        assert FIRST_BYTES == _FIRST_BYTES

    def test_one_by_one_each_gradient_is_sent_when_it_is_ready(self) -> None:
        assert Workload((8, 4), in_buckets=False).sent(MIB) == [(8, 0), (4, 1)]
        assert Workload((8, 4)).sent(0) == [(8, 0), (4, 1)]

    def test_a_program_s_gradients_come_in_the_order_and_at_the_times_of_most_of_its_steps(self) -> None:
        steps = [
            [("a", 4, 10.0), ("b", 8, 10.2), ("c", 12, 10.3)],
            [("b", 8, 20.0), ("a", 4, 20.1), ("c", 12, 29.0)],  # a step that was disturbed
            [("a", 4, 30.0), ("b", 8, 30.2), ("c", 12, 30.3)],
        ]
        found = of_steps(steps, in_buckets=False)
        assert found.sizes == (4, 8, 12)
        assert found.delays == pytest.approx((0.0, 0.2, 0.3))

    def test_a_slow_network_sends_the_first_gradients_only(self) -> None:
        workload = Workload((8, 4, 12), (0.0, 0.1, 0.2))
        assert workload.first(24) == workload
        assert workload.first(23) == Workload((8, 4), (0.0, 0.1))
        assert workload.first(0) == Workload((8,), (0.0,))


class TestRecording:
    """Programs that are run here, with an engine that does nothing."""

    @pytest.fixture(autouse=True)
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Engine, "launch", lambda *_, **__: None)
        monkeypatch.setattr(sys, "argv", [])
        monkeypatch.delitem(sys.modules, "hvdgloo.torch", raising=False)

    def program(self, tmp_path: Path, body: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(
            "import sys\n"
            "from hvdgloo._engine.engine import Engine\n"
            "from tests.unit.runner.test_tuning import request\n"
            "def send(name, count): Engine.launch(None, request(name, count))\n" + body
        )
        return str(path)

    def test_a_program_is_ended_after_some_steps(self, tmp_path: Path) -> None:
        path = self.program(
            tmp_path,
            "assert sys.argv[1:] == ['--epochs', '9']\n"
            "send('allreduce.noname.1', 5)\n"
            "while True:\n  send('x', 100); send('y', 300)\n",
        )
        found = record([path, "--epochs", "9"], module=False)
        assert found is not None
        assert found.sizes == (400, 1200)
        assert len(found.delays) == 2
        assert not found.in_buckets

    def test_what_a_framework_makes_of_the_end_is_no_failure(self, tmp_path: Path) -> None:
        body = (
            "def step():\n"
            "  try: send('x', 100)\n"
            "  except BaseException as error: raise RuntimeError('callback failed') from error\n"
            "while True: step()\n"
        )
        found = record([self.program(tmp_path, body)], module=False)
        assert found is not None
        assert found.sizes == (400,)

    def test_a_program_s_own_error_is_shown_as_python_shows_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        monkeypatch.setattr(sys, "last_value", None, raising=False)
        path = self.program(tmp_path, "send('x', 1)\n1 / 0\n")
        with pytest.raises(SystemExit) as end:
            record([path], module=False)
        assert end.value.code == 1
        _, place, *_, last = capsys.readouterr().err.splitlines()
        assert last == "ZeroDivisionError: division by zero"
        assert place.startswith(f'  File "{path}", line 6')
        assert isinstance(sys.last_value, ZeroDivisionError)

    @pytest.mark.parametrize("body", ["", "send('x', 1)\nsys.exit(0)\n"])
    def test_a_program_without_steps_has_no_gradients(self, tmp_path: Path, body: str) -> None:
        assert record([self.program(tmp_path, body)], module=False) is None

    def test_a_short_program_is_enough(self, tmp_path: Path) -> None:
        body = "for _ in range(3): send('x', 100)\n"
        found = record([self.program(tmp_path, body)], module=False)
        assert found is not None
        assert found.sizes == (400,)

    def test_afterwards_the_engine_is_what_it_was(self, tmp_path: Path) -> None:
        before = Engine.launch
        record([self.program(tmp_path, "for _ in range(3): send('x', 100)\n")], module=False)
        assert Engine.launch is before


def request(name: str, count: int) -> PersistentRequest:
    return PersistentRequest(Request(name, Collective.ALLREDUCE, (TensorSpec(DType.FLOAT32, (count,)),)))


def found(in_buckets: bool, best: Setup, start_seconds: float, best_seconds: float) -> Found:
    tried = ((START, start_seconds), (best, best_seconds)) if best != START else ((START, start_seconds),)
    sent = Workload((400, 1200), (0.0, start_seconds), in_buckets)
    return Found(sent, 1.0, START, start_seconds, best, best_seconds, tried)


def measured(plane: str, *each: Found) -> Measured:
    return Measured(plane, 4, 2, {1 << 10: 1e-4, 1 << 20: 2e-3, 1 << 26: 1.5}, each)


class Hosts:
    """Plays the hosts: answers jobs by what they were asked to do.

    Args:
        seconds: of a step, from the settings of a job that does not search.
    """

    def __init__(self, main: Measured, seconds: Callable[[Mapping[str, str]], float]) -> None:
        self.main, self.seconds = main, seconds
        self.jobs: list[tuple[str, Mapping[str, str]]] = []

    def __call__(
        self, spec: LaunchSpec, stderr: Any, function: Any, args: Sequence[Any], kwargs: Any, **settings: str
    ) -> list[Any]:
        self.jobs.append((function.__name__, settings))
        if function is measure.record:
            return [Workload((400, 1200), (0.0, 0.1))] * 2
        if kwargs["searching"]:
            return [self.main, None]
        assert args[0] == [self.main.found[0].sent]  # what was sent when the job's own planes were measured
        seconds = self.seconds(settings)
        return [measured(self.main.plane, found(True, START, seconds, seconds)), None]


SPEC = LaunchSpec(("true",), (HostEntry("localhost", 2),), 2, "/", {}, b"s" * 32)


def conduct(
    monkeypatch: pytest.MonkeyPatch, hosts: Hosts, program: Sequence[str] = (), spec: LaunchSpec = SPEC
) -> Campaign:
    monkeypatch.setattr(campaign, "_function", hosts)
    return campaign.run(spec, program=program, seconds=60, stderr=io.StringIO(), say=lambda text: None)


class TestCampaign:
    def test_what_was_found_for_both_ways_is_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main = measured("gloo", found(True, BEST, 0.2, 0.15), found(False, FUSED, 0.3, 0.2))
        done = conduct(monkeypatch, Hosts(main, lambda settings: 1.0))
        assert done.settings == {
            "gradient_bucket": 8 * MIB, "hierarchical_threshold": 512 << 10, "fusion_threshold": 4 * MIB,
            "cycle_time": 1.0,
        }  # fmt: skip
        assert done.chosen is None

    def test_another_plane_is_chosen_only_if_it_is_faster_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main = measured("hierarchical", found(True, BEST, 0.2, 0.15))

        def always(settings: Mapping[str, str]) -> float:
            return 0.1 if settings.get("hierarchical_threshold") == "0" else 0.15

        hosts = Hosts(main, always)
        done = conduct(monkeypatch, hosts)
        assert done.chosen is not None
        assert done.settings["hierarchical_threshold"] == "0"
        # The others are measured with what was found.
        assert [settings.get("gradient_bucket") for _, settings in hosts.jobs[1:]] == [str(8 * MIB)] * 3
        times = iter([0.1, 0.15, 0.15])  # the first one was luck
        done = conduct(monkeypatch, Hosts(main, lambda settings: next(times)))
        assert done.chosen is None
        assert done.settings["hierarchical_threshold"] == 512 << 10
        # Why it was not taken is shown.
        expected = (
            "Gloo alone, not reduced in each host first: 100.00 ms, 50 % faster; once more: 150.00 ms, 0 % faster than "
            "the job's own planes (150.00 ms): not taken, as it is not 5 % faster twice"
        )
        assert expected in report.as_text(done).splitlines()
        assert json.loads(report.as_json(done))["again"]["seconds"] == 0.15

    def test_shared_memory_is_tried_with_larger_segments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main = measured("shm", found(True, START, 0.2, 0.2))
        done = conduct(monkeypatch, Hosts(main, lambda settings: 0.2))
        assert [variant.settings for variant, _ in done.others] == [{"shm_segment": "16777216"}]
        assert done.settings == {}

    def test_what_the_user_has_chosen_is_not_tried(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main = measured("shm", found(True, START, 0.2, 0.2))
        spec = replace(SPEC, environ={"HVDGLOO_SHM_SEGMENT": "8388608"})
        done = conduct(monkeypatch, Hosts(main, lambda settings: 0.2), spec=spec)
        assert done.others == ()

    @pytest.mark.parametrize(
        ("seconds", "given", "lossy"),
        [
            ({"full": 1.0, "bf16": 0.7, "int8": 0.5, "int4": 0.3}, "", "int8"),
            ({"full": 1.0, "bf16": 0.7, "int8": 0.8, "int4": 0.9}, "", "bf16"),
            ({"full": 1.0, "bf16": 0.98, "int8": 1.4, "int4": 0.3}, "", ""),
            ({"full": 1.0, "bf16": 0.7, "int8": 0.5, "int4": 0.3}, "bf16", ""),
            ({}, "", ""),
        ],
        ids=["int8", "bf16", "none is clearly faster", "the user has chosen", "nothing crosses"],
    )
    def test_what_changes_results_is_set_only_if_that_is_allowed(
        self, seconds: dict[str, float], given: str, lossy: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        main = replace(measured("hierarchical", found(True, START, 1.0, 1.0)), wires=seconds)
        spec = replace(SPEC, environ={"HVDGLOO_WIRE": given} if given else {})
        monkeypatch.setattr(campaign, "_function", Hosts(main, lambda settings: 1.0))
        for allowed in (False, True):
            done = campaign.run(
                spec, program=(), seconds=60, stderr=io.StringIO(), say=lambda text: None, allow_lossy=allowed
            )
            assert done.lossy == lossy
            assert done.settings == ({"wire": lossy} if allowed and lossy else {})
            assert (f"  wire: {lossy}" in report.as_yaml(done).splitlines()) == bool(allowed and lossy)
            advice = f"  {lossy} is clearly faster; with --allow-lossy it is among the settings to use"
            assert (advice in report.as_text(done).splitlines()) == (bool(lossy) and not allowed)
            assert json.loads(report.as_json(done))["wires"] == seconds
        assert ("  int4  300.00 ms, 233 % faster" in report.as_text(done).splitlines()) == (seconds.get("int4") == 0.3)

    @pytest.mark.parametrize(
        "program", [["train.py", "-v"], ["python3", "train.py", "-v"], ["/usr/bin/python", "-m", "train", "-v"]]
    )
    def test_a_program_is_recorded_first(self, monkeypatch: pytest.MonkeyPatch, program: list[str]) -> None:
        hosts = Hosts(measured("gloo", found(True, START, 0.2, 0.2)), lambda settings: 0.2)
        done = conduct(monkeypatch, hosts, program)
        assert [name for name, _ in hosts.jobs] == ["record", "measure"]
        assert hosts.jobs[0][1] == {"gradient_bucket": "0"}  # or gradients would be seen in buckets
        assert done.workload.startswith("the gradients of train")
        assert done.workload.endswith(": 2 tensors, 0.0 MiB")

    def test_without_gradients_there_is_one_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(campaign, "_function", lambda *_, **__: [None, None])
        with pytest.raises(LaunchError, match="before two training steps"):
            campaign.run(SPEC, program=["train.py"], seconds=60, stderr=io.StringIO(), say=lambda text: None)

    def test_hosts_that_turn_out_to_have_one_slot_have_nothing_to_tune(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main = replace(measured("local", found(True, START, 0.2, 0.2)), ranks=1)
        with pytest.raises(ConfigError, match="nothing to tune"):
            conduct(monkeypatch, Hosts(main, lambda settings: 0.2))

    @pytest.mark.parametrize("interrupted", [True, False])
    def test_a_rank_s_end_is_one_line_of_the_launcher_s(
        self, interrupted: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def launched(job: LaunchSpec, around: Surroundings) -> LaunchResult:
            around.stderr.write("KeyboardInterrupt of ours\n" if interrupted else "no memory\n")
            first = Failure(0, "localhost", 1, "exited with status 1")
            number = signal.SIGINT if interrupted else None
            return LaunchResult(JobOutcome(first, number), (), in_sight=True)

        monkeypatch.setattr(campaign, "launch", launched)
        stderr = io.StringIO()
        with pytest.raises(JobFailedError) as caught:
            campaign.run(SPEC, program=(), seconds=60, stderr=stderr, say=lambda text: None)
        if interrupted:
            assert (str(caught.value), caught.value.exit_code, stderr.getvalue()) == ("stopped by SIGINT", 130, "")
        else:
            assert str(caught.value) == "the job failed: rank 0 on host localhost exited with status 1"
            assert (caught.value.exit_code, stderr.getvalue()) == (1, "no memory\n")

    @pytest.mark.parametrize("variable", ["HVDGLOO_AUTOTUNE", "HOROVOD_AUTOTUNE"])
    @pytest.mark.parametrize("program", [(), ("train.py",)])
    def test_nothing_is_tuned_while_settings_are_measured(
        self, program: Sequence[str], variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file for --config-file may ask for it, for the jobs that are started otherwise."""
        started = []

        def launched(job: LaunchSpec, _: Surroundings) -> LaunchResult:
            started.append((job.config.autotune, host_setup._log(job, job.hosts[0])))
            return LaunchResult(JobOutcome(Failure(0, "localhost", 1, "is no part of this test")), (), in_sight=True)

        monkeypatch.setattr(campaign, "launch", launched)
        log = str(tmp_path / "log.csv")
        spec = replace(SPEC, environ={variable: "1", "HVDGLOO_AUTOTUNE_LOG": log})
        assert host_setup._log(spec, spec.hosts[0]) == (log,)
        said: list[str] = []
        with pytest.raises(JobFailedError):
            campaign.run(spec, program=program, seconds=60, stderr=io.StringIO(), say=said.append)
        assert started == [(False, ())]
        assert said[0] == "--autotune is off while settings are measured"

    @pytest.mark.parametrize("program", [["./train.sh"], ["python"], ["-m"]])
    def test_only_python_s_programs_can_be_recorded(self, monkeypatch: pytest.MonkeyPatch, program: list[str]) -> None:
        with pytest.raises(ConfigError, match="it is neither a Python file, nor -m and a module"):
            conduct(monkeypatch, Hosts(measured("gloo"), lambda settings: 0.2), program)


@pytest.fixture
def result(monkeypatch: pytest.MonkeyPatch) -> Campaign:
    main = measured("hierarchical", found(True, BEST, 0.2, 0.15), found(False, FUSED, 0.3, 0.2))
    return conduct(monkeypatch, Hosts(main, lambda settings: 0.3))


class TestReport:
    def test_the_file_sets_what_was_found(self, result: Campaign, tmp_path: Path) -> None:
        path = tmp_path / "tuned.yaml"
        path.write_text(report.as_yaml(result))
        config = Config.from_env(config_file.read(str(path), build_parser()).environ)
        assert config == Config(
            gradient_bucket=8 * MIB, fusion_threshold=4 * MIB, cycle_time=1.0, hierarchical_threshold=512 << 10
        )

    def test_where_the_defaults_are_best_the_file_says_so(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        main = measured("gloo", found(True, START, 0.2, 0.2))
        done = conduct(monkeypatch, Hosts(main, lambda settings: 0.2))
        path = tmp_path / "tuned.yaml"
        path.write_text(report.as_yaml(done))
        assert config_file.read(str(path), build_parser()).environ == {}
        assert "The defaults are best" in path.read_text()
        assert "best as they are" in report.as_text(done)

    def test_the_text_shows_planes_bars_and_what_to_set(self, result: Campaign) -> None:
        text = report.as_text(result)
        assert text.startswith(
            "4 ranks on 2 hosts, shared memory in each host, Gloo between hosts; gradients as in ResNet-50"
        )
        lines = text.splitlines()
        assert "    1 KiB   100 us   100 us" in lines
        assert "   64 MiB   1.50 s   1.50 s" in lines
        bars = {line.split()[0]: line.count("#") for line in lines if "#" in line}
        assert bars == {"8": 40, "25": 30, "4": 40, "32": 27}
        assert "  best: gradient-bucket-mb 8, hierarchical-threshold 524288: 150.00 ms, 33 % faster" in lines
        assert "Gloo alone, not reduced in each host first: 300.00 ms, 100 % slower" in lines
        assert "  params.cycle_time_ms: 1" in lines

    def test_best_is_only_what_was_chosen_and_its_time_is_in_its_row(self) -> None:
        luck = replace(START, gradient_bucket=4 * MIB)
        other = replace(BEST, hierarchical_threshold=START.hierarchical_threshold)
        tried = ((START, 0.2), (luck, 0.1), (other, 0.19), (BEST, 0.16))
        for best, seconds in ((BEST, 0.15), (START, 0.2)):
            one = Found(Workload((400,)), 1.0, START, 0.2, best, seconds, tried)
            text = report._found(one)
            rows = {line.split()[0]: line.split("#")[-1].split() for line in text.splitlines() if "#" in line}
            assert rows["4"] == ["100.00", "ms"]
            assert rows["8"][:2] == (["150.00", "ms"] if best == BEST else ["190.00", "ms"])
            assert rows["25"] == ["200.00", "ms", "<-", "now"]
            assert ("<- best" in text) == (best == BEST)
            assert "(shorter times above were not confirmed by more samples)" in text

    @pytest.mark.parametrize(
        ("part", "shown"), [(0.0004, "less than the first 1 %"), (0.05, "the first 5 %"), (0.5, None)]
    )
    def test_what_was_found_with_a_little_of_a_step_is_told_with_that_reservation(
        self, monkeypatch: pytest.MonkeyPatch, part: float, shown: str | None
    ) -> None:
        main = measured("gloo", replace(found(True, START, 0.2, 0.2), part=part))
        done = conduct(monkeypatch, Hosts(main, lambda settings: 0.2))
        text = report.as_text(done)
        assert " 0 %" not in text
        last = text.splitlines()[-1]
        if shown is None:
            assert "--seconds" not in text
        else:
            assert last.startswith(f"This was found with {shown} of a step's gradients")
            assert last.endswith("Measure for longer: --seconds")
            assert f"# {last}" in report.as_yaml(done)

    def test_the_json_has_all_figures(self, result: Campaign) -> None:
        values = json.loads(report.as_json(result))
        assert values["settings"]["params.gradient_bucket_mb"] == "8"
        assert [plane["plane"] for plane in values["planes"]] == ["hierarchical", "hierarchical"]
        assert values["planes"][0]["found"][1]["tried"][1]["seconds"] == 0.2

    def test_the_picture_is_svg_with_a_point_for_each_figure(self, result: Campaign) -> None:
        root = ElementTree.fromstring(report.as_svg(result))
        names = [element.tag.rpartition("}")[2] for element in root.iter()]
        assert names.count("polyline") == 2 + 1 + 1
        assert names.count("circle") == 2 * 3 + 2 + 2
        for element in root.iter():
            if element.tag.endswith("circle"):
                assert 0 <= float(element.attrib["cy"]) <= 410


class TestCommandLine:
    def test_tune_may_come_before_or_after_the_flags(self) -> None:
        values = build_parser().values
        for words in (["tune", "-H", "h1:2"], ["-H", "h1:2", "tune"]):
            assert split_all([*words, "--", "train.py", "-x"], values, "tune") == (
                ["-H", "h1:2"], ["train.py", "-x"], True,
            )  # fmt: skip
        assert split_all(["-np", "2", "--", "tune"], values, "tune") == (["-np", "2"], ["tune"], False)

    def test_its_help_shows_its_flags(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["tune", "--help"]) == 0
        text = capsys.readouterr().out
        assert "usage: hvdgloo-run tune" in text
        assert "--save FILE" in text
        assert "--autotune" in text

    @pytest.mark.parametrize("flag", ["--save x", "--plot x", "--allow-lossy"])
    def test_its_flags_are_not_for_jobs(self, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([*flag.split(), "-np", "1", "true"]) == 2
        assert f"{flag.split()[0]} is for hvdgloo-run tune" in capsys.readouterr().err

    def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "tuned.yaml"
        assert main(["tune", "-np", "2", "--save", str(path)]) == 2
        assert f"{path}: " in capsys.readouterr().err

    def test_folders_of_its_files_are_made_before_anything_is_measured_and_that_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Begun(BaseException):
            """Not one that the command would show."""

        def run(*_: Any, **__: Any) -> Campaign:
            assert (tmp_path / "new" / "tuned.yaml").exists()
            raise Begun

        monkeypatch.setattr(campaign, "run", run)
        with pytest.raises(Begun):
            main(["tune", "-np", "2", "--save", str(tmp_path / "new" / "tuned.yaml")])
        assert f"hvdgloo-run: creating the directory {tmp_path}/new\n" in capsys.readouterr().err

    def test_ctrl_c_between_two_jobs_is_one_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def run(*_: Any, **__: Any) -> Campaign:
            raise KeyboardInterrupt

        monkeypatch.setattr(campaign, "run", run)
        assert main(["tune", "-np", "2"]) == 130
        assert capsys.readouterr().err == "hvdgloo-run: stopped by SIGINT\n"

    def test_a_program_that_is_not_there_is_named_before_anything_starts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["tune", "-np", "2", "nofile.py"]) == 2
        assert capsys.readouterr().err == f"hvdgloo-run: there is no file nofile.py in {tmp_path}\n"

    @pytest.mark.parametrize("words", [["-np", "1"], ["-H", "localhost:1"]])
    def test_a_job_of_one_process_has_nothing_to_tune(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["tune", *words]) == 2
        assert "a job of one process sends nothing, so there is nothing to tune" in capsys.readouterr().err


class TestAutotuneLog:
    def test_it_is_refused_without_autotune(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["-np", "2", "--autotune-log-file", "log.csv", "true"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == "hvdgloo-run: --autotune-log-file needs --autotune; add it, or leave the file out"

    def test_one_that_cannot_be_written_is_named_before_the_start(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "log.csv"
        assert main(["-np", "2", "--autotune", "--autotune-log-file", str(path), "true"]) == 2
        reason = f"{path} cannot be written: {tmp_path}/file is not a directory"
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"hvdgloo-run: --autotune-log-file (HVDGLOO_AUTOTUNE_LOG): {reason}"

    def test_missing_folders_are_made(self, tmp_path: Path) -> None:
        path = tmp_path / "new" / "log.csv"
        log = _Log(str(path))
        log.end(Choice(MIB, 0.0, 0, 0))
        assert path.read_text().startswith("hierarchical_allreduce,")

    def test_a_job_that_ends_too_early_is_told_so(self, caplog: pytest.LogCaptureFixture) -> None:
        with World(2, autotune=True) as world:
            world.run(lambda context: None, deadline=60.0)
        (line,) = [text for text in caplog.messages if "autotune:" in text]
        assert line == "autotune: ended before anything was chosen (0 samples in 0 steps); the job needs more steps"
