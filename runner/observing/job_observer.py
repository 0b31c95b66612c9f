"""The launcher's observer of its job: it feeds page, ``top``, report and progress line.

Every job listens at a Unix socket in the user's private directory, where ``hvdgloo-run top`` finds it; nothing else is
done for that before the first connection. Only then, or with ``--page``, ``--report`` or a terminal, are agents told to
collect workers' samples, and an observatory is made of them. Until then only the workers' places and ends are kept.
"""

from __future__ import annotations

import importlib
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING

from hvdgloo._platform.runtime import runtime_folder
from hvdgloo._platform.spelling import in_one_line
from hvdgloo._platform.writable import why_not_replaceable
from hvdgloo.errors import ConfigError, JobFailedError
from hvdgloo.runner.console.progress import Backoff
from hvdgloo.runner.console.startup_view import LiveDisplay
from hvdgloo.runner.job.outcome import JobOutcome
from hvdgloo.runner.job.spec import LaunchSpec
from hvdgloo.runner.protocol.frames import Frame, Observe, Observed, Traced, TraceSteps, Tracing
from hvdgloo.runner.supervise.observers import JobObservers, PlacedWorker
from hvdgloo.version import __version__

if TYPE_CHECKING:  # not imported for a job without observers
    from hvdgloo._observe.observatory import Observatory, Subscription
    from hvdgloo.rendezvous._page_server.server import PageServer
    from hvdgloo.runner.console.console import Console
    from hvdgloo.runner.observing.traces import Traces
    from hvdgloo.runner.supervise.supervisor import Supervisor

_GATHER = 0.2  # seconds in which process numbers are collected: a thousand workers report one by one
_NEEDED = tuple(
    f"hvdgloo.{name}"
    for name in ("_observe.observatory", "_observe.jobs", "_observe.page.page", "rendezvous._page_server.server")
)
_PACKAGES = ("torch", "tensorflow", "keras", "jax", "mxnet", "numpy")


class JobObserver(JobObservers):
    """The observer of a job, from its start to its end, over all restarts.

    The ``JobObservers`` of each supervisor, and a context manager. Methods are for the supervisor's thread, except
    where they say otherwise.

    Args:
        spec: the job, whose ``views`` are the requested ones.
        say: prints a line of the launcher's own.
        progress: True if the launcher has a terminal for a line about the job's progress.

    Attributes:
        observe: sent to agents with their start; None while the job has no observers.
        progress: see above.
        written: the report's files, once they exist.
        unwritten: the report and why it could not be written, if it could not.

    Raises:
        ConfigError: on entering: the page cannot listen where it should, or the report could not be written.
    """

    def __init__(self, spec: LaunchSpec, *, say: Callable[[str], None], progress: bool = False) -> None:
        self.observe: Observe | None = None
        self.written: list[str] = []
        self.unwritten: list[str] = []
        self._spec = spec
        self._views = spec.views
        self._say = say
        self.progress = progress
        self._id = secrets.token_hex(6)
        self._started = time.time()
        self._lock = threading.RLock()
        self._observatory: Observatory | None = None
        self._server: PageServer | None = None
        self._traces: Traces | None = None
        self._supervisor: Supervisor | None = None
        self._stack = ExitStack()
        self._serving = self._over = False
        self._public = (
            self._views.page is not None or self._views.report is not None
        )  # what workers print is shown, too
        self._epoch = 0
        self._placed: dict[int, PlacedWorker] = {}
        self._pids: dict[int, int] = {}
        self._ends: dict[int, tuple[str, str]] = {}
        self._hosts: dict[str, str] = {}
        self._place_at: float | None = None
        if self._public:
            # Entering imports nothing, since Ctrl-C in the middle of an import may print a traceback.
            for name in _NEEDED:
                importlib.import_module(name)

    def __enter__(self) -> JobObserver:
        if self._views.report is not None:
            _check_report(self._views.report)
            folder = os.path.dirname(os.path.abspath(self._views.report))
            if not os.path.isdir(folder):
                self._say(
                    f"--report {self._views.report}: there is no directory {folder} yet; the job's end creates it"
                )
        with ExitStack() as stack:
            self._stack = stack
            if self._public:
                self.observe = Observe(host=True)
                self._made()
            elif self.progress:
                self.observe = Observe(host=False)
            if self._views.page is not None:
                self._listen()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            stopped = isinstance(error, JobFailedError | KeyboardInterrupt)  # here, only a signal raises those
            self._conclude(_status(error), str(error).partition("\n")[0] or "interrupted", stopped=stopped)
            for path in self.written[:1]:
                self._say(f"the report is in {path}")
        self._stack.close()

    # Called by ``launch``.

    def attend(self, supervisor: Supervisor, restart: str = "") -> None:
        """Observe an attempt to run the job.

        Args:
            supervisor: the attempt's supervisor.
            restart: why there is another attempt; empty for the first one.
        """
        with self._lock:
            self._supervisor = supervisor
            supervisor.job_observers = self
            if self._observatory is not None:
                for worker in self._placed.values():
                    self._observatory.worker(worker.rank, "starting")
            for each in (self._placed, self._pids, self._ends, self._hosts):
                each.clear()
        if restart:
            self.event("state", restart)

    def conclude(self, outcome: JobOutcome, message: str) -> None:
        """End the job; if it did not succeed, ``message`` says in a line what failed."""
        stopped, first = outcome.interrupted is not None, outcome.first
        causes = None if first is None and not stopped else [] if first is None or first.rank is None else [first.rank]
        self._conclude(outcome.exit_code, message, stopped=stopped, causes=causes)

    def subscribe(self) -> Subscription | None:
        """Subscribe to news of the job; None as long as it has no observers, or no worker has reported anything."""
        return None if self._observatory is None else self._observatory.subscribe()

    def tick(self) -> float | None:
        """Do what is due, in each turn of the supervisor's loop; return the time of the next call."""
        if not self._serving:
            # Not earlier: an agent on this machine is forked from this process, which must have one thread until then.
            self._serving = True
            self._serve()
        if self._place_at is not None and time.monotonic() >= self._place_at:
            self._place()
        if self._traces is not None:
            self._traces.tick()
        deadline = None if self._traces is None else self._traces.deadline
        return min((when for when in (self._place_at, deadline) if when is not None), default=None)

    def event(self, kind: str, text: str) -> None:
        """Record an event. Safe in any thread."""
        if self._observatory is not None:
            self._observatory.event(kind, text)

    def output(self, number: int, stream: int, data: bytes) -> None:
        """Take a worker's output."""
        if self._public and self._observatory is not None:
            worker = self._placed.get(number)
            self._observatory.output(number if worker is None else worker.rank, stream, data)

    # Called by the supervisor: see ``JobObservers``.

    def host(self, name: str, state: str, reason: str = "") -> None:
        """Record that a host is "up", is "left out" for the time being, was "lost", or has "left" the job."""
        with self._lock:
            self._hosts[name] = state
            if self._observatory is not None:
                self._observatory.host(name, state)
        if reason:
            self.event("host", f"host {name}: {reason}")
        if state != "up" and self._traces is not None:
            self._traces.host_lost()

    def placed(self, epoch: int, workers: Sequence[PlacedWorker]) -> None:
        """Record the workers that form an epoch of the job."""
        with self._lock:
            self._epoch = epoch
            self._placed = {worker.number: worker for worker in workers}
            self._place()

    def spawned(self, number: int, pid: int) -> None:
        """Record the process of a worker that was started."""
        with self._lock:
            self._pids[number] = pid
        if self._place_at is None and number in self._placed:
            self._place_at = time.monotonic() + _GATHER

    def ended(self, number: int, status: int | None, reason: str) -> None:
        """Record the end of a worker."""
        state = "lost" if status is None else "failed" if status and reason else "ended"
        with self._lock:
            self._ends[number] = state, reason
            self._report_end(number)

    def reported(self, host: str, frame: Frame) -> None:
        """Take an agent's observations of its host, or its workers' traces."""
        if isinstance(frame, Observed):
            self._observed(host, frame)
        elif self._traces is not None and isinstance(frame, Tracing | Traced):
            self._traces.handed_in(host, frame)

    # Inside.

    def _observed(self, host: str, frame: Observed) -> None:
        from hvdgloo._observe.samples import CODEC

        observatory = self._made()
        for data in frame.observations:
            try:
                observation = CODEC.decode(data)
            except ValueError:
                continue  # any process of this user can send datagrams there
            observatory.observe(host, observation)

    def _made(self) -> Observatory:
        """Return the observatory, made with what is known already. Safe in any thread."""
        with self._lock:
            if self._observatory is not None:
                return self._observatory
        # Without the lock: imports and a look at what is installed take long, and the supervisor has agents to hear.
        from hvdgloo._observe.observatory import Observatory

        versions = _versions() if self._public else {"hvdgloo": __version__}
        with self._lock:
            if self._observatory is None:
                rules = None if self._spec.elastic is None else self._spec.elastic.rules
                self._observatory = Observatory(
                    job=self._id,
                    command=self._views.title,
                    started=self._started,
                    versions=versions,
                    least=None if rules is None else rules.smallest,
                    most=None if rules is None else rules.largest,
                )
                self._place()
                for name, state in self._hosts.items():  # after their ranks, which shows them as up
                    self._observatory.host(name, state)
                if self._serving:
                    self._begin(self._observatory)
            return self._observatory

    def _begin(self, observatory: Observatory) -> None:
        observatory.start()
        self._stack.callback(observatory.close)

    def _place(self) -> None:
        with self._lock:
            self._place_at = None
            if self._observatory is None or not self._placed:
                return
            workers = [
                (worker.rank, worker.host, worker.local_rank, self._pids.get(number, 0))
                for number, worker in self._placed.items()
            ]
            self._observatory.placed(self._epoch, workers)
            for number in self._ends:
                self._report_end(number)

    def _report_end(self, number: int) -> None:
        worker = self._placed.get(number)
        if self._observatory is not None and worker is not None:
            state, reason = self._ends[number]
            self._observatory.worker(worker.rank, state, reason)

    def _listen(self) -> None:
        """Have a socket for ``hvdgloo-run top``, and with ``--page`` an address for browsers."""
        from hvdgloo._observe import jobs
        from hvdgloo._observe.page.page import Page
        from hvdgloo.rendezvous._auth import control_token, status_token
        from hvdgloo.rendezvous._page_server.server import PageServer

        page = self._views.page
        try:
            folder = runtime_folder(self._spec.environ)
            path = jobs.socket_path(folder, self._id)
        except ConfigError:
            folder = path = ""  # ``top`` does not find the job, which runs all the same
        if page is None and not path:
            return
        if self._views.control:
            from hvdgloo.runner.observing.traces import Traces

            self._traces = Traces(self._order, lambda text: self.event("trace", text))
            self._stack.callback(self._traces.close)
        address, port = page or ("", 0)
        tls = self._spec.config.tls_files
        if tls is not None:
            from hvdgloo._net.tls import Tls
        server = PageServer(
            Page(self._observatory or self._looked_at, self._traces),
            secret=self._spec.secret,
            addresses=() if page is None else (address,),
            port=port,
            unix=path,
            tls=None if page is None or tls is None else Tls(*tls),
        )
        server.listen()
        self._server = server
        self._stack.callback(server.stop)
        if path:
            secret = self._spec.secret
            job = jobs.JobFile(
                id=self._id,
                pid=os.getpid(),
                command=self._views.title,
                started=self._started,
                unix=path,
                address=server.address if page is not None else "",
                token=status_token(secret),
                control="" if self._traces is None else control_token(secret),
            )
            with suppress(ConfigError):  # it is only not found
                self._stack.enter_context(jobs.published(job, folder))
        if page is not None:
            link = server.link()
            if self._views.show_link is not None:
                self._views.show_link(link)
            else:
                self._say(f"the job's page is at {link}")

    def _serve(self) -> None:
        with self._lock:
            if self._observatory is not None:
                self._begin(self._observatory)
        if self._views.page is None:
            # Its modules are imported while agents start, so no job starts later for it.
            with suppress(ConfigError):
                self._listen()
            if self._server is not None:
                self._server.start_on_demand()
            return
        # The server takes long to import, and the supervisor must show agents that it is alive.
        thread = threading.Thread(target=self._start, name="hvdgloo-page-start", daemon=True)
        thread.start()
        self._stack.callback(thread.join)

    def _start(self) -> None:
        assert self._server is not None
        try:
            self._server.start()
        except Exception as error:  # noqa: BLE001 - nothing waits for this thread, and the job goes on without a page
            self._say(f"the page cannot be served: {type(error).__name__}: {error}")

    def _looked_at(self) -> Observatory:
        """Return the observatory for the first visitor, and have agents observe. Called on the server's thread."""
        with self._lock:
            self._public = True
            self.observe = Observe(host=True)
        observatory = self._made()
        with self._lock:
            supervisor = self._supervisor
        if supervisor is not None:
            supervisor.observe_soon(self.observe)
        return observatory

    def _order(self, frame: TraceSteps) -> int:
        """Have all workers trace; return the number of their hosts. Called on any thread."""
        with self._lock:
            supervisor = self._supervisor
            hosts = {worker.host for number, worker in self._placed.items() if number not in self._ends}
            hosts = {host for host in hosts if self._hosts.get(host) == "up"}
        if supervisor is None or not hosts or self._over:
            return 0
        supervisor.trace_soon(frame)
        return sum(state == "up" for state in self._hosts.values())

    def _conclude(self, exit_code: int, message: str, *, stopped: bool, causes: Collection[int] | None = None) -> None:
        if self._over:
            return
        self._over = True
        if self._observatory is None:
            return
        if self._place_at is not None:
            self._place()
        self._observatory.ended(exit_code, message, stopped=stopped, causes=causes)
        if self._views.report is not None:
            try:
                from hvdgloo._observe.page import report

                os.makedirs(os.path.dirname(os.path.abspath(self._views.report)), exist_ok=True)
                self.written = report.write(self._observatory, self._views.report)
            except OSError as error:
                self._not_written(error.strerror or str(error))
            except Exception as error:  # noqa: BLE001 - the job is over, and its result does not depend on the report
                self._not_written(in_one_line(f"{type(error).__name__}: {error}"))

    def _not_written(self, reason: str) -> None:
        self.unwritten.append(f"--report {self._views.report}: {reason}")
        self._say(f"--report {self._views.report}: it cannot be written: {reason}")


def _check_report(path: str) -> None:
    """Check before the job that its report can be written.

    Raises:
        ConfigError: it cannot.
    """
    from hvdgloo._observe.page import report

    # A path that names no file counts as it is: a/ does not mean a/.html.
    for name in (path,) if os.path.basename(path) in ("", ".", "..") else report.paths(path):
        if problem := why_not_replaceable(name):
            which = "" if name == path else f"{name}: "
            raise ConfigError(f"--report {path or repr(path)}: it cannot be written: {which}{problem}")


def progress_display(spec: LaunchSpec, job_observer: JobObserver, console: Console) -> LiveDisplay | None:
    """Return the display of a job's progress once it has started; None if it is not wanted."""
    if not job_observer.progress:
        return None
    from hvdgloo.runner.observing.progress import RunProgress

    never = Backoff(time.monotonic(), math.inf)
    return LiveDisplay(RunProgress(job_observer.subscribe), console, never, environ=spec.environ)


def _status(error: BaseException) -> int:
    """Return the exit status for an error."""
    if isinstance(error, JobFailedError):
        return error.exit_code
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _versions() -> dict[str, str]:
    """Return the versions of the frameworks that are installed next to this launcher."""
    import platform
    from importlib import metadata

    found = {"hvdgloo": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
