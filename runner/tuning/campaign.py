"""The jobs of a measurement, one after another: first settings are tried on the planes that the job would use, then
other planes with what was found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from hvdgloo.config import Config
from hvdgloo.config import settings as declarations
from hvdgloo.errors import ConfigError
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

_OTHER_PLANE = 1.05
"""How many times as fast another data plane must be: it is measured in another job, at another time."""

_LARGE_SEGMENT = 16 << 20


@dataclass(frozen=True)
class Variant:
    """Data planes that a job can have, and the settings that choose them: by field of Config, with the variable's
    text."""

    name: str
    settings: Mapping[str, str]


@dataclass(frozen=True)
class Campaign:
    """All that was found.

    Attributes:
        workload: a line about what was sent.
        main: with the data planes that the job has by itself.
        others: with others: what each is, and what was found.
        chosen: of these, the one that is to be used; None for the job's own.
        settings: by field of Config, what differs from the defaults.
    """

    workload: str
    main: Measured
    others: tuple[tuple[Variant, Measured], ...]
    chosen: Variant | None
    settings: Mapping[str, int | float | str]


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
        ConfigError: the program is none of Python's.
        LaunchError, JobFailedError: see ``launch``.
    """
    if program:
        argv, module = _python_program(program)
        say(f"recording the gradients of {argv[0]}")
        recorded = _function(spec, stderr, record, (argv,), {"module": module}, gradient_bucket="0")
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
    settings = _settings(spec, main.found)
    best = main.found[0].best.gradient_bucket
    texts = {name: str(value) for name, value in settings.items()}
    variants = _variants(main, spec)
    # What seems faster is measured once more, as is the job's own plane.
    left = max(_SHORTEST, (1 - _SEARCHING) * seconds / (len(variants) + 2) - _STARTING)

    def again(given: Mapping[str, str]) -> Measured:
        return _measured(spec, stderr, workloads[:1], left, best, searching=False, **texts | dict(given))

    others = []
    for variant in variants:
        say(f"trying {variant.name}")
        others.append((variant, again(variant.settings)))
    chosen = _faster(main.found[0].best_seconds, others)
    if chosen is not None:
        say(f"trying {chosen.name} once more")
        chosen = _faster(again({}).found[0].start_seconds, [(chosen, again(chosen.settings))])
    if chosen is not None:
        settings = {**settings, **chosen.settings}
    return Campaign(shown, main, tuple(others), chosen, settings)


def _python_program(command: Sequence[str]) -> tuple[list[str], bool]:
    """Its file or module and its arguments, and whether it is a module."""
    words = list(command)
    if words[0].rpartition("/")[2].startswith("python"):
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        return words[1:], True
    if not words or not words[0].endswith(".py"):
        raise ConfigError(f"tune: {' '.join(command)}: it is no Python file, nor -m and a module")
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
    if fastest is None or fastest[1].found[0].start_seconds * _OTHER_PLANE > seconds:
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
    results = _function(
        spec, stderr, measure, (workloads, seconds, bucket), {"searching": searching}, autotune="0", **settings
    )
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
    """Call a function on all ranks of the job.

    Args:
        settings: fields of Config, with the texts of their variables.
    """
    declared = declarations()
    environ = {**spec.environ, **{declared[name].env: text for name, text in settings.items()}}
    job = replace(
        spec,
        environ=environ,
        command=function_task.command(sys.executable),
        remote_command=function_task.command(spec.reach.python),
        function=function_task.pack_function(function, args, kwargs, spec.secret),
    )
    with ResultFiles(spec.secret) as results:
        report = launch(job, stdout=stderr, stderr=stderr, quiet=True, news=False, results=results)
        return conclude(report, results)
