"""Diagnosis of a job's hosts: from facts to problems and remedies. Pure.

``diagnose`` is a list of rules. Each looks at all visits and yields findings; a new rule is one more function. Findings
that stop a job are distinguished from warnings.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvdgloo.config import GLOO_PROVIDERS, Config
from hvdgloo.errors import HostsUnreachableError, HvdglooError
from hvdgloo.runner.agent.facts import Facts
from hvdgloo.runner.network import addressing
from hvdgloo.runner.network.addressing import Reports
from hvdgloo.runner.network.probe import Answer, ProbeResult
from hvdgloo.runner.protocol.frames import Lacking
from hvdgloo.runner.transport.failures import preflight_failure
from hvdgloo.version import __version__

_GIB = 1024**3
SMALL_SHM = 1 * _GIB
"""Size below which DataLoader workers are known to fail: Docker's default is 64 MiB."""

CLOCK_TOLERANCE = 1.0
"""Seconds; nothing here depends on clocks, but logs and traces are compared by them."""

_DESCRIPTORS = 256  # that a worker needs in addition to four for each rank


class Severity(enum.Enum):
    """The effect of a finding on a job; the first is the worst."""

    STOP = "stop"
    WARNING = "warning"


@dataclass(frozen=True)
class Clock:
    """A host's clock against the launcher's: ``offset`` seconds ahead of it, give or take ``uncertainty``."""

    offset: float
    uncertainty: float


def compare_clocks(sent: float, asked: float, answered: float, received: float) -> Clock:
    """Return the offset of the other clock, from the times of a request and its answer; the other clock gave the middle
    two."""
    return Clock(((asked - sent) + (answered - received)) / 2, max(0.0, (received - sent) - (answered - asked)) / 2)


@dataclass(frozen=True)
class Visit:
    """A host, and the facts about it.

    Attributes:
        host: its name as the user gave it.
        slots: number of workers that it would run.
        problem: the reason why its agent could not be started; then all other attributes are empty.
        remedy: the remedy for the problem.
        identity: equal if two names lead to one machine.
        addresses: each with a remark: ``10.0.0.5 (eth0)``, ``reached by all``.
    """

    host: str
    slots: int
    problem: str = ""
    remedy: str = ""
    facts: Facts | None = None
    clock: Clock | None = None
    identity: str = ""
    addresses: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Finding:
    """A problem.

    Attributes:
        hosts: the hosts that have it.
        text: the description of the problem.
        remedy: the remedy for the problem.
    """

    severity: Severity
    hosts: tuple[str, ...]
    text: str
    remedy: str


def diagnose(
    visits: Sequence[Visit],
    launcher: Facts,
    cwd: str,
    connections: Sequence[Finding] = (),
    *,
    one_machine: Severity = Severity.STOP,
    config: Config | None = None,
) -> list[Finding]:
    """Return all findings, the worst first.

    Args:
        launcher: the machine that ``hvdgloo-run doctor`` runs on.
        cwd: the working directory of the workers.
        connections: findings about the network between the hosts.
        one_machine: severity of several names for one machine.
        config: the job's settings; by default, the defaults.
    """
    settings = config or Config()
    rules: tuple[Callable[[Sequence[Visit]], Iterable[Finding]], ...] = (
        _unreachable,
        lambda visits: _required(visits, cwd),
        _requirements,
        lambda visits: _gloo(visits, settings),
        lambda visits: _certificates(visits, launcher, settings),
        _frameworks,
        lambda visits: _python(visits, launcher),
        _processors,
        lambda visits: _one_machine_twice(visits, one_machine),
        _cores,
        _gpus,
        _gpu_kinds,
        _driver,
        _shared_memory,
        _open_files,
        _clocks,
    )
    found = [*connections, *(finding for rule in rules for finding in rule(visits))]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


def verdict(host: str, findings: Sequence[Finding]) -> Severity | None:
    """Return the worst severity found for a host; None if there are no findings."""
    found = {finding.severity for finding in findings if host in finding.hosts}
    return next((severity for severity in Severity if severity in found), None)


# Rules. Each gets all visits; ``_seen`` returns those that have facts.


def _seen(visits: Sequence[Visit]) -> Iterator[tuple[Visit, Facts]]:
    return ((visit, visit.facts) for visit in visits if visit.facts is not None)


def _where(visits: Sequence[Visit], condition: Callable[[Visit, Facts], object]) -> list[tuple[Visit, Facts]]:
    return [(visit, facts) for visit, facts in _seen(visits) if condition(visit, facts)]


def _names(found: Iterable[tuple[Visit, Facts]]) -> tuple[str, ...]:
    return tuple(visit.host for visit, _ in found)


def _grouped(seen: Iterable[tuple[Visit, Facts]], key: Callable[[Facts], str | None]) -> dict[str, list[str]]:
    """Group host names by ``key``, leaving out hosts for which it returns nothing."""
    groups: dict[str, list[str]] = defaultdict(list)
    for visit, facts in seen:
        if name := key(facts):
            groups[name].append(visit.host)
    return groups


def _difference(what: str, groups: Mapping[str, list[str]], remedy: str) -> Iterator[Finding]:
    """Yield a finding about the hosts that differ from the majority."""
    if len(groups) > 1:
        usual = max(groups, key=lambda name: len(groups[name]))
        parts = "; ".join(f"{name} on {listed(hosts)}" for name, hosts in groups.items())
        others = tuple(host for name, hosts in groups.items() if name != usual for host in hosts)
        yield Finding(Severity.WARNING, others, f"{what} differs: {parts}", remedy)


def _unreachable(visits: Sequence[Visit]) -> Iterator[Finding]:
    for visit in visits:
        if visit.problem:
            yield Finding(Severity.STOP, (visit.host,), visit.problem, visit.remedy)


def _required(visits: Sequence[Visit], cwd: str) -> Iterator[Finding]:
    """Yield missing requirements, in the words with which a job would refuse to start."""

    def reason(facts: Facts) -> str | None:
        diagnosis = preflight_failure(Lacking(facts.directory, facts.missing, machine=facts.machine), cwd)
        return None if diagnosis is None else diagnosis.text

    for text, hosts in _grouped(_seen(visits), reason).items():
        problem, _, remedy = text.partition("; ")
        yield Finding(Severity.STOP, tuple(hosts), problem, remedy)


def _requirements(visits: Sequence[Visit]) -> Iterator[Finding]:
    lacking = _where(visits, lambda _, facts: facts.lacking)
    for names, hosts in _grouped(lacking, lambda facts: ", ".join(facts.lacking)).items():
        first = next(found for found in lacking if found[0].host == hosts[0])
        yield Finding(
            Severity.STOP,
            tuple(hosts),
            f"hvdgloo needs {names} there",
            f"{_pip([first])} hvdgloo=={__version__}",
        )


def _gloo(visits: Sequence[Visit], config: Config) -> Iterator[Finding]:
    """Yield findings about Gloo: all ranks use the package that rank 0 has, which is on the first host.

    Ranks on a single host need none, unless it is requested.
    """
    seen = list(_seen(visits))
    if not seen:
        return
    setting, is_needed = config.gloo_provider, len(visits) > 1 or config.cpu_operations == "gloo"
    if setting != "auto":
        lacking = _where(visits, lambda _, facts: setting not in facts.packages)
        if lacking and not is_needed:
            yield Finding(
                Severity.WARNING,
                _names(lacking),
                f"{setting} is not installed, which --gloo-provider names; ranks of one host need no Gloo, so it has "
                "no effect here",
                f"leave out --gloo-provider, or {_pip(lacking)} 'hvdgloo[{setting}]' for jobs on several hosts",
            )
        elif lacking:
            text = f"{setting} is not installed, through which ranks are to exchange tensors (--gloo-provider)"
            yield Finding(Severity.STOP, _names(lacking), text, f"{_pip(lacking)} 'hvdgloo[{setting}]'")
        return
    if not is_needed:
        return
    lacking = _where(visits, lambda _, facts: not _providers(facts))
    if lacking:
        install = f"{_pip(lacking)} 'hvdgloo[torch]', or with Python 3.10 'hvdgloo[pygloo]'"
        why, remedy = (
            ("through which hosts exchange tensors (whatever framework they use)", f"{install} on all hosts")
            if len(visits) > 1
            else ("and --cpu-operations gloo asks for Gloo", f"leave that out, or {install}")
        )
        yield Finding(Severity.STOP, _names(lacking), f"neither torch nor pygloo is installed, {why}", remedy)
    if not _providers(seen[0][1]):
        return
    chosen = _providers(seen[0][1])[0]
    others = _where(visits, lambda _, facts: _providers(facts) and chosen not in _providers(facts))
    if others:
        common = [package for package in GLOO_PROVIDERS if len(_having(seen, package)) == len(seen)]
        yield Finding(
            Severity.STOP,
            _names(others),
            f"{chosen} is not installed, through which {seen[0][0].host}, and so every host, exchanges tensors",
            f"{_pip(others)} 'hvdgloo[{chosen}]'" + (f", or run with --gloo-provider {common[0]}" if common else ""),
        )


def _certificates(visits: Sequence[Visit], launcher: Facts, config: Config) -> Iterator[Finding]:
    """Yield listeners without a certificate: the launcher and rank 0, on the first host, use the user's or make one."""
    if config.tls_files is None or config.tls_cert:
        return
    listeners = {(launcher.hostname, launcher.executable): ("launcher", launcher)}
    for visit, facts in _seen(visits[:1]):
        listeners[facts.hostname, facts.executable] = (visit.host, facts)
    for name, facts in listeners.values():
        if not facts.certificates:
            yield Finding(
                Severity.STOP,
                (name,),
                "cryptography is not installed, which makes the certificates for --tls required",
                f"{facts.executable} -m pip install 'hvdgloo[tls]', or provide your own certificate (--tls-cert, "
                "--tls-key)",
            )


def _providers(facts: Facts) -> list[str]:
    """Return the packages there that carry Gloo, the preferred one first."""
    return [package for package in GLOO_PROVIDERS if package in facts.packages]


def _frameworks(visits: Sequence[Visit]) -> Iterator[Finding]:
    seen = list(_seen(visits))
    for package in dict.fromkeys(name for _, facts in seen for name in facts.packages):
        # Requirements of hvdgloo itself are reported by other rules.
        lacking = [(visit, facts) for visit, facts in seen if package not in {*facts.packages, *facts.lacking}]
        if lacking and package not in GLOO_PROVIDERS:
            yield Finding(
                Severity.WARNING,
                _names(lacking),
                f"{package} is not installed, as it is on {listed(_having(seen, package))}",
                f"{_pip(lacking)} {package}, if the job needs it",
            )
        groups = _grouped(seen, lambda facts, package=package: facts.packages.get(package))  # type: ignore[misc]
        yield from _difference(package, groups, f"install one version of {package} everywhere")


def _python(visits: Sequence[Visit], launcher: Facts) -> Iterator[Finding]:
    others = _where(visits, lambda _, facts: _minor(facts.python) != _minor(launcher.python))
    for python, hosts in _grouped(others, lambda facts: facts.python).items():
        yield Finding(
            Severity.WARNING,
            tuple(hosts),
            f"Python is {python}, the launcher's is {launcher.python}: hvdgloo.run cannot send functions from one to "
            "the other",
            "use the same minor version everywhere (--remote-python names the interpreter on the hosts)",
        )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _processors(visits: Sequence[Visit]) -> Iterator[Finding]:
    return _difference(
        "the kind of processor",
        _grouped(_seen(visits), lambda facts: facts.processor),
        "results may differ in the last digits; use one kind if runs must be reproducible",
    )


def _one_machine_twice(visits: Sequence[Visit], severity: Severity) -> Iterator[Finding]:
    groups: dict[str, list[str]] = defaultdict(list)
    for visit in visits:
        if visit.identity:
            groups[visit.identity].append(visit.host)
    for hosts in groups.values():
        if len(hosts) > 1:
            yield Finding(
                severity,
                tuple(hosts),
                "they are one and the same machine, whose GPUs would be used twice",
                "name it once, with all its slots",
            )


def _cores(visits: Sequence[Visit]) -> Iterator[Finding]:
    for visit, facts in _where(visits, lambda visit, facts: facts.cores < visit.slots):
        limited = f" (of {facts.machine_cores}: a control group or the affinity allows no more)"
        yield Finding(
            Severity.WARNING,
            (visit.host,),
            f"{visit.slots} workers share {_count(facts.cores, 'core')}"
            + (limited if facts.cores < facts.machine_cores else ""),
            "give it fewer slots, or more cores (docker run --cpus, srun --cpus-per-task)",
        )


def _gpus(visits: Sequence[Visit]) -> Iterator[Finding]:
    for visit, facts in _where(visits, lambda visit, facts: 0 < facts.visible_gpus < visit.slots):
        yield Finding(
            Severity.WARNING,
            (visit.host,),
            f"{visit.slots} workers share {_count(facts.visible_gpus, 'GPU')}",
            "give it as many slots as it has GPUs, or make more of them visible (CUDA_VISIBLE_DEVICES)",
        )
    for platform, blind in (
        ("CUDA", _where(visits, lambda _, facts: _torch_sees_none(facts, facts.torch_cuda) and not facts.amd_gpus)),
        ("ROCm", _where(visits, lambda _, facts: _torch_sees_none(facts, facts.torch_rocm) and facts.amd_gpus)),
    ):
        if blind:
            yield Finding(
                Severity.WARNING,
                _names(blind),
                f"there are GPUs, but this torch was built without {platform} and cannot use them",
                f"install a build of torch with {platform}, if torch is to use them",
            )


def _torch_sees_none(facts: Facts, built_for: str | None) -> bool:
    return facts.visible_gpus > 0 and "torch" in facts.packages and built_for is None


def _gpu_kinds(visits: Sequence[Visit]) -> Iterator[Finding]:
    return _difference(
        "the kind of GPU",
        _grouped(_seen(visits), lambda facts: " and ".join(dict.fromkeys(gpu.name for gpu in facts.gpus)) or "none"),
        "each step takes as long as the slowest host needs; use hosts of one kind",
    )


def _driver(visits: Sequence[Visit]) -> Iterator[Finding]:
    mute = _where(visits, lambda _, facts: facts.visible_gpus and not facts.driver and not facts.amd_gpus)
    if mute:
        yield Finding(
            Severity.WARNING,
            _names(mute),
            "there are GPUs, but nvidia-smi does not answer",
            "look at what nvidia-smi says there; the driver may not be loaded, or not match the version of its tools",
        )
    drivers = _grouped(_seen(visits), lambda facts: facts.driver)
    yield from _difference("NVIDIA's driver", drivers, "install the same driver everywhere")


def _shared_memory(visits: Sequence[Visit]) -> Iterator[Finding]:
    absent = _where(visits, lambda _, facts: facts.system.startswith("Linux") and facts.shm_size is None)
    if absent:
        yield Finding(
            Severity.WARNING,
            _names(absent),
            "there is no /dev/shm, which frameworks' data loaders need",
            "mount a tmpfs there",
        )
    small = _where(visits, lambda _, facts: facts.shm_size is not None and facts.shm_size < SMALL_SHM)
    for visit, facts in small:
        yield Finding(
            Severity.WARNING,
            (visit.host,),
            f"/dev/shm has only {size(facts.shm_size)}, which frameworks' data loaders run out of",
            "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory",
        )
    full = _where(visits, lambda _, facts: facts.shm_free is not None and facts.shm_free < SMALL_SHM)
    for visit, facts in full:
        if (visit, facts) not in small:
            yield Finding(
                Severity.WARNING,
                (visit.host,),
                f"/dev/shm is nearly full: {size(facts.shm_free)} of {size(facts.shm_size)} are free",
                "remove what earlier processes have left in it (ls -l /dev/shm)",
            )


def _open_files(visits: Sequence[Visit]) -> Iterator[Finding]:
    needed = _DESCRIPTORS + 4 * sum(visit.slots for visit in visits)
    few = _where(visits, lambda _, facts: facts.open_files is not None and facts.open_files < needed)
    for visit, facts in few:
        most = facts.open_files_most
        enough = most is None or most >= needed
        yield Finding(
            Severity.WARNING,
            (visit.host,),
            f"a process may have only {facts.open_files} files open; about {needed} may be needed",
            f"ulimit -n {needed} in the shell's start-up file there"
            if enough
            else "raise the limit there (nofile in /etc/security/limits.conf, docker run --ulimit nofile=65536)",
        )


def _clocks(visits: Sequence[Visit]) -> Iterator[Finding]:
    for visit in visits:
        clock = visit.clock
        if clock is not None and abs(clock.offset) - clock.uncertainty > CLOCK_TOLERANCE:
            yield Finding(
                Severity.WARNING,
                (visit.host,),
                f"its clock is {abs(clock.offset):.1f} s {'ahead of' if clock.offset > 0 else 'behind'} the "
                "launcher's: logs and traces of the hosts cannot be compared",
                "synchronise clocks (chronyd, systemd-timesyncd)",
            )


# Between hosts.


def addresses_reached(reports: Reports) -> tuple[dict[str, list[tuple[str, str]]], list[Finding]]:
    """Return each host's addresses with the hosts that reach them, and the problems."""
    tried: dict[tuple[int, str], list[tuple[int, Answer | None]]] = defaultdict(list)
    for source, target, address in addressing.tried(reports):
        key = (target, address.address)
        tried[key].append((source, reports.answers.get((source, *key))))
    said = {
        name: [
            (str(address), _who_reaches(reports, tried[host, address.address])) for address in reports.candidates[host]
        ]
        for host, name in enumerate(reports.names)
    }
    if addressing.choose(reports) is not None:
        return said, []
    return said, [unconnected(addressing.explain(reports), reports.names)]


def _who_reaches(reports: Reports, answers: Sequence[tuple[int, Answer | None]]) -> str:
    """Describe who reaches an address: ``all``, ``none (...)``, or ``all but h2 (timed out after 3 s)``."""
    if not answers:
        return "not tried: nothing listens there"
    failed = [(reports.names[source], answer) for source, answer in answers if not _reached(answer)]
    if not failed:
        return "all"
    why = Counter(
        "was not answered" if answer is None else addressing.describe(answer, reports.names) for _, answer in failed
    )
    reason = why.most_common(1)[0][0]
    if len(failed) == len(answers):
        return f"none ({reason})"
    return f"all but {listed([name for name, _ in failed])} ({reason})"


def _reached(answer: Answer | None) -> bool:
    return answer is not None and answer.outcome is ProbeResult.REACHED


def unconnected(error: HvdglooError, hosts: Sequence[str]) -> Finding:
    """Return a finding about the hosts that an error names, otherwise about all."""
    text, newline, remedy = str(error).rpartition("\n")
    if not newline:
        text, _, remedy = str(error).partition("; ")
    pairs = error.pairs if isinstance(error, HostsUnreachableError) else ()
    concerned = tuple(dict.fromkeys(target for _, target in pairs)) or tuple(hosts)
    return Finding(Severity.STOP, concerned, text, remedy)


# Formatting.


def size(amount: int | None) -> str:
    """Format a size: ``23.5 GiB``; empty if not known."""
    if amount is None:
        return ""
    value = float(amount)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.1f} GiB" if value < 100 else f"{value:.0f} GiB"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def listed(hosts: Sequence[str], shown: int = 4) -> str:
    """List the first few names, and the number of further ones."""
    return ", ".join(hosts[:shown]) + (f" and {len(hosts) - shown} more" if len(hosts) > shown else "")


def _having(seen: Sequence[tuple[Visit, Facts]], package: str) -> list[str]:
    return [visit.host for visit, facts in seen if package in facts.packages]


def _pip(found: Sequence[tuple[Visit, Facts]]) -> str:
    return f"{found[0][1].executable} -m pip install"
