"""The command line: flags, where the command begins, configuration files, what is suggested for a mistyped flag."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest

from hvdgloo._platform.spelling import suggestions
from hvdgloo.config import Config, settings
from hvdgloo.errors import ConfigError
from hvdgloo.runner.cli import config_file, setting_flags
from hvdgloo.runner.cli.flags import build_parser, misplaced, misplaced_in_vain, split
from hvdgloo.runner.cli.main import command, main
from hvdgloo.runner.job.spec import HEARTBEAT_TIMEOUT
from hvdgloo.version import __version__

HOROVODRUN_FLAGS = """
    -v --version -np --num-proc -cb --check-build --disable-cache --start-timeout --network-interfaces
    --network-interface --output-filename --verbose --config-file -p --ssh-port -i --ssh-identity-file
    --fusion-threshold-mb --cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allgather
    --torus-allreduce --autotune --no-autotune --autotune-log-file --autotune-warmup-samples
    --autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --min-np
    --min-num-proc --max-np --max-num-proc --slots-per-host --elastic-timeout --reset-limit
    --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles --no-stall-check --stall-check
    --stall-check-warning-time-seconds --stall-check-shutdown-time-seconds --mpi-threads-disable --mpi-args --tcp
    --binding-args --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level --log-with-timestamp
    --log-without-timestamp --log-hide-timestamp -prefix-timestamp --prefix-output-with-timestamp -H --hosts
    -hostfile --hostfile --host-discovery-script --gloo --mpi --jsrun
"""


def test_the_command_ends_without_a_search_for_garbage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not so a program that calls main(): what its own objects do in the end is its affair."""
    monkeypatch.setattr("sys.argv", ["hvdgloo-run", "--version"])
    gc.unfreeze()  # what the tests have frozen
    try:
        assert main() == 0
        assert gc.get_freeze_count() == 0
        with pytest.raises(SystemExit) as ended:
            command()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n" * 2


class TestFlags:
    @pytest.mark.parametrize(
        "flags", [["--port-range", "--"], ["--port-range=--"], ["--page=--"], ["--ssh-args", "--"]]
    )
    def test_what_ends_the_options_is_no_value(self, flags: list[str]) -> None:
        """argparse drops it, wherever it stands; found by fuzzing."""
        with pytest.raises(ConfigError, match=f"{flags[0].partition('=')[0]}: a value is missing"):
            build_parser().given(flags)

    def variables(self, *flags: str) -> dict[str, str]:
        return setting_flags.from_flags(build_parser().parse_args(list(flags)))

    def test_every_setting_with_a_flag_can_be_given(self) -> None:
        texts = {"--port-range": "2000-3000", "--log-level": "debug", "--gpu-operations": "nccl"}
        texts |= {
            "--gpu-completion": "stream",
            "--cpu-operations": "shm",
            "--gloo-provider": "pygloo",
            "--tls": "off",
            "--join": "now",
            "--wire": "int8",
            "--autotune-gaussian-process-noise": "0.5",
        }
        parser = build_parser()
        for name, setting in settings().items():
            if setting.flag is None:
                continue
            assert setting.flag in parser.format_help()
            boolean = parser.values[setting.flag] == 0
            is_on = getattr(Config(), name) is True  # then its twin says something
            flag = setting_flags.twin(setting.flag) if is_on else setting.flag
            flags = [flag] if boolean else [flag, texts.get(flag, "2")]
            environ = self.variables(*flags)
            assert set(environ) == {setting.env}
            assert getattr(Config.from_env(environ), name) != getattr(Config(), name)
            if boolean:
                other = setting.flag if is_on else setting_flags.twin(setting.flag)
                assert self.variables(other) == {setting.env: str(int(is_on))}

    def test_units(self) -> None:
        assert self.variables("--fusion-threshold-mb", "0.5") == {"HVDGLOO_FUSION_THRESHOLD": str(512 * 1024)}
        assert self.variables("--fusion-threshold-mb", "0") == {"HVDGLOO_FUSION_THRESHOLD": "0"}
        assert self.variables("--cycle-time-ms", "3.5") == {"HVDGLOO_CYCLE_TIME": "3.5"}
        with pytest.raises(ConfigError, match="--fusion-threshold-mb many"):
            self.variables("--fusion-threshold-mb", "many")
        with pytest.raises(ConfigError, match="--fusion-threshold-mb -1, in bytes: '-1048576' cannot be used: "):
            self.variables("--fusion-threshold-mb", "-1")

    def test_old_spellings(self) -> None:
        assert self.variables("--log-hide-timestamp") == self.variables("--log-without-timestamp")
        assert self.variables("--no-log-hide-timestamp") == self.variables("--log-with-timestamp")

    def test_every_flag_of_horovodrun_is_known(self) -> None:
        assert set(HOROVODRUN_FLAGS.split()) <= set(build_parser().values)

    @pytest.mark.parametrize(
        ("argv", "flags", "command"),
        [
            (["-np", "2", "train.py", "-np", "3"], ["-np", "2"], ["train.py", "-np", "3"]),
            (["-np", "2", "--", "--odd"], ["-np", "2"], ["--odd"]),
            (["--num-proc=2", "a"], ["--num-proc=2"], ["a"]),
            (["-np", "2", "-m", "x.y", "-v"], ["-np", "2"], ["-m", "x.y", "-v"]),
            (["--verbose", "a", "--", "b"], ["--verbose"], ["a", "--", "b"]),
            (["--blacklist-cooldown-range", "1", "2", "a"], ["--blacklist-cooldown-range", "1", "2"], ["a"]),
            (["-np"], ["-np"], []),
            ([], [], []),
        ],
    )
    def test_where_the_command_begins(self, argv: list[str], flags: list[str], command: list[str]) -> None:
        assert split(argv, build_parser().values) == (flags, command)

    @pytest.mark.parametrize(
        ("command", "right"),
        [
            (["t.py", "-np", "2"], "-np follows the program,.* write hvdgloo-run -np 2 t.py$"),
            (
                ["-m", "t", "--lr", "1", "--num-proc=2", "x"],
                "--num-proc .* write hvdgloo-run --num-proc=2 -m t --lr 1$",
            ),
            (["python", "t.py", "-np"], "write hvdgloo-run -np python t.py$"),
            (["t.py", "--epochs", "2", "-n", "3"], "^$"),
            ([], "^$"),
        ],
    )
    def test_a_number_of_workers_behind_the_program(self, command: list[str], right: str) -> None:
        assert re.search(right, misplaced(command, dict.fromkeys(build_parser().spellings("np"), 1)))

    @pytest.mark.parametrize(
        ("command", "said", "usage_error", "flag"),
        [
            ("t.py --report x", "t.py: error: unrecognized arguments: --report x", True, "--report"),
            ("t.py -np 2", "t.py: error: unrecognized arguments: -np 2", True, "-np"),
            ("t.py --page --report=x", "Error: No such option: --report", True, "--report"),
            ("t.py --report x", "Try --help", True, "--report"),
            ("t.py --report x", "FATAL Flags:\n  Unknown command line flag 'report'.\nPass --help", False, "--report"),
            (
                "t.py --report x",
                "ValueError: arguments are not used by the parser: ['--report', 'x']",
                False,
                "--report",
            ),
            ("t.py --verbose", "ValueError: bad batch", False, ""),
            ("t.py --page-size 3", "unrecognized arguments: --page-size 3", True, ""),
            ("t.py -np 2", "TypeError: unexpected np.int64", False, ""),
        ],
    )
    def test_a_flag_behind_a_program_that_refuses_it(
        self, command: str, said: str, usage_error: bool, flag: str
    ) -> None:
        advice = misplaced_in_vain(command.split(), build_parser().values, said.splitlines(), usage_error=usage_error)
        assert advice.partition(" ")[0] == flag

    def test_values_that_look_like_flags(self) -> None:
        given = build_parser().given(
            ["--ssh-args", "-v", "-np", "2", "-p", "22", "--mpi-args", "--oversubscribe", "-x", "A=-1"]
        )
        assert (given.ssh_args, given.np, given.ssh_port, given.exports) == ("-v", 2, 22, ["A=-1"])
        given = build_parser().given(["--blacklist-cooldown-range", "1", "2", "--verbose"])
        assert (given.cooldown, given.verbose) == ([1.0, 2.0], True)
        with pytest.raises(ConfigError, match="--ssh-args: a value is missing"):
            build_parser().given(["--ssh-args"])


class TestFile:
    def content(self, tmp_path: Path, text: str) -> config_file.FileContent:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return config_file.read(str(path), build_parser())

    def read(self, tmp_path: Path, text: str) -> tuple[dict[str, str], list[str]]:
        content = self.content(tmp_path, text)
        return content.environ, content.ignored

    def test_every_key_of_a_setting_is_understood(self, tmp_path: Path) -> None:
        texts = {
            "network.port_range": "2000-3000",
            "network.tls": "required",
            "logging.level": "debug",
            "stall_check.enabled": "false",
            "params.gpu_operations": "nccl",
            "params.gpu_completion": "stream",
            "params.cpu_operations": "gloo",
            "params.wire": "int8",
            "params.gloo_provider": "torch",
            "params.deterministic": "true",
            "params.check_weights": "false",
            "elastic.join": "now",
            "observe.enabled": "false",
            "autotune.enabled": "true",
            "autotune.gaussian_process_noise": "0.5",
        }
        for setting in settings().values():
            if setting.yaml is not None:
                section, _, key = setting.yaml.partition(".")
                flag = setting.yaml in ("as_horovod", "as_gloo") or "hide" in key or "mark" in key
                value = texts.get(setting.yaml, "true" if flag else "2")
                text = f"{section}:\n  {key}: {value}\n" if key else f"{section}: {value}\n"
                environ, ignored = self.read(tmp_path, text)
                assert set(environ) == {setting.env}
                assert ignored == []

    def test_meanings_that_are_turned_round(self, tmp_path: Path) -> None:
        environ, _ = self.read(tmp_path, "stall_check: {enabled: true}\nlogging: {with_timestamp: false}\n")
        assert environ == {"HVDGLOO_STALL_CHECK_DISABLE": "0", "HVDGLOO_LOG_HIDE_TIME": "1"}

    def test_horovod_s_own_keys_are_accepted(self, tmp_path: Path) -> None:
        environ, ignored = self.read(
            tmp_path, "controller: gloo\nautotune: {enabled: true}\nlibrary_options: {num_nccl_streams: 2}\n"
        )
        assert environ == {"HVDGLOO_AUTOTUNE": "1"}
        assert ignored == ["library_options.num_nccl_streams"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("params: {fusion_treshold_mb: 3}", "did you mean params.fusion_threshold_mb"),
            ("params: {fusion_threshold_mb: lots}", "params.fusion_threshold_mb: 'lots' cannot be used"),
            ("controller: mpi", "there is only the Gloo controller"),
            ("- a list", "sections"),
            ("{unbalanced", "settings.yaml"),
            ("stall_check: {enabled: maybe}", "stall_check.enabled"),
            ("hosts: {h1: [2, 3]}", "expected a value or a list of values, not values within values"),
            ("hosts: {h1: {slots: 2}}", "expected a value or a list of values, not values within values"),
            ("num_proc: {a: 1}", "expected a value or a list of values, not values within values"),
            ("num_proc: two", "num_proc: .*at least 1, not 'two'"),
            ("environment: {export: some}", "environment.export: 'some' is not one of all, named"),
            ("verbose: loud", "verbose: 'loud' cannot be used: expected true or false"),
            ("hostss: h1:2", "hostss: there is no such setting; did you mean hosts"),
            ("timeouts: {grace_seconds: -1}", "timeouts.grace_seconds: '-1' is not a number of seconds"),
            ("a: " + "[" * 3000, "the file is nested too deeply"),
            ("a: " + "{b: " * 3000, "the file is nested too deeply"),
            ("a: " + "[" * 3000 + "]" * 3000, "the file is nested too deeply"),
            ('hostfile: "a\\0b"', r"hostfile: .* contains a NUL character"),
            ('environment: {variables: ["A=\\0"]}', r"environment.variables: .* contains a NUL character"),
            ("hosts: [[h1]]", r"hosts: expected a value or a list of values"),
            ("params: {cycle_time: {a: b}}", r"params.cycle_time: expected a value or a list of values"),
            ("num_proc: 2001-99-99", "month must be in 1..12"),
            ("num_proc: " + "1" * 5000, "Exceeds the limit"),
            ("num_proc: 2\n\thosts: h1", r", line 2: .*cannot start any token"),
            ("hosts: *unknown", r", line 1: found undefined alias"),
            ("hosts: !!python/object:os.system x", r", line 1: could not determine a constructor"),
        ],
    )
    def test_a_mistake_is_told_in_one_line_that_names_the_key(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            self.content(tmp_path, text)
        assert "\n" not in str(caught.value)

    def test_a_file_of_a_few_lines_does_not_become_gigabytes(self, tmp_path: Path) -> None:
        """Aliases of aliases: each line has ten times the values of the one before."""
        items = ["&a0 [x, x, x, x, x, x, x, x, x, x]"]
        items += [f"&a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
        with pytest.raises(ConfigError, match="expected a value or a list of values"):
            self.content(tmp_path, "hosts:\n" + "".join(f"- {item}\n" for item in items))

    def test_an_empty_file_sets_nothing(self, tmp_path: Path) -> None:
        assert self.read(tmp_path, "") == ({}, [])

    def test_keys_of_the_launcher_s_own_flags(self, tmp_path: Path) -> None:
        content = self.content(
            tmp_path,
            "num_proc: 4\nhosts: [h1:2, h2:2]\nverbose: true\ntimeouts: {grace_seconds: 5}\noutput: {filename: logs}\n",
        )
        assert content.flags == {
            "np": 4,
            "hosts": "h1:2,h2:2",
            "verbose": True,
            "grace_period": 5.0,
            "output_filename": "logs",
        }
        assert self.content(tmp_path, "environment: {variables: [A, B=1], file: f.env}\n").flags == {
            "exports": ["A", "B=1"],
            "env_file": ["f.env"],
        }
        assert self.content(tmp_path, "hosts: h1:2,h2\n").flags == {"hosts": "h1:2,h2"}
        assert (content.environ, content.ignored) == ({}, [])

    @pytest.mark.parametrize(
        ("text", "flags"),
        [
            ("hosts: {h1: 2, h2: 4}", {"hosts": "h1:2,h2:4"}),
            ("hosts:\n- h1: 2\n- h2\n- {h3: null}", {"hosts": "h1:2,h2,h3"}),
            ("network: {nics: {h1: eth0, h2: ib0}}", {"nics": ["h1=eth0", "h2=ib0"]}),
            ("environment: {variables: {A: 1, B: two}}", {"exports": ["A=1", "B=two"]}),
        ],
    )
    def test_pairs_may_be_written_as_yaml_has_them(self, tmp_path: Path, text: str, flags: dict[str, object]) -> None:
        assert self.content(tmp_path, text).flags == flags

    def test_flags_win_over_the_file(self) -> None:
        parser = build_parser()
        from_file = {"np": 4, "hosts": "h1:4", "grace_period": 5.0, "verbose": True}
        arguments = parser.complete(parser.given(["-np", "2", "--hostfile", "F"]), from_file)
        assert (arguments.np, arguments.grace_period, arguments.verbose) == (2, 5.0, True)
        assert (arguments.hosts, arguments.hostfile) == (None, "F"), (
            "the other way to name hosts does not count any more"
        )
        assert parser.complete(parser.given([]), {}).heartbeat_timeout == HEARTBEAT_TIMEOUT

    def test_every_launcher_key_has_one_meaning(self) -> None:
        parser = build_parser()
        fields = {setting.yaml for setting in settings().values() if setting.yaml is not None}
        assert not fields & set(parser.keys)
        assert len({action.dest for action in parser.keys.values()}) == len(parser.keys)


class TestSuggestions:
    @pytest.mark.parametrize(
        ("mistyped", "meant"),
        [
            ("-pn", "-np"),
            ("-n", "-np"),
            ("--np", "-np"),
            ("--num-procs", "--num-proc"),
            ("--host", "--hosts"),
            ("-hosts", "--hosts"),
            ("-hsotfile", "-hostfile"),
            ("--fusion-treshold-mb", "--fusion-threshold-mb"),
            ("--fusion_threshold_mb", "--fusion-threshold-mb"),
            ("--start-timout", "--start-timeout"),
            ("--output", "--output-filename"),
            ("-version", "--version"),
            ("-p2222", "-p 2222"),
        ],
    )
    def test_the_first_one_is_the_one_that_was_meant(self, mistyped: str, meant: str) -> None:
        with pytest.raises(ConfigError, match=rf"there is no option {mistyped}; did you mean {meant}\b"):
            split([mistyped, "2", "train.py"], build_parser().values)

    def test_nothing_is_suggested_for_something_else(self) -> None:
        with pytest.raises(ConfigError, match="hvdgloo-run --help-all lists them all"):
            split(["--mca", "btl"], build_parser().values)

    def test_slips_of_the_finger_in_their_order(self) -> None:
        assert suggestions("--abdc", ["--abcd", "--abxy", "--xbdc"]) == ["--abcd", "--xbdc"]
        assert suggestions("x", ["y", "z"]) == []


class TestHelp:
    def test_it_fits_80_columns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        parser = build_parser()
        for text in (parser.format_help(), parser.brief_help(), parser.doctor_help(), parser.tune_help()):
            assert [line for line in text.splitlines() if len(line) > 80] == []

    def test_it_is_brief_and_says_where_there_is_more(self) -> None:
        parser = build_parser()
        brief = parser.brief_help()
        assert len(brief.splitlines()) <= 36
        named = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", brief))
        assert named - {"-m"} <= set(parser.values)
        assert {"-np", "-H", "--help-all"} <= named
        for word in ("doctor", "tune", "top", "timeline merge"):
            assert word in brief.partition("\n\n")[0], "the usage shows all subcommands"
            assert word in parser.format_help().partition("\n\n")[0]

    @pytest.mark.parametrize(
        ("argv", "begins"),
        [
            (["--help"], "usage: hvdgloo-run [options]"),
            (["-h", "train.py"], "usage: hvdgloo-run [options]"),
            (["doctor", "--help-all"], "usage: hvdgloo-run doctor"),
            (["tune", "-h"], "usage: hvdgloo-run tune"),
        ],
    )
    def test_it_is_printed(self, argv: list[str], begins: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(argv) == 0
        assert capsys.readouterr().out.startswith(begins)

    def test_all_of_it_is_printed_on_demand(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--help-all"]) == 0
        assert capsys.readouterr().out == build_parser().format_help()
        assert main(["train.py", "--help"]) != 0, "that is the program's"

    def test_doctor_s_own(self) -> None:
        text = build_parser().doctor_help()
        assert text.startswith("usage: hvdgloo-run doctor [options] [command ...]\n")
        assert "--ssh-port PORT" in text
        assert "--json" in text
        assert "--fusion-threshold-mb" not in text

    def test_flags_without_effect_are_named_together(self) -> None:
        text = build_parser().format_help()
        for flag, _, _ in setting_flags.IGNORED_FLAGS:
            name = flag.replace("--no-", "--")
            assert name in text or f"{'-'.join(name.split('-')[:3])}-..." in text, flag

    def test_every_flag_is_explained(self) -> None:
        parser = build_parser()
        unexplained = [action.option_strings for action in parser._actions if not action.help]
        assert unexplained == []
