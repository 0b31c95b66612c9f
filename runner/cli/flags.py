"""The flags of ``hvdgloo-run``: their declarations, their groups in ``--help-all``, and the start of the command.

They are the flags of ``horovodrun`` and some more. Flags that set workers' variables are generated from the fields of
``Config`` (``setting_flags``); the launcher's own flags are declared here, each once: names, help, and key in a
configuration file (``yaml=``). Adding a flag takes one call in ``build_parser``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from hvdgloo._platform import masking
from hvdgloo._platform.spelling import suggestions
from hvdgloo.errors import ConfigError
from hvdgloo.runner.cli import setting_flags
from hvdgloo.runner.cli.elastic import add_elastic_flags
from hvdgloo.runner.cli.reach import add_environment_flags, add_reach_flags
from hvdgloo.runner.cli.torchrun import add_torchrun_flags, judge_torchrun_flags
from hvdgloo.runner.cli.values import natural, page_address, positive, ranks, seconds, some_seconds, whole
from hvdgloo.runner.job.spec import GRACE_AFTER_FAILURE, GRACE_AFTER_SIGNAL, HEARTBEAT_TIMEOUT, Output, Times, Views

PROGRAM = "hvdgloo-run"

GROUPS = {
    "job": "what to run",
    "hosts": "hosts",
    "elastic": "elastic jobs, whose workers may join and leave (docs/elastic.md)",
    "reach": "how hosts are reached",
    "environment": "environment of the workers",
    "network": "network",
    "output": "output",
    "views": "observing the job (docs/observing.md)",
    "time": "time limits",
    "tuning": "fusion and negotiation",
    "stalls": "stalls",
    "log": "the workers' own messages",
    "doctor": "for hvdgloo-run doctor",
    "tune": "for hvdgloo-run tune",
    "information": "information",
    "horovod": "accepted from horovodrun",
    "torchrun": "accepted from torchrun",
}
"""Groups of ``--help-all`` in their order: name in this module, and title."""

ALTERNATIVES: tuple[tuple[str, ...], ...] = (("hosts", "hostfile", "host_discovery_script"),)
"""Flags (by their ``dest``) of which only one may be given. A flag on the command line also overrides its alternatives
in a file."""

COMPANIONS = {"host_discovery_script": ("discovery_interval", "discovery_timeout")}
"""Flags that complement another one: if a file's value for that flag is overridden, so are its values for these."""

_SECTIONS = {
    "as_horovod": "job",
    "as_gloo": "job",
    "network": "network",
    "timeouts": "time",
    "elastic": "elastic",
    "library_options.gloo_timeout_seconds": "time",
    "library_options.thread_affinity": "tuning",
    "library_options.cpu_operations": "tuning",
    "library_options.shm_segment_mb": "tuning",
    "params": "tuning",
    "autotune": "tuning",
    "stall_check": "stalls",
    "logging": "log",
    "observe": "views",
    "timeline": "log",
}
"""Section, or single key, of the configuration file, and the group that shows the setting's flag."""

_ELSEWHERE = {
    "-n": "-np",
    "-c": "-np",
    "--np": "-np",
    "--nproc": "-np",
    "--host": "--hosts",
    "-machinefile": "--hostfile",
    "--machinefile": "--hostfile",
    "--port": "--ssh-port",
}
"""Names of flags in mpirun, with their names here."""

_DESCRIPTION = """\
Start the workers of a training job on one or many hosts, watch over them, and
leave nothing behind.
"""

_USAGE = f"""\
{PROGRAM} [options] [--] command ...
       {PROGRAM} doctor | tune | top | timeline merge | report compare ..."""

_BRIEF = f"""\
usage: {_USAGE}

{_DESCRIPTION}The command is a Python file, -m and a module, or any program.

  -np N                      number of workers (default: all slots of the hosts)
  -H h1:4,h2:4               hosts, and how many workers each may run
  --hostfile FILE            the same in a file, a line for each host
  --config-file FILE         a YAML file with any of these settings
  -x NAME[=VALUE]            pass a variable to the workers on all hosts
  --ssh-port, --ssh-args, --agent-command      how hosts are reached
  --nics eth0                the network to use (default: whatever works)
  --min-np N, --max-np N, --host-discovery-script COMMAND
                             an elastic job, whose workers may join and leave
  --max-restarts N           start all workers again after a failure
  --output-filename DIR      also write what each rank prints to a file
  --page, --report FILE      show the job in a browser, live or afterwards
  --timeline-filename FILE   trace where collectives spend their time
  --as-horovod               run a program that imports horovod as it is
  --as-gloo                  carry torch.distributed's gloo over hvdgloo
  --verbose                  report each step of the start
  --check-build, --version   what can be used on this machine; the version
  --help-all                 all options, exit statuses, signals

Each of these has a --help of its own:
  {PROGRAM} doctor -H h1:2,h2:2     is everything there that the job needs?
  {PROGRAM} tune -H h1:2,h2:2       which settings suit these hosts?
  {PROGRAM} top                     what is the running job doing?
{PROGRAM} timeline merge all.json trace.*.json puts traces in one file,
{PROGRAM} report compare before.json after.json tells what became slower.
"""

_KNOWN = """\
--hierarchical-allreduce, --hierarchical-allgather, --torus-allreduce, --tcp,
--mpi-args, --mpi-threads-disable, --binding-args, --num-nccl-streams and
--disable-cache have no effect, and a line says so;
--mpi and --jsrun are refused."""

_EPILOG = """\
The command is a Python file (run by this interpreter), -m and a module, or any
program. Everything after it belongs to it. Examples:

  hvdgloo-run -np 4 train.py --epochs 90
  hvdgloo-run -H h1:2,h2:2 python train.py
  hvdgloo-run -np 2 -m package.train
  hvdgloo-run -np 4 --min-np 2 --host-discovery-script ./hosts.sh train.py
  hvdgloo-run doctor -H h1:2,h2:2     is everything there that the job needs?
  hvdgloo-run top                     what is the running job doing?
  hvdgloo-run tune -H h1:2,h2:2       which settings suit these hosts?
  hvdgloo-run timeline merge all.json trace.*.json    ranks' traces in one file
  hvdgloo-run report compare before.json after.json   what became slower?

Exit status: 0 if all workers succeeded, otherwise the status of the first one
that failed (128+N if signal N ended it), or of the failure that an elastic job
could not survive; 1 if the job could not be started; 2 if the command line, or
a file that it names, cannot be used.

Ctrl-C is passed on to the workers, which then have the grace period to end;
Ctrl-C again kills them at once. Ctrl-Z stops the launcher alone: the workers go
on, and their output waits for fg or bg.
"""


_DOCTOR_GROUPS = ("hosts", "elastic", "reach", "environment", "network", "doctor")

_DOCTOR_DESCRIPTION = f"""\
usage: {PROGRAM} doctor [options] [command ...]

Check whether the hosts of a job are ready for it, and say what to fix. Nothing
is started but an agent on each host, which reports what it finds and ends. All
options of a job may be given; these matter here:
"""

_DOCTOR_EPILOG = """\
The command is looked for on every host, and not run. Examples:

  hvdgloo-run doctor                  is this machine ready?
  hvdgloo-run doctor -H h1:4,h2:4 train.py
  hvdgloo-run doctor --hostfile cluster.txt --json

Exit status: 0 if a job can start (there may be warnings), 1 if something that
was found will stop it, 2 if the command line cannot be used.
"""


TUNE_SECONDS = 100
"""Approximate duration of ``tune``'s measurements."""

_TUNE_GROUPS = ("hosts", "reach", "environment", "network", "tuning", "tune")

_TUNE_DESCRIPTION = f"""\
usage: {PROGRAM} tune [options] [-- program.py ...]

Measure on the hosts of a job which settings suit them: data planes, buckets and
thresholds. With a Python program, run it for a few steps, and tune to its
gradients; otherwise to the gradients of a well-known network. All options of a
job may be given, and are kept; these matter here:
"""

_TUNE_EPILOG = """\
Examples:

  hvdgloo-run tune -H h1:4,h2:4 --save tuned.yaml
  hvdgloo-run tune -H h1:4,h2:4 --save tuned.yaml --plot tuned.svg -- train.py
  hvdgloo-run -H h1:4,h2:4 --config-file tuned.yaml train.py

Exit status: 0 if settings were measured, also where the defaults are best.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that also knows how many values each flag takes, and the keys of a configuration file.

    Attributes:
        values: the number of values of each flag, by each of its names.
        keys: the flags, by their key in a configuration file (``section.key`` or ``key``).
    """

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.keys: dict[str, argparse.Action] = {}
        super().__init__(
            prog=PROGRAM,
            usage=_USAGE,
            description=_DESCRIPTION,
            epilog=_EPILOG,
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self._titled = {
            name: self.add_argument_group(title, _KNOWN if name == "horovod" else None)
            for name, title in GROUPS.items()
        }

    def adder(self, group: str) -> setting_flags.AddArgument:
        """Return a function like ``add_argument`` for one of ``GROUPS``, with ``yaml=`` for a key in a file."""

        def add(*flags: str, yaml: str | None = None, **how: Any) -> argparse.Action:
            action = self._titled[group].add_argument(*flags, **how)
            takes = action.nargs if isinstance(action.nargs, int) else int(action.nargs != "?")
            self.values.update(dict.fromkeys(action.option_strings, takes))
            if yaml is not None:
                self.keys[yaml] = action
            return action

        return add

    def given(self, flags: Sequence[str]) -> argparse.Namespace:
        """Parse the command line; flags that are not given are None."""
        absent = argparse.Namespace(**{action.dest: None for action in self._actions})
        return self.parse_args(list(self._joined(flags)), absent)

    def _joined(self, flags: Sequence[str]) -> Iterator[str]:
        """Turn ``--ssh-args -v`` into ``--ssh-args=-v``: argparse would take the value for a flag.

        Raises:
            ConfigError: a flag's value is ``--``.
        """
        rest = iter(flags)
        for word in rest:
            value = next(rest, None) if self.values.get(word) == 1 else None
            joined = word if value is None else f"{word}={value}"
            flag, _, given = joined.partition("=")
            if given == "--":  # which argparse would drop, wherever it stands
                self.error(f"{flag}: a value is missing; -- only ends the options")
            yield joined

    def complete(self, given: argparse.Namespace, from_file: Mapping[str, Any]) -> argparse.Namespace:
        """Fill in the values from a file, and defaults for the rest.

        Args:
            from_file: values by ``dest``.

        Raises:
            ConfigError: two flags that exclude each other.
        """
        spellings = {action.dest: action.option_strings[-1] for action in self._actions if action.option_strings}
        silenced: set[str] = set()
        for alternatives in ALTERNATIVES:
            chosen = [dest for dest in alternatives if getattr(given, dest) is not None]
            if len(chosen) > 1:
                raise ConfigError(f"give either {' or '.join(spellings[dest] for dest in chosen)}, not both")
            if chosen:
                silenced.update(alternatives, *(COMPANIONS[dest] for dest in alternatives if dest in COMPANIONS))
                silenced.difference_update(COMPANIONS.get(chosen[0], ()))
        defaults = {action.dest: action.default for action in self._actions}
        for dest, value in vars(given).items():
            if value is None:
                usable = dest in from_file and dest not in silenced
                setattr(given, dest, from_file[dest] if usable else defaults.get(dest))
        return given

    def spellings(self, dest: str) -> Sequence[str]:
        """Return all names of a flag."""
        return next(action.option_strings for action in self._actions if action.dest == dest)

    def brief_help(self) -> str:
        """Return the help that most people look for; ``format_help`` has everything."""
        return _BRIEF

    def doctor_help(self) -> str:
        """Return the help of ``hvdgloo-run doctor``."""
        return self._help_of(_DOCTOR_DESCRIPTION, _DOCTOR_GROUPS, _DOCTOR_EPILOG)

    def tune_help(self) -> str:
        """Return the help of ``hvdgloo-run tune``."""
        return self._help_of(_TUNE_DESCRIPTION, _TUNE_GROUPS, _TUNE_EPILOG)

    def _help_of(self, description: str, groups: Sequence[str], epilog: str) -> str:
        formatter = self._get_formatter()
        formatter.add_text(description)
        for name in groups:
            formatter.start_section(GROUPS[name])
            formatter.add_arguments(self._titled[name]._group_actions)
            formatter.end_section()
        formatter.add_text(epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        # "argument -np/--num-proc: expected one argument": argparse's word for both a flag and its value.
        text = message.removeprefix("argument ").replace("expected one argument", "a value is missing")
        raise ConfigError(text.replace("ignored explicit argument", "takes no value, but was given"))


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that shows a flag's value once, and stays readable on wide terminals."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 100) - 2
        super().__init__(prog, max_help_position=26, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        # Neither --ssh-args nor a path may be split.
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        if action.nargs == "?":
            return f"{', '.join(action.option_strings)}[={action.metavar}]"
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


def build_parser() -> Parser:
    """Return a parser with all flags, in the groups that ``--help-all`` shows."""
    parser = Parser()
    _add_job_flags(parser.adder("job"))
    _add_host_flags(parser.adder("hosts"))
    add_elastic_flags(parser.adder("elastic"))
    add_reach_flags(parser.adder("reach"))
    add_environment_flags(parser.adder("environment"))
    _add_network_flags(parser.adder("network"))
    _add_output_flags(parser.adder("output"))
    _add_view_flags(parser.adder("views"))
    setting_flags.add_setting_flags(lambda key: parser.adder(_SECTIONS.get(key) or _SECTIONS[key.partition(".")[0]]))
    _add_time_flags(parser.adder("time"))
    _add_doctor_flags(parser.adder("doctor"))
    _add_tune_flags(parser.adder("tune"))
    _add_information_flags(parser.adder("information"))
    _add_known_flags(parser)
    add_torchrun_flags(parser.adder("torchrun"))
    return parser


def _add_job_flags(add: setting_flags.AddArgument) -> None:
    add(
        "-np",
        "--num-proc",
        dest="np",
        type=positive,
        metavar="N",
        yaml="num_proc",
        help="number of worker processes (default: all slots of the hosts; without hosts one for each GPU, else one)",
    )
    add(
        "--max_restarts",
        "--max-restarts",
        type=whole,
        default=0,
        metavar="N",
        yaml="max_restarts",
        help="after a failure, start all workers again on the same hosts, at most N times; they find the number of the "
        "restart in HVDGLOO_RESTART, and continue from the program's own checkpoint (default: 0)",
    )
    add("--config-file", metavar="FILE", help="a YAML file with settings; flags take precedence")
    add(
        "--stdin",
        type=natural,
        metavar="RANK",
        help="give this rank the launcher's standard input, for a debugger; all others have none",
    )
    add("--verbose", action="store_true", yaml="verbose", help="report each step of the start")


def _add_host_flags(add: setting_flags.AddArgument) -> None:
    add(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        yaml="hosts",
        help="hosts and how many workers each may run: h1:4,user@h2:4,[fd00::7]:4; without :SLOTS one for each GPU, "
        "else one",
    )
    add(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        yaml="hostfile",
        help="the same in a file, a line for each host: 'h1 slots=4' or 'h1:4'; # begins a comment",
    )


def _add_network_flags(add: setting_flags.AddArgument) -> None:
    add(
        "--nics",
        "--network-interfaces",
        action="append",
        metavar="NIC,NETWORK,^NIC,HOST=NIC,...",
        yaml="network.nics",
        help="addresses that the hosts may use among each other: names of network interfaces (eth*), networks "
        "(10.0.0.0/8), and ^ before what is not to be used; HOST= before what concerns one host. By default all that "
        "are found to work",
    )
    add("--network-interface", action="append", help=argparse.SUPPRESS)


def _add_output_flags(add: setting_flags.AddArgument) -> None:
    add(
        "--output-filename",
        metavar="DIRECTORY",
        yaml="output.filename",
        help="also write what each rank prints, byte for byte, to DIRECTORY/rank.<rank>/stdout and stderr",
    )
    add(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        dest="timestamps",
        action="store_true",
        yaml="output.prefix_with_timestamp",
        help="begin every line with the time",
    )
    add(
        "--log-ranks",
        type=ranks,
        metavar="RANKS",
        yaml="output.log_ranks",
        help="show the output of these ranks only: 0, or 0,4-7. Other ranks' output still goes to --output-filename, "
        "and its last lines to the summary if one of them fails (default: all)",
    )
    add(
        "--no-prefix",
        action="store_true",
        yaml="output.no_prefix",
        help="show lines as they were printed, without [rank]<stream>: before them; for a single shown rank",
    )


def output_from(arguments: argparse.Namespace) -> Output:
    """Return what the flags say about the job's output."""
    return Output(
        directory=arguments.output_filename,
        timestamps=arguments.timestamps,
        log_ranks=arguments.log_ranks,
        prefix=not arguments.no_prefix,
        verbose=arguments.verbose,
    )


def _add_view_flags(add: setting_flags.AddArgument) -> None:
    add(
        "--page",
        nargs="?",
        const=("127.0.0.1", 0),
        type=page_address,
        metavar="ADDRESS:PORT",
        yaml="view.page",
        help="serve a page that shows the job live, and print its address, which works for one browser. By default it "
        "is at 127.0.0.1 and any free port; =0.0.0.0:8080 lets other machines reach it (then use --tls, too)",
    )
    add(
        "--page-control",
        action="store_true",
        yaml="view.page_control",
        help="let viewers of the page have some steps traced, and download the trace",
    )
    add(
        "--report",
        metavar="FILE",
        yaml="view.report",
        help="write the page's content to FILE (.html) when the job has ended, even after a failure, and the same "
        "data for programs to a file next to it (.json)",
    )
    add(
        "--no-progress",
        action="store_true",
        yaml="view.no_progress",
        help="do not show a progress line on a terminal",
    )


def views_from(arguments: argparse.Namespace, command: Sequence[str]) -> Views:
    """Return what the flags say about the job's observers."""
    return Views(
        title=masking.shown(command),
        page=arguments.page,
        control=arguments.page_control,
        report=arguments.report,
        progress=not arguments.no_progress,
    )


def _add_time_flags(add: setting_flags.AddArgument) -> None:
    add(
        "--grace-period",
        type=seconds,
        metavar="SECONDS",
        yaml="timeouts.grace_seconds",
        help="time between asking workers to end and killing them "
        f"(default: {GRACE_AFTER_FAILURE:g} after a failure, {GRACE_AFTER_SIGNAL:g} after a signal)",
    )
    add(
        "--heartbeat-timeout",
        type=some_seconds,
        default=HEARTBEAT_TIMEOUT,
        metavar="SECONDS",
        yaml="timeouts.heartbeat_seconds",
        help=f"silence after which a host is considered lost (default: {HEARTBEAT_TIMEOUT:g})",
    )


def times_from(arguments: argparse.Namespace) -> Times:
    """Return what the flags say about the job's time limits."""
    return Times(grace_period=arguments.grace_period, heartbeat_timeout=arguments.heartbeat_timeout)


def _add_doctor_flags(add: setting_flags.AddArgument) -> None:
    add("--json", action="store_true", help="print what was found as JSON instead of a table; also for tune")


def _add_tune_flags(add: setting_flags.AddArgument) -> None:
    add("--save", metavar="FILE", help="write the settings that were found to a file for --config-file")
    add("--plot", metavar="FILE", help="write a picture (SVG) of what was measured")
    add("--seconds", type=positive, metavar="N", help=f"measure for about N seconds (default: {TUNE_SECONDS})")
    add(
        "--allow-lossy",
        action="store_true",
        default=None,
        help="--save may set --wire to bf16 or int8 if that is faster, although it changes results a little",
    )


def _add_information_flags(add: setting_flags.AddArgument) -> None:
    add("-h", "--help", action="store_true", help="show the most common options, and exit")
    add("--help-all", action="store_true", help="show this help, and exit")
    add("-v", "--version", action="store_true", help="show the version, and exit")
    add("-cb", "--check-build", action="store_true", help="show what can be used on this machine, and exit")


def _add_known_flags(parser: Parser) -> None:
    """Add Horovod's other flags; otherwise they would be rejected as unknown."""
    add = parser.adder("horovod")
    hidden = argparse.SUPPRESS
    add("--gloo", action="store_true", help="the only controller, and the default")
    for flag, count, _ in (*setting_flags.IGNORED_FLAGS, *setting_flags.REFUSED_FLAGS):
        if flag in parser.values:
            continue  # it has become a setting
        if count == 0:
            add(flag, dest=flag, action="store_true", help=hidden)
        else:
            add(flag, dest=flag, nargs=count, help=hidden)


def judge_known_flags(arguments: argparse.Namespace) -> list[str]:
    """Return one line for each given flag of Horovod's that has no effect, or has a new name. Judge torchrun's flags,
    too.

    Raises:
        ConfigError: a given flag cannot be ignored without changing the job.
    """
    given = vars(arguments)
    judge_torchrun_flags(arguments)
    for flag, _, reason in setting_flags.REFUSED_FLAGS:
        if given.get(flag):
            raise ConfigError(f"{flag}: {reason}")
    notices = [f"{flag}: {reason}" for flag, _, reason in setting_flags.IGNORED_FLAGS if given.get(flag)]
    if given.get("network_interface"):
        notices.append("--network-interface is deprecated and means --nics")
    return notices


# Start of the command.


def split(argv: Sequence[str], values: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Split the command line into the launcher's own flags and the command.

    The command begins after ``--``, with ``-m``, or with the first word that is neither a flag nor a flag's value.

    Raises:
        ConfigError: a flag does not exist; the text suggests the one that may have been meant.
    """
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            return list(argv[:position]), list(argv[position + 1 :])
        if word == "-m" or not word.startswith("-") or word == "-":
            break
        flag, equals, _ = word.partition("=")
        if flag not in values:
            raise ConfigError(program_as_value(argv[:position], values) or _unknown(flag, values))
        position += 1 if equals else 1 + values[flag]
    return list(argv[:position]), list(argv[position:])


def program_as_value(flags: Sequence[str], values: Mapping[str, int]) -> str:
    """Return advice if the last flag, which lacks its value, has taken the program for it; empty otherwise."""
    flag, value = ["", "", *flags][-2:]
    name, equals, given = value.partition("=")
    if equals:
        flag, value = name, given
    if values.get(flag) != 1 or "discovery" in flag or not value.endswith(".py") or not os.path.isfile(value):
        return ""
    return f"there is no command to run: {flag} took {value} as its value; write {PROGRAM} {flag} VALUE {value}"


def misplaced(command: Sequence[str], values: Mapping[str, int]) -> str:
    """Return advice about a flag of the launcher that follows the program; empty if there is none.

    Args:
        values: number of values of each flag.
    """
    for position, word in enumerate(command):
        flag, equals, _ = word.partition("=")
        if position and flag in values:
            own = [word] if equals else [word, *command[position + 1 : position + 1 + values[flag]]]
            before = masking.shown([PROGRAM, *own, *command[:position]])
            return f"{flag} follows the program, so the program receives it; to give it to {PROGRAM}, write {before}"
    return ""


_REFUSAL = re.compile(r"unknown|unrecogni[sz]ed|unexpected|invalid|no such|not used", re.IGNORECASE)


def misplaced_in_vain(
    command: Sequence[str], values: Mapping[str, int], last_lines: Sequence[str], *, usage_error: bool
) -> str:
    """Return advice to the user of a program that did not accept its arguments; empty if none is a launcher's flag.

    Args:
        values: number of values of each flag of the launcher.
        last_lines: printed by the program, which often names what it does not know.
        usage_error: the program exited with the status for wrong arguments, so that it need not name any.
    """
    said = "\n".join(line for line in last_lines if _REFUSAL.search(line))
    named = {flag: number for flag, number in values.items() if _names(said, flag)}
    long = {flag: number for flag, number in values.items() if flag.startswith("--")}
    return misplaced(command, named) or (misplaced(command, long) if usage_error else "")


def _names(text: str, flag: str) -> bool:
    """Tell whether a message names a flag. Some parsers leave out the hyphens."""
    return bool(re.search(rf"(?<![\w-])({flag}|'{flag.lstrip('-')}')(?![\w-])", text))


def _unknown(flag: str, values: Mapping[str, int]) -> str:
    close = [_ELSEWHERE[flag]] if flag in _ELSEWHERE else suggestions(flag, values)
    if values.get(flag[:2]) == 1 and flag[2:].isdigit():
        close = [f"{flag[:2]} {flag[2:]}"]
    if flag == "-c":
        close.append("python -c as the command")
    hint = f"; did you mean {' or '.join(close)}?" if close else f"; {PROGRAM} --help-all lists them all"
    return f"there is no option {flag}{hint} (the command's own options come after it)"
