"""Observatory of a job: collects everything that is reported about it, for all readers. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType

from hvdgloo._observe import view
from hvdgloo._observe.model import Model
from hvdgloo._observe.samples import HostSample, Lateness, Observation, Sample
from hvdgloo._platform.spelling import encodable

_TICK = 1.0
_MISSED = 120  # updates that a reader may be behind before it gets a snapshot


class Observatory:
    """State of a job, as its ranks, hosts and launcher report it.

    Readers see changes once a second, in ``tick``, which a thread of its own calls between ``start`` and ``close`` (or
    in a ``with`` block); it sleeps while nothing comes in and nothing happens in the job. Memory is bounded, however
    long the job runs and whatever its ranks report. All text is made ``encodable`` as it comes in, so that every reader
    can have it as JSON.

    Args:
        job: its id, without meaning.
        command: the command as the user typed it, without secrets.
        started: start of the job, in seconds since 1970.
        versions: package to version.
        least, most: bounds on the number of ranks of an elastic job; both None for a job of fixed size.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        *,
        job: str,
        command: str,
        started: float,
        versions: Mapping[str, str],
        least: int | None = None,
        most: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._fed = threading.Condition(self._lock)
        self._told = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._model = Model(
            view.Job(
                job,
                encodable(command),
                started=started,
                now=started,
                least=least,
                most=most,
                versions={package: encodable(version) for package, version in versions.items()},
            )
        )
        self._revision = 0
        self._updates: deque[view.Update] = deque(maxlen=_MISSED)
        self._thread: threading.Thread | None = None

    # What comes in.

    def observe(self, host: str, observation: Observation) -> None:
        """Take an observation of a rank or a host; ``host`` is its trusted origin.

        After ``placed``, a host is believed only about its own ranks. Observations of earlier epochs are ignored.
        """
        with self._lock:
            self._model.observe(encodable(host), observation, self._clock())
            self._fed.notify()

    def placed(self, epoch: int, seats: Iterable[tuple[int, str, int, int]]) -> None:
        """Set the ranks: (rank, host, local rank, pid), pid 0 if it is not known yet. Replaces earlier ones."""
        with self._lock:
            self._model.placed(epoch, ((rank, encodable(host), local, pid) for rank, host, local, pid in seats))
            self._fed.notify()

    def worker(self, rank: int, state: str, reason: str = "") -> None:
        """Record the state of a rank's process: "starting", "running", "ended", "failed" or "lost".

        Args:
            reason: reason for the last two, which make an event, such as "was killed by signal 9 (SIGKILL)".
        """
        with self._lock:
            self._model.worker(rank, state, encodable(reason), self._clock())
            self._fed.notify()

    def host(self, name: str, state: str) -> None:
        """Record the state of a host: "up", "left out", "lost" (with its ranks) or "left".

        A change makes an event, except "left out", whose caller reports it with the reason.
        """
        with self._lock:
            self._model.host(encodable(name), state, self._clock())
            self._fed.notify()

    def event(self, kind: str, text: str, rank: int = -1, more: str = "") -> None:
        """Record an event; see ``view.Event``."""
        with self._lock:
            self._model.event(kind, encodable(text), rank, encodable(more), self._clock())
            self._fed.notify()

    def output(self, rank: int, stream: int, data: bytes) -> None:
        """Take what a rank wrote to its standard output (1) or standard error (2), in pieces as they arrive."""
        with self._lock:
            self._model.write(rank, stream, data, self._clock())
            self._fed.notify()

    def starting(self, text: str) -> None:
        """Set the line that says what the job's start waits for, until the job runs."""
        with self._lock:
            self._model.starting(encodable(text))
            self._fed.notify()

    def ended(
        self, exit_code: int, message: str = "", *, stopped: bool = False, causes: Collection[int] | None = None
    ) -> None:
        """End the job, which readers see at once.

        Args:
            exit_code: 0 if it succeeded.
            message: what failed, if anything did.
            stopped: the user stopped it, which is no failure.
            causes: the ranks that made it fail, as opposed to those that failed because of it; None if they are not
                known.
        """
        with self._lock:
            self._model.ended(exit_code, encodable(message), self._clock(), stopped=stopped, causes=causes)
        self.tick()

    # What goes out.

    @property
    def revision(self) -> int:
        """Number of changes so far that readers can see."""
        with self._lock:
            return self._revision

    def snapshot(self, *, curves: bool = True) -> view.Snapshot:
        """Return everything that there is to see, as of ``revision``. The lists in it must not be changed.

        Args:
            curves: fill in ``series`` and ``heat``, which are most of it.
        """
        with self._lock:
            return self._model.snapshot(self._clock(), curves=curves)

    def subscribe(self, after: int | None = None) -> Subscription:
        """Subscribe to changes: after a first snapshot, or after a revision that the reader already knows, if that is
        recent.
        """
        return Subscription(self, after)

    def series(self, rank: int) -> view.Series:
        """Return the curves of one rank.

        Raises:
            KeyError: there is no such rank.
        """
        with self._lock:
            return self._model.series_of(rank)

    def lines(
        self, rank: int | None = None, after: int = 0, before: int | None = None, search: str = "", limit: int = 500
    ) -> list[view.OutputLine]:
        """Return the last lines that ranks wrote; see ``Output.lines``."""
        with self._lock:
            return self._model.output.lines(rank, after, before, search, limit)

    def samples(self) -> list[tuple[str, Sample]]:
        """Return (host, latest sample) of each rank that has a sample."""
        with self._lock:
            return self._model.samples()

    def waiting(self, least: float) -> dict[int, str]:
        """Return the operation that each rank waits for, empty for a rank that does not wait; an empty dict if no rank
        has waited ``least`` seconds for others.
        """
        with self._lock:
            return self._model.waiting(least, self._clock())

    def host_samples(self) -> dict[str, HostSample]:
        """Return the latest sample of each host."""
        with self._lock:
            return self._model.host_samples()

    def lateness(self) -> Lateness | None:
        """Return the lateness of ranks, as rank 0 last reported it; None if it has not."""
        with self._lock:
            return self._model.lateness()

    # Time.

    def tick(self) -> None:
        """Bring what readers see up to date."""
        with self._lock:
            update = self._model.tick(self._clock())
            if update is not None:
                self._updates.append(update)
                self._revision += 1
                self._told.notify_all()

    def start(self) -> None:
        """Begin to tick on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="hvdgloo-observatory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End that thread and every wait in ``Subscription.next``; everything can still be read."""
        with self._lock:
            self._closing.set()
            self._fed.notify_all()
            self._told.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Observatory:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._closing.is_set():
            with self._lock:
                self._fed.wait_for(lambda: self._closing.is_set() or not self._model.still)
            self.tick()
            now = time.monotonic()
            due = max(due + _TICK, now)  # what a tick takes does not make the next one later
            self._closing.wait(due - now)

    def _since(self, revision: int | None, timeout: float) -> tuple[int, view.Update | view.Snapshot | None]:
        """Return the next value for a reader that knows ``revision`` (None: nothing), and the revision after it."""
        with self._lock:
            if revision is None:
                return self._revision, self._model.snapshot(self._clock())
            self._told.wait_for(lambda: self._closing.is_set() or self._revision != revision, timeout)
            if self._revision == revision:
                return revision, None
            behind = self._revision - revision
            if 0 < behind <= len(self._updates):
                return revision + 1, self._updates[-behind]
            return self._revision, self._model.snapshot(self._clock())


class Subscription:
    """One reader's position among the updates, for one thread. It costs nothing while it is not read, and need not be
    closed; ``with`` is allowed.
    """

    def __init__(self, observatory: Observatory, after: int | None) -> None:
        self.revision = after
        """Revision that ``next`` last returned; None before that."""
        self._observatory = observatory

    def next(self, timeout: float = 0.0) -> view.Update | view.Snapshot | None:
        """Return the next update, or a snapshot at first and for a reader that is too far behind; None if there is
        nothing new within ``timeout`` seconds, or the observatory was closed. All readers get the same value, which
        must not be changed.
        """
        self.revision, value = self._observatory._since(self.revision, timeout)
        return value

    def waiting(self, least: float) -> dict[int, str]:
        """Return what each rank waits for; see ``Observatory.waiting``."""
        return self._observatory.waiting(least)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
