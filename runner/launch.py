"""From a LaunchSpec to the end of its job: the whole course on one screen, and its parts."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TextIO

from hvdgloo._net.descriptors import reserve_descriptors
from hvdgloo._net.tls import Tls
from hvdgloo._platform.writable import unwritable
from hvdgloo.errors import ConfigError, JobFailedError, LaunchError
from hvdgloo.runner.console.console import Console, make_directory
from hvdgloo.runner.console.progress import Backoff, InitProgress
from hvdgloo.runner.console.startup_view import INIT_LINE_AFTER, LiveDisplay, StartDisplay
from hvdgloo.runner.discovery import discover
from hvdgloo.runner.job.advice import advise, advise_on_signal
from hvdgloo.runner.job.command import interface_variables, needs, thread_defaults, worker_environment
from hvdgloo.runner.job.environment import for_other_hosts
from hvdgloo.runner.job.hostlist import place, remark_on_load, shortlist
from hvdgloo.runner.job.outcome import Failure, JobOutcome, blame
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec, Slot
from hvdgloo.runner.network.addressing import Placement, Server
from hvdgloo.runner.network.interfaces import Address
from hvdgloo.runner.protocol.frames import CHUNK, Hello, Require, Spawn
from hvdgloo.runner.rendezvous_host import RendezvousHost, open_rendezvous
from hvdgloo.runner.supervise.init_watch import InitWatch
from hvdgloo.runner.supervise.startup import check_machines
from hvdgloo.runner.supervise.supervisor import Supervisor, host_states
from hvdgloo.runner.transport.base import Spawner
from hvdgloo.runner.transport.select import choose_spawner

if TYPE_CHECKING:
    from hvdgloo.rendezvous._elastic.events import Changed

COMMAND_LINE_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGTSTP,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
LIBRARY_SIGNALS = (signal.SIGINT, signal.SIGTSTP)
"""What ``hvdgloo.run.run`` takes over while it runs: the others are up to the calling program."""


_LAST_WORDS = 0.5  # seconds that a blocked terminal may delay the end


class Results(Protocol):
    """Receives what tasks return, piece by piece."""

    def add(self, rank: int, data: bytes) -> None: ...

    def clear(self) -> None:
        """All workers will be started again: what has come is void."""


@dataclass(frozen=True)
class Restart:
    """A failure after which all workers were started again.

    Attributes:
        failure: in words.
        after: seconds from the start, or the restart before, to the failure's end.
    """

    failure: str
    after: float


@dataclass(frozen=True)
class Report:
    """A job that has ended.

    Attributes:
        outcome: how it ended.
        slots: where its workers were; those of an elastic job that were together last.
        last_lines: the end of the output of the first worker that failed.
        in_sight: it has just been shown, so that the command line need not repeat it.
        advice: what to do about them, in one line; empty if that is not known.
        restarts: those that came before, in order.
        numbers: of the workers in ``slots``, by rank.
        changes: of the workers of an elastic job: see ``ElasticDriver``.
        why_over: why an elastic job could not survive the failure.
    """

    outcome: JobOutcome
    slots: tuple[Slot, ...]
    last_lines: tuple[str, ...] = ()
    advice: str = ""
    in_sight: bool = False
    restarts: tuple[Restart, ...] = ()
    numbers: tuple[int, ...] = ()
    changes: tuple[tuple[float, Changed], ...] = ()
    why_over: str = ""

    def summary(self, *, whole: bool = True) -> str:
        """How the job ended, in words; empty after success at the first attempt.

        Args:
            whole: with the worker's last lines, also if they are in sight.
        """
        end = self._end(whole)
        past = self._changes() or (history(self.restarts) if self.restarts else "")
        return f"{end or 'the job succeeded'}\n{past}" if past else end

    def _changes(self) -> str:
        if len(self.changes) < 2:
            return ""
        from hvdgloo.rendezvous._elastic.history import summarize  # what jobs of a fixed size do not need

        return summarize(self.changes)

    def failure(self, *, whole: bool = True) -> str:
        """What failed first, in words, with what the worker said last."""
        assert self.outcome.first is not None
        text = describe_failure(self.outcome.first)
        if self.why_over and self.why_over != self.outcome.first.reason:
            text += f"; {self.why_over}"
        if self.last_lines and (whole or not self.in_sight):
            text += "\nIts last lines were:\n" + "\n".join(f"  {line}" for line in self.last_lines)
        return f"{text}\n{self.advice}" if self.advice else text

    def _end(self, whole: bool) -> str:
        if self.outcome.interrupted == signal.SIGPIPE:
            return "stopped, because nobody reads the output any longer"
        if self.outcome.interrupted is not None:
            return f"stopped by {signal.Signals(self.outcome.interrupted).name}"
        return f"the job failed: {self.failure(whole=whole)}" if self.outcome.first is not None else ""

    def error(self) -> JobFailedError:
        """The failure as an exception."""
        first = self.outcome.first
        return JobFailedError(
            self.summary(),
            rank=first.rank if first else None,
            host=first.host if first else None,
            exit_code=self.outcome.exit_code,
            signal=first.signal if first else None,
            last_lines=self.last_lines,
        )


def launch(
    spec: LaunchSpec,
    *,
    stdout: TextIO,
    stderr: TextIO,
    quiet: bool = False,
    signals: Sequence[signal.Signals] = COMMAND_LINE_SIGNALS,
    results: Results | None = None,
    spawner: Spawner | None = None,
    fork: bool = False,
) -> Report:
    """Run the job that ``spec`` describes, and return when nothing of it is left.

    Args:
        stdout, stderr: for the workers' output.
        quiet: print no notices of the launcher's own.
        signals: to pass on to the workers, if this is the main thread.
        results: receives those of tasks.
        spawner: how agents are started; by default chosen from the hosts. One that is given here may start several on
            one machine.
        fork: this process exists for this job alone, and has loaded nothing that a fork might break.

    Raises:
        ConfigError, LaunchError: it could not be started. Nothing is left running.
        MissingDependencyError: certificates are to be made, and the package for that is not installed here.
        JobFailedError: a signal came before any worker was started.
    """
    if spec.elastic is not None:
        # What jobs of a fixed size do not need is not imported for them.
        from hvdgloo.runner.elastic_launch import launch_elastic

        return launch_elastic(
            spec,
            spec.elastic,
            stdout=stdout,
            stderr=stderr,
            quiet=quiet,
            signals=signals,
            results=results,
            spawner=spawner,
            fork=fork,
        )
    attempt = partial(_attempt, stdout=stdout, stderr=stderr, quiet=quiet, results=results, spawner=spawner, fork=fork)
    restarts: list[Restart] = []
    failed = ""
    interrupts = _Interrupts()
    # We handle signals until everything is cleaned up: a second one must not cut that short.
    with passed_on(signals, interrupts.came) as signal_came:
        while True:
            began = time.monotonic()
            try:
                report = attempt(spec, failed, len(restarts), interrupts, signal_came)
            except LaunchError as error:
                if not restarts:
                    raise
                raise LaunchError(f"the job could not be started again: {error}\n{history(restarts)}") from error
            first = report.outcome.first
            over = first is None or report.outcome.interrupted is not None or interrupts.ending is not None
            if over or len(restarts) == spec.max_restarts:
                return replace(report, restarts=tuple(restarts))
            failed = report.failure(whole=False)
            restarts.append(Restart(failed.partition("\n")[0], time.monotonic() - began))
            if results is not None:
                results.clear()


def _attempt(
    spec: LaunchSpec,
    failed: str,
    number: int,
    interrupts: _Interrupts,
    signal_came: Callable[[], bool],
    *,
    stdout: TextIO,
    stderr: TextIO,
    quiet: bool,
    results: Results | None,
    spawner: Spawner | None,
    fork: bool,
) -> Report:
    """Start all workers, and wait for their end. What is not described here is as for ``launch``.

    Args:
        failed: how the attempt before has failed; empty for the first.
        number: of restarts so far.
        interrupts: passes signals on.
        signal_came: whether one has come since its first call.
    """
    if number:  # a host that has failed may be on its way back
        spec = replace(spec, reach=replace(spec.reach, wait_for_hosts=spec.reach.wait_for_hosts is not False))
    hosts = shortlist(spec.hosts, spec.np)
    trusted = spawner is not None
    spawner = spawner or choose_spawner(hosts, spec.reach, fork=fork)
    job_id = secrets.token_hex(16)
    if spec.output_directory is not None:
        make_directory(spec.output_directory)
    check_traces(spec, spawner, hosts)
    if spec.network.tls is not None:
        Tls(*spec.network.tls).check_listener()  # the rendezvous server is opened only when all agents are there
    with open_console(spec, stdout, stderr, quiet) as console:
        if number:
            for line in (
                *failed.split("\n"),
                f"restart {number} of {spec.max_restarts}: all workers are started again",
            ):
                console.notice(line)
        states = host_states(hosts, spec)
        display = StartDisplay(states, console, environ=spec.environ, verbose=spec.verbose)
        observer = Observer(console, display, results)
        supervisor = Supervisor(spec, spawner, states, job_id, observer)
        console.on_broken = partial(supervisor.interrupt, signal.SIGPIPE)
        with interrupts.passed_to(supervisor.interrupt), supervisor:
            with display:
                hellos = supervisor.gather(partial(required_on, spec, spawner))
                if not trusted:
                    check_machines(hosts, hellos, spec.reach)
                slots = place(hosts, hellos, spec)
                hosts, hellos = supervisor.keep(_hosts_in_use(slots))
                expect(console, spec, len(slots), again=number > 0)
                _say_crowded(console, hosts, hellos)
                network = discover(supervisor, spec, hellos)
            _say_server(console, spec, hosts, network.placement)
            with open_rendezvous(supervisor, spec, hosts, network.placement) as rendezvous:
                addresses = network.placement.addresses
                env = [_host_environment(spec, spawner, *each) for each in zip(hosts, hellos, addresses, strict=True)]
                commands = [command_on(spec, spawner, host) for host in hosts]
                workers = _spawns(
                    spec, slots, commands, job_id, rendezvous.endpoint, addresses, network.master_port, number
                )
                _say_threads(console, spec, env)
                supervisor.start(env, workers)
                rendezvous.serve()
                if spec.stdin_rank is not None:
                    _feed_stdin(supervisor, spec.stdin_rank)
                init = _init_watch(spec, slots, rendezvous)
                with _init_display(spec, init, console) as observer.display:
                    outcome = supervisor.supervise(init)
            console.finish()
            console.drain(signal_came)
        return _report(spec, spawner, hosts, slots, outcome, console)


def _report(
    spec: LaunchSpec,
    spawner: Spawner,
    hosts: Sequence[HostEntry],
    slots: tuple[Slot, ...],
    outcome: JobOutcome,
    console: Console,
) -> Report:
    outcome.first = blame(outcome, {slot.rank: slot.hostname for slot in slots}, console.cause)
    first = outcome.first
    if first is None:
        return Report(outcome, slots, numbers=tuple(range(len(slots))))
    if first.rank is None:
        return Report(outcome, slots, advice=advise_on_signal(first.reason), numbers=tuple(range(len(slots))))
    lines = console.tail(first.rank)
    host = hosts[slots[first.rank].host]
    advice = advise_on_signal(first.reason) or advice_for(spec, spawner, host, console.cause(first.rank))
    in_sight = console.in_sight(first.rank)
    return Report(outcome, slots, lines, advice, in_sight=in_sight, numbers=tuple(range(len(slots))))


def history(restarts: Sequence[Restart]) -> str:
    """A line for each failure after which the job was started again."""
    times = "once" if len(restarts) == 1 else f"{len(restarts)} times"
    lines = [f"  after {restart.after:.1f} s: {restart.failure}" for restart in restarts]
    return "\n".join([f"it was started again {times}:", *lines])


def describe_failure(failure: Failure) -> str:
    """``rank 3 on host h2 was killed by signal 9 (SIGKILL)``."""
    return failure.reason if failure.rank is None else f"rank {failure.rank} on host {failure.host} {failure.reason}"


class Observer:
    """Passes output to the console, steps to the start-up view, and results to their receiver.

    Attributes:
        display: what is shown now of those who are waited for: hosts, then workers.
    """

    def __init__(self, console: Console, display: StartDisplay, results: Results | None) -> None:
        self.output = console.output
        self.notice = console.notice
        self.step = display.step
        self.culprit = console.culprit
        self.interrupted = console.interrupted
        self._console = console
        self.display: LiveDisplay = display
        self._results = results

    def tick(self) -> float | None:
        return min((when for when in (self._console.tick(), self.display.tick()) if when is not None), default=None)

    def suspend(self) -> None:
        self.display.suspend()

    @property
    def congested(self) -> bool:
        return self._console.congested

    def result(self, rank: int, data: bytes) -> None:
        if self._results is not None:
            self._results.add(rank, data)


@contextmanager
def open_console(
    spec: LaunchSpec,
    stdout: TextIO,
    stderr: TextIO,
    quiet: bool,
    rank_of: Callable[[int], int] = lambda number: number,
) -> Iterator[Console]:
    """The console of a job, for as long as that lasts.

    Args:
        rank_of: a worker's number to its rank.
    """
    console = Console(
        stdout=stdout,
        stderr=stderr,
        timestamps=spec.timestamps,
        interactive=spec.stdin_rank,
        shown=spec.log_ranks,
        prefix=spec.prefix,
        quiet=quiet,
        backlog=spec.backlog,
        rank_of=rank_of,
    )
    try:
        yield console
    finally:
        # Also where an error ends the job: the list of a start is taken away, and notices are shown, before it is told.
        console.wait_until_written(_LAST_WORDS)
        console.close()


@contextmanager
def passed_on(signals: Sequence[signal.Signals], note: Callable[[int], None]) -> Iterator[Callable[[], bool]]:
    """Take over signals for a while, passing them to ``note``.

    Signals that are ignored (nohup, a shell's background job) stay so, and so do handlers that the calling program has
    installed. Only a main thread can do this; elsewhere nothing changes. Afterwards everything is as before, except
    that ``COMMAND_LINE_SIGNALS`` are ignored if one of them has ended the job: the command ends by that signal, with
    the corresponding exit status.

    Yields:
        a function that says whether a signal has come since its first call.
    """
    came: list[int] = []

    def handler(signum: int, _frame: FrameType | None) -> None:
        came.append(signum)
        note(signum)

    previous: dict[signal.Signals, object] = {}
    if threading.current_thread() is threading.main_thread():
        for signum in signals:
            if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                previous[signum] = signal.signal(signum, handler)
    asked: list[int] = []

    def signal_came() -> bool:
        if not asked:
            asked.append(len(came))
        return len(came) > asked[0]

    try:
        yield signal_came
    finally:
        ending = signals is COMMAND_LINE_SIGNALS and not _ENDING.isdisjoint(came)
        for signum, old in previous.items():
            signal.signal(signum, signal.SIG_IGN if ending else old)  # type: ignore[arg-type]


class _Interrupts:
    """Passes signals on to the attempt that is being made.

    Attributes:
        ending: the last signal that was to end the job; None if there was none.
    """

    def __init__(self) -> None:
        self.ending: int | None = None
        self._to: Callable[[int], None] | None = None

    def came(self, signum: int) -> None:
        """A signal has come."""
        if signum in _ENDING:
            self.ending = signum
        if self._to is not None:
            self._to(signum)

    @contextmanager
    def passed_to(self, note: Callable[[int], None]) -> Iterator[None]:
        """Pass them to ``note`` for a while, and also one that came between this attempt and the last."""
        self._to = note
        if self.ending is not None:
            note(self.ending)
        try:
            yield
        finally:
            self._to = None


def expect(console: Console, spec: LaunchSpec, np: int, *, again: bool = False) -> None:
    """Prepare for the output of ``np`` workers; ``again`` if they have been started before."""
    if spec.output_directory is not None:
        reserve_descriptors(2 * np, "this launcher", f"the output files of {np} workers")
    console.expect(np, spec.output_directory, again=again)


def _hosts_in_use(slots: Sequence[Slot]) -> tuple[HostEntry, ...]:
    """The hosts that have ranks, with as many slots as are used."""
    used: dict[int, HostEntry] = {}
    for slot in slots:
        used[slot.host] = HostEntry(slot.hostname, slot.local_size)
    return tuple(used[index] for index in sorted(used))


def required_on(spec: LaunchSpec, spawner: Spawner, host: HostEntry) -> Require:
    """What must be on a host before workers start."""
    if spawner.is_local(host):
        return Require(spec.cwd)  # the rest has been checked here
    files, programs = needs(command_on(spec, spawner, host), spec.reach.python)
    environ = base_environment(spec, spawner, host)
    return Require(spec.cwd, files, programs, environ.get("PATH", ""), _traces(spec, host))


def check_traces(spec: LaunchSpec, spawner: Spawner, hosts: Sequence[HostEntry]) -> None:
    """Refuse a trace that cannot be written on this host; others check theirs before workers start."""
    for host in hosts:
        if spawner.is_local(host):
            for problem in unwritable(_traces(spec, host), spec.cwd):
                raise ConfigError(f"--timeline-filename (HVDGLOO_TIMELINE): {problem}")


def _traces(spec: LaunchSpec, host: HostEntry) -> Sequence[str]:
    """The file that ranks on this host write their trace to, ``{rank}`` and all, if they write any from the start."""
    name = spec.timeline
    if not name or name.upper() == "DYNAMIC":
        return ()
    return (name,) if "{rank}" in name or (spec.hosts and host.name == spec.hosts[0].name) else ()


def command_on(spec: LaunchSpec, spawner: Spawner, host: HostEntry) -> tuple[str, ...]:
    """What workers on a host execute."""
    return spec.command if spec.remote_command is None or spawner.is_local(host) else spec.remote_command


def advice_for(spec: LaunchSpec, spawner: Spawner, host: HostEntry, cause: str) -> str:
    """What to do about a worker that failed on a host, in a line; empty if that is not known."""
    if spec.function is not None:
        return ""  # its program and its interpreter are the caller's
    here = spawner.is_local(host)
    python, option = (sys.executable, "") if here else (spec.reach.python, "--remote-python")
    return advise(cause, command_on(spec, spawner, host), python, option=option)


def base_environment(spec: LaunchSpec, spawner: Spawner, host: HostEntry) -> Mapping[str, str]:
    """Those of the user's variables that are sent to a host."""
    if spawner.is_local(host):
        return spec.environ
    return for_other_hosts(spec.environ, spec.exported, export_all=spec.export_all)


def _host_environment(
    spec: LaunchSpec, spawner: Spawner, host: HostEntry, hello: Hello, address: Address
) -> dict[str, str]:
    environ = base_environment(spec, spawner, host)
    threads = thread_defaults(hello.cores, host.slots or 1, environ, machine_cores=hello.machine_cores)
    rules = spec.nics.rules(host.name)
    return {**interface_variables(address, chosen=bool(rules.items)), **environ, **threads}


def _spawns(
    spec: LaunchSpec,
    slots: Sequence[Slot],
    commands: Sequence[tuple[str, ...]],
    job_id: str,
    rendezvous: tuple[str, int],
    addresses: Sequence[Address],
    port: int,
    restart: int,
) -> list[list[Spawn]]:
    spawns: list[list[Spawn]] = [[] for _ in addresses]
    for slot in slots:
        env = worker_environment(
            slot,
            job_id=job_id,
            epoch=0,
            rendezvous=rendezvous,
            secret=spec.secret,
            address=addresses[slot.host].address,
            master=(addresses[0].address, port),
            restart=restart,
        )
        task = spec.function is not None
        stdin = slot.rank == spec.stdin_rank
        spawns[slot.host].append(Spawn(slot.rank, commands[slot.host], env, stdin=stdin, task=task))
    return spawns


def _say_crowded(console: Console, hosts: Sequence[HostEntry], hellos: Sequence[Hello]) -> None:
    remark = remark_on_load(hosts, [hello.cores for hello in hellos])
    if remark:
        console.notice(remark)


def _say_server(console: Console, spec: LaunchSpec, hosts: Sequence[HostEntry], placement: Placement) -> None:
    if spec.verbose and placement.server is Server.FIRST_HOST:
        console.notice(
            f"the rendezvous server runs on {hosts[0].name}, at {placement.rendezvous}: "
            + ("that is where all workers are" if len(hosts) == 1 else "not all hosts reach the launcher")
        )
    if spec.verbose and spec.network.tls is not None:
        shown = spec.network.tls.certificate
        console.notice(
            "the rendezvous and the control plane are encrypted (TLS 1.3), with "
            + (f"the certificate {shown}" if shown else "certificates that are made for this job alone")
        )


def _say_threads(console: Console, spec: LaunchSpec, env: Sequence[Mapping[str, str]]) -> None:
    if not spec.verbose:
        return
    added = {name: value for name, value in env[0].items() if name not in spec.environ}
    if "OMP_NUM_THREADS" in added:
        console.notice(
            f"OMP_NUM_THREADS={added['OMP_NUM_THREADS']} for each worker, so that they share the host's cores; "
            "set it yourself for another number"
        )


def _init_watch(spec: LaunchSpec, slots: Sequence[Slot], rendezvous: RendezvousHost) -> InitWatch:
    hosts = {slot.rank: slot.hostname for slot in slots}
    return InitWatch(rendezvous.arrivals, rendezvous.ask, hosts, timeout=spec.start_timeout, verbose=spec.verbose)


def _init_display(spec: LaunchSpec, init: InitWatch, console: Console) -> LiveDisplay:
    now = time.monotonic()
    progress = InitProgress(init.arriving, now, spec.start_timeout)
    lines = Backoff(now, INIT_LINE_AFTER, once=True)
    return LiveDisplay(progress, console, lines, environ=spec.environ, verbose=spec.verbose)


def _feed_stdin(supervisor: Supervisor, rank: int) -> None:
    """Pass the launcher's standard input to a worker, a piece whenever the last one has been taken."""
    taken = threading.Semaphore(1)
    supervisor.on_stdin_taken = taken.release

    def read() -> None:
        while True:
            taken.acquire()
            try:
                data = os.read(0, CHUNK)
            except OSError:
                data = b""
            supervisor.feed_stdin(rank, data)
            if not data:
                return

    # It cannot be joined: only the user's next keystroke would end its wait. As a daemon it ends with the launcher.
    threading.Thread(target=read, name="hvdgloo-stdin", daemon=True).start()
