"""The jobs of a measurement, one after another: first settings are tried on the job's own data planes, then other
planes with the best settings."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from hvdgloo._platform import masking
from hvdgloo.config import Config
from hvdgloo.config import settings as declarations
from hvdgloo.errors import ConfigError, JobFailedError, LaunchError
from hvdgloo.runner.function_results import ResultFiles, conclude
from hvdgloo.runner.job.spec import LaunchSpec
from hvdgloo.runner.launch import launch
from hvdgloo.runner.surroundings import Surroundings
from hvdgloo.runner.tuning.measure import Found, Measured, measure, record
from hvdgloo.runner.tuning.workload import Workload, resnet50
from hvdgloo.runner.worker import function_task

_SEARCHING = 0.65
"""Share of the time in which settings are tried; the rest is for other planes, and for starting jobs."""

_STARTING = 4.0
"""Approximate seconds that a job needs to start and to end."""

_SHORTEST = 2.0
"""Minimum seconds for which another plane is measured."""

OTHER_PLANE = 1.05
"""Factor by which another data plane must be faster: it is measured in another job, at another time."""

LOSSY = ("bf16", "int8")
"""Values of ``--wire`` that can be chosen. int4 loses so much that each model must be tried with it."""

_LARGE_SEGMENT = 16 << 20

_ALONE = "tune: a job of one process sends nothing, so there is nothing to tune; give it more with -np or -H"


@dataclass(frozen=True)
class Variant:
    """Data planes that a job can have, and the settings that select them: by field of Config, with the variable's
    text."""

    name: str
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Again:
    """Other data planes that seemed to be the fastest, and were measured once more.

    Attributes:
        variant: the data planes.
        own_seconds, seconds: time of a step with the job's own planes and with these, measured one right after the
            other.
    """

    variant: Variant
    own_seconds: float
    seconds: float


@dataclass(frozen=True)
class Campaign:
    """All results.

    Attributes:
        workload: a line about the tensors that were sent.
        main: results with the data planes that the job has by default.
        others: other planes, each with its results.
        again: the plane that was measured once more; None if none was fast enough.
        chosen: the plane to use; None for the job's own.
        settings: by field of Config, the settings that differ from the defaults.
        lossy: the value of ``--wire`` that is clearly the fastest, and changes results; empty if none is. It is among
            the settings only if that was allowed.
    """

    workload: str
    main: Measured
    others: tuple[tuple[Variant, Measured], ...]
    again: Again | None
    chosen: Variant | None
    settings: Mapping[str, int | float | str]
    lossy: str = ""


def check_size(spec: LaunchSpec) -> None:
    """Refuse a job of one rank, as far as its size is known before it starts.

    Raises:
        ConfigError: the job has one rank.
    """
    slots = [host.slots for host in spec.hosts]
    if spec.np == 1 or (spec.np is None and slots == [1]):
        raise ConfigError(_ALONE)


def run(
    spec: LaunchSpec,
    *,
    program: Sequence[str],
    seconds: float,
    stderr: TextIO,
    say: Callable[[str], None],
    allow_lossy: bool = False,
) -> Campaign:
    """Measure on the hosts of a job.

    Args:
        spec: the job, without its command.
        program: a Python program whose gradients are measured, with its arguments; otherwise a well-known network's
            are.
        seconds: approximate duration of all measurements.
        stderr: receives the workers' output.
        say: shows the progress.
        allow_lossy: settings may change the results of training, for speed.

    Raises:
        ConfigError: the program is not a Python program, or there is only one rank.
        LaunchError: see ``launch``; or the program has no training steps.
        JobFailedError: a signal ended a job, or a rank failed; its error has been shown.
    """
    if spec.config.autotune:
        say("--autotune is off while settings are measured")
    if program:
        argv, module = _python_program(program)
        say(f"recording the gradients of {argv[0]}")
        recorded = _function(spec, stderr, record, (argv,), {"module": module}, gradient_bucket="0")
        if recorded[0] is None:
            raise LaunchError(
                "the program ended before two training steps: there are no gradients to tune for (tensors need "
                "names that repeat in every step, such as an optimizer's)"
            )
        workloads = [recorded[0]]
        shown = f"the gradients of {argv[0]}"
    else:
        workloads = [Workload(resnet50()), Workload(resnet50(), in_buckets=False)]
        shown = "gradients as in ResNet-50"
    first = workloads[0]
    shown += f": {len(first.sizes)} tensors, {first.nbytes / (1 << 20):.1f} MiB"
    bucket = spec.config.gradient_bucket
    say("trying settings")
    main = _measured(spec, stderr, workloads, _SEARCHING * seconds, bucket, searching=True)
    if main.ranks == 1:
        raise ConfigError(_ALONE)
    settings = _settings(spec, main.found)
    best = main.found[0].best.gradient_bucket
    texts = {name: str(value) for name, value in settings.items()}
    variants = _variants(main, spec)
    # The plane that seems faster is measured once more, and so is the job's own.
    left = max(_SHORTEST, (1 - _SEARCHING) * seconds / (len(variants) + 2) - _STARTING)

    # Times can be compared only if all these jobs send what the first one did: otherwise the part of the gradients, and
    # its timing, would depend on each job's speed.
    sent = [main.found[0].sent]

    def measured(given: Mapping[str, str]) -> Measured:
        return _measured(spec, stderr, sent, left, best, searching=False, **texts | dict(given))

    others = []
    for variant in variants:
        say(f"trying {variant.name}")
        others.append((variant, measured(variant.settings)))
    chosen = _faster(main.found[0].best_seconds, others)
    again = None
    if chosen is not None:
        say(f"trying {chosen.name} once more")
        own, other = measured({}).found[0].start_seconds, measured(chosen.settings)
        again = Again(chosen, own, other.found[0].start_seconds)
        chosen = _faster(own, [(chosen, other)])
    if chosen is not None:
        settings = {**settings, **chosen.settings}
    lossy = _lossy(spec, main)
    if lossy and allow_lossy:
        settings = {**settings, "wire": lossy}
    return Campaign(shown, main, tuple(others), again, chosen, settings, lossy)


def _python_program(command: Sequence[str]) -> tuple[list[str], bool]:
    """Return the program's file or module with its arguments, and whether it is a module."""
    words = list(command)
    if words[0].rpartition("/")[2].startswith("python"):
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        return words[1:], True
    if not words or not words[0].endswith(".py"):
        raise ConfigError(f"tune: {masking.shown(command)}: it is neither a Python file, nor -m and a module")
    return words, False


def _variants(main: Measured, spec: LaunchSpec) -> list[Variant]:
    """Return other planes that are worth a try; the user's settings are kept."""
    given, default = spec.config, Config()
    variants = []
    if main.plane == "shm":
        text = f"shared memory with segments of {_LARGE_SEGMENT >> 20} MiB"
        variants.append(Variant(text, {"shm_segment": str(_LARGE_SEGMENT)}))
    if main.plane == "hierarchical":
        variants.append(Variant("Gloo alone, not reduced in each host first", {"hierarchical_threshold": "0"}))
    return [
        variant
        for variant in variants
        if all(getattr(given, name) == getattr(default, name) for name in variant.settings)
    ]


def _faster(seconds: float, others: Sequence[tuple[Variant, Measured]]) -> Variant | None:
    """Return the fastest of other planes, if its steps take clearly less than ``seconds``."""
    fastest = min(others, key=lambda other: other[1].found[0].start_seconds, default=None)
    if fastest is None or fastest[1].found[0].start_seconds * OTHER_PLANE > seconds:
        return None
    return fastest[0]


def _lossy(spec: LaunchSpec, main: Measured) -> str:
    """Return the fastest value of ``--wire``, if it is clearly faster than full precision, and the user has not set
    one; else nothing."""
    if not main.wires or spec.config.wire != Config().wire:
        return ""
    fastest = min(LOSSY, key=lambda wire: main.wires[wire])
    return fastest if main.wires[fastest] * OTHER_PLANE <= main.wires["full"] else ""


def _settings(spec: LaunchSpec, found: Sequence[Found]) -> dict[str, int | float | str]:
    """Return the settings to change, by field of Config; if workloads differ, the first one with a change counts."""
    given = spec.config
    chosen: dict[str, int | float | str] = {}
    for each in reversed(found):
        best = each.best
        values = {
            "gradient_bucket": best.gradient_bucket,
            "fusion_threshold": best.fusion_threshold,
            "cycle_time": best.cycle_time * 1000,
            "hierarchical_threshold": best.hierarchical_threshold or given.hierarchical_threshold,
        }
        chosen.update({name: value for name, value in values.items() if value != getattr(given, name)})
    return chosen


def _measured(
    spec: LaunchSpec,
    stderr: TextIO,
    workloads: Sequence[Workload],
    seconds: float,
    bucket: int,
    *,
    searching: bool,
    **settings: str,
) -> Measured:
    results = _function(spec, stderr, measure, (workloads, seconds, bucket), {"searching": searching}, **settings)
    assert isinstance(results[0], Measured)
    return results[0]


def _function(
    spec: LaunchSpec,
    stderr: TextIO,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    **settings: str,
) -> list[Any]:
    """Call a function on all ranks of the job, with autotuning off.

    Args:
        settings: fields of Config, with the texts of their variables.

    Raises:
        LaunchError: see ``launch``.
        JobFailedError: a signal ended the job, or a rank failed.
    """
    declared = declarations()
    environ = {**spec.environ, **{declared[name].env: text for name, text in {**settings, "autotune": "0"}.items()}}
    job = replace(
        spec,
        environ=environ,
        command=function_task.command(sys.executable),
        remote_command=function_task.command(spec.reach.python),
        function=function_task.pack_function(function, args, kwargs, spec.secret),
    )
    # While only our own code is measured, Ctrl-C would show tracebacks of ours from all ranks.
    shown = io.StringIO()
    screen = stderr if function is record else shown
    interrupted = None
    with ResultFiles(spec.secret) as results:
        try:
            report = launch(job, Surroundings(screen, screen, quiet=True, news=False, results=results))
            interrupted = report.outcome.interrupted
        finally:
            if interrupted != signal.SIGINT:
                stderr.write(shown.getvalue())
        if report.outcome.exit_code:
            # A rank's error is on the screen already, as with any program; the user of this command would take the
            # exception itself for the launcher's.
            raise JobFailedError(report.summary(whole=False), exit_code=report.outcome.exit_code)
        return conclude(report, results)
