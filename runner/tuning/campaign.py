"""The jobs of a measurement, one after another: first settings are tried on the planes that the job would use, then
other planes with what was found."""

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
from hvdgloo.runner.conclusion import ResultFiles, conclude
from hvdgloo.runner.job.spec import LaunchSpec
from hvdgloo.runner.launch import launch
from hvdgloo.runner.tuning.measure import Found, Measured, measure, record
from hvdgloo.runner.tuning.workload import Workload, resnet50
from hvdgloo.runner.worker import function_task

_SEARCHING = 0.65
"""The share of the time in which settings are tried; the rest is for other planes, and for starting jobs."""

_STARTING = 4.0
"""Seconds that a job needs to start and to end, about."""

_SHORTEST = 2.0
"""Seconds that another plane is measured for at least."""

OTHER_PLANE = 1.05
"""How many times as fast another data plane must be: it is measured in another job, at another time."""

_LARGE_SEGMENT = 16 << 20

_ALONE = "tune: a job of one process sends nothing, so there is nothing to tune; give it more with -np or -H"


@dataclass(frozen=True)
class Variant:
    """Data planes that a job can have, and the settings that choose them: by field of Config, with the variable's
    text."""

    name: str
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Again:
    """Other data planes that seemed to be the fastest, and were measured once more.

    Attributes:
        variant: what they are.
        own_seconds, seconds: a step's time with the job's own planes and with these, one right after the other.
    """

    variant: Variant
    own_seconds: float
    seconds: float


@dataclass(frozen=True)
class Campaign:
    """All that was found.

    Attributes:
        workload: a line about what was sent.
        main: with the data planes that the job has by itself.
        others: with others: what each is, and what was found.
        again: the one of these that was measured once more; None if none was fast enough.
        chosen: the one that is to be used; None for the job's own.
        settings: by field of Config, what differs from the defaults.
    """

    workload: str
    main: Measured
    others: tuple[tuple[Variant, Measured], ...]
    again: Again | None
    chosen: Variant | None
    settings: Mapping[str, int | float | str]


def check_size(spec: LaunchSpec) -> None:
    """Refuse a job of one rank, as far as its size is known before it starts.

    Raises:
        ConfigError: it has one.
    """
    slots = [host.slots for host in spec.hosts]
    if spec.np == 1 or (spec.np is None and slots == [1]):
        raise ConfigError(_ALONE)


def run(
    spec: LaunchSpec, *, program: Sequence[str], seconds: float, stderr: TextIO, say: Callable[[str], None]
) -> Campaign:
    """Measure on the hosts of a job.

    Args:
        spec: the job, without its command.
        program: a Python program whose gradients count, with its arguments; else those of a well-known network.
        seconds: that all of it may take, roughly.
        stderr: receives what workers print.
        say: shows what is being done.

    Raises:
        ConfigError: the program is none of Python's, or there is only one rank.
        LaunchError: see ``launch``; or the program has no training steps.
        JobFailedError: a job was ended by a signal, or a rank has failed; what it has raised was shown.
    """
    if Config.from_env(spec.environ).autotune:
        say("--autotune tries nothing while settings are measured")
    if program:
        argv, module = _python_program(program)
        say(f"recording the gradients of {argv[0]}")
        recorded = _function(spec, stderr, record, (argv,), {"module": module}, gradient_bucket="0")
        if recorded[0] is None:
            raise LaunchError(
                "the program has ended without two training steps: there are no gradients to tune for (tensors need "
                "names that come again in every step, as those of optimizers have)"
            )
        workloads = [recorded[0]]
        shown = f"the gradients of {argv[0]}"
    else:
        workloads = [Workload(resnet50()), Workload(resnet50(), in_buckets=False)]
        shown = "gradients like those of ResNet-50"
    first = workloads[0]
    shown += f": {len(first.sizes)} tensors, {first.nbytes / (1 << 20):.1f} MiB"
    bucket = Config.from_env(spec.environ).gradient_bucket
    say("trying settings")
    main = _measured(spec, stderr, workloads, _SEARCHING * seconds, bucket, searching=True)
    if main.ranks == 1:
        raise ConfigError(_ALONE)
    settings = _settings(spec, main.found)
    best = main.found[0].best.gradient_bucket
    texts = {name: str(value) for name, value in settings.items()}
    variants = _variants(main, spec)
    # What seems faster is measured once more, as is the job's own plane.
    left = max(_SHORTEST, (1 - _SEARCHING) * seconds / (len(variants) + 2) - _STARTING)

    # Times can be compared only if all these jobs send what the first one did: which part of the gradients, and when,
    # would otherwise depend on how fast each is.
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
    return Campaign(shown, main, tuple(others), again, chosen, settings)


def _python_program(command: Sequence[str]) -> tuple[list[str], bool]:
    """Its file or module and its arguments, and whether it is a module."""
    words = list(command)
    if words[0].rpartition("/")[2].startswith("python"):
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        return words[1:], True
    if not words or not words[0].endswith(".py"):
        raise ConfigError(f"tune: {masking.shown(command)}: it is no Python file, nor -m and a module")
    return words, False


def _variants(main: Measured, spec: LaunchSpec) -> list[Variant]:
    """Other planes that are worth a try; what the user has set stays."""
    given, default = Config.from_env(spec.environ), Config()
    variants = []
    if main.plane == "shm":
        there = "copied through a segment" if main.direct else "read in place"
        variants.append(Variant(f"shared memory, large tensors {there}", {"shm_direct": str(int(not main.direct))}))
        if not main.direct:
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
    """The fastest of other planes, if steps take clearly less than some seconds there."""
    fastest = min(others, key=lambda other: other[1].found[0].start_seconds, default=None)
    if fastest is None or fastest[1].found[0].start_seconds * OTHER_PLANE > seconds:
        return None
    return fastest[0]


def _settings(spec: LaunchSpec, found: Sequence[Found]) -> dict[str, int | float | str]:
    """What is to be set, by field of Config: where workloads differ, the first one that wants something else."""
    given = Config.from_env(spec.environ)
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
    """Call a function on all ranks of the job; whatever it asks for, nothing is tuned meanwhile.

    Args:
        settings: fields of Config, with the texts of their variables.

    Raises:
        LaunchError: see ``launch``.
        JobFailedError: it was ended by a signal, or a rank has failed.
    """
    declared = declarations()
    environ = {**spec.environ, **{declared[name].env: text for name, text in {**settings, "autotune": "0"}.items()}}
    job = replace(
        spec,
        environ=environ,
        autotune_log=None,
        command=function_task.command(sys.executable),
        remote_command=function_task.command(spec.reach.python),
        function=function_task.pack_function(function, args, kwargs, spec.secret),
    )
    # While only ours is measured, a Ctrl-C would show tracebacks of our own from all ranks.
    shown = io.StringIO()
    screen = stderr if function is record else shown
    interrupted = None
    with ResultFiles(spec.secret) as results:
        try:
            report = launch(job, stdout=screen, stderr=screen, quiet=True, news=False, results=results)
            interrupted = report.outcome.interrupted
        finally:
            if interrupted != signal.SIGINT:
                stderr.write(shown.getvalue())
        if report.outcome.exit_code:
            # What a rank has raised is on the screen, as with any program; for whoever has typed this command, the
            # exception itself would be the launcher's.
            raise JobFailedError(report.summary(whole=False), exit_code=report.outcome.exit_code)
        return conclude(report, results)
