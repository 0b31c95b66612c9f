"""A worker's membership in an elastic job: from epoch to epoch in one process, each with a Context of its own.

The rendezvous server decides who is in an epoch (``hvdgloo.rendezvous._elastic``); what happens here follows from its
answers::

    init()  ->  begin()   a place in the first epoch, or word that others are in training: then the Context has
                          one rank, with the place that this worker will probably get
    run()   ->  enter()   a place, in any case
    a failure, or a change of hosts
            ->  again()   the Context is closed, and the next one opened

A worker that cannot be connected in an epoch reports it, and asks for the next one; the server then voids the epoch,
and its news end the waits of all others. News come by a long poll, on a thread that sleeps otherwise. They also end an
epoch whose members cannot notice themselves that it is over, since a host has vanished without a word.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdgloo._engine.engine import Engine
from hvdgloo._job.context import Context
from hvdgloo._job.control_plane import World
from hvdgloo._job.participant import Participant, check_addresses
from hvdgloo._job.single_rank import ProvisionalEngine, open_single_rank
from hvdgloo._net.descriptors import close_keeping_numbers
from hvdgloo._net.ports import PortHold, hold_free_port
from hvdgloo._platform.spelling import followed_by
from hvdgloo.errors import (
    AuthenticationError,
    ConfigError,
    ConnectError,
    DismissedError,
    HorovodInternalError,
    PeerLostError,
    RendezvousError,
    RendezvousRefusedError,
    StallError,
)
from hvdgloo.rendezvous import Alone, ElasticClient, News, Placement

logger = logging.getLogger(__name__)

_POLL_SECONDS = 40.0
"""A server that was restarted learns at the next poll where this worker is."""

_PAUSE = 1.0
"""Seconds until the next attempt to hear news, if the server cannot be reached."""

_LISTENER_SECONDS = 5.0
"""Seconds that the end of a membership waits for a listener, which is the program's own code and may block."""

_MORE_SECONDS = 60.0
"""Seconds that a worker waits for an answer after the server's own deadline: the server knows which worker is late."""


@dataclass(frozen=True)
class _Why:
    """A worker's report about the epoch that it leaves; see ``ElasticClient.next_epoch``.

    Attributes:
        since: when it began to wait for others, on the monotonic clock.
    """

    error: str = ""
    accused: tuple[int, ...] = ()
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, error: BaseException | None) -> _Why:
        """Return why an error ended the epoch, and which ranks are to blame; None stands for a change of hosts."""
        if error is None:
            return cls()
        accused: Sequence[int | None] = ()
        if isinstance(error, ConnectError):
            accused = (error.rank, *error.missing)
        elif isinstance(error, PeerLostError):
            accused = (error.rank,)
        elif isinstance(error, StallError):
            accused = error.missing
        text = str(error) or type(error).__name__
        now = time.monotonic()
        since = min(now, error.waiting_since) if isinstance(error, HorovodInternalError) else now
        return cls(text.splitlines()[0], tuple(sorted({rank for rank in accused if rank is not None})), since)


class Membership:
    """One worker's membership. One thread at a time may call, unless something else is said.

    Args:
        participant: to the rendezvous server, which is left when the membership ends.

    Attributes:
        placement: in the current epoch; None while this worker is alone.
        context: the current one; of the last epoch while the next is formed.
        is_new: it had no Context before.
        master: where the program's own torch.distributed may meet, if rank 0 has said so.
        launched: a launcher has started this worker, and sees how it ends.
    """

    def __init__(self, participant: Participant) -> None:
        self.config = config = participant.config
        self.placement: Placement | None = None
        self.context: Context | None = None
        self.is_new = True
        self.launched = bool(config.job_id)
        self.master: tuple[str, int] | None = None
        self._sets: Sequence[Sequence[int]] = ()
        self._install: Callable[[Context], None] = lambda _: None
        self._participant = participant
        self._client = ElasticClient(
            participant.client, config.worker or secrets.token_hex(8), patience=config.start_timeout
        )
        self._epoch = -1  # the last one that this worker was told of
        self._is_in = False  # elastic.run
        self._has_finished = False
        self._serial = -1
        self._hold: PortHold | None = None
        self._listener: Callable[[int], None] | None = None
        self._news = News(0, 0, 0, -1, "")
        self._closed = threading.Event()
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._listen, name="hvdgloo-news", daemon=True)
        self._thread.start()
        _MEMBERSHIPS.add(self)

    def adopt(self, process_sets: Sequence[Sequence[int]], install: Callable[[Context], None]) -> None:
        """Prepare each Context from now on.

        Args:
            process_sets: the ranks of those that ``install`` adds, the same on all members.
            install: called with each new Context, before any other code gets it.
        """
        self._sets, self._install = process_sets, install

    @property
    def worker(self) -> str:
        """This process's id in the job."""
        return self._client.worker

    def begin(self) -> Context:
        """Become a member of the next epoch, or work alone if others are in training, as in ``init()``.

        Raises:
            DismissedError: this worker is in no further epoch.
            RendezvousError: the server cannot be reached.
            HvdglooError: a setting cannot be used, or something is missing.
        """
        self._next(_Why(), ready=self._is_in)
        assert self.context is not None
        return self.context

    def enter(self) -> Placement:
        """Enter ``elastic.run``: return the place in an epoch, after a wait for it if this worker was alone so far.

        In the same epoch a second time, it cannot be known who has the state of this run: rank 0 is the root, then.

        Raises:
            as ``begin``.
        """
        placement = self.placement
        if placement is None:
            self._is_in = True
            self._close_context("")
            placement = self._next(_Why(), ready=True)
            assert placement is not None  # the server's answer to one that is ready
        elif self._is_in:
            placement = replace(placement, root=0, everyone=False, new=frozenset(range(placement.topology.size)))
        self._is_in = True
        return placement

    def again(self, serial: int, digest: str, error: BaseException | None) -> Placement:
        """Leave the epoch, and wait for a place in the next one, connected with its members.

        Args:
            serial, digest: of the newest commit; see ``ElasticClient.next_epoch``.
            error: why; None if a change of hosts is the reason.

        Raises:
            as ``begin``.
        """
        why = _Why.of(error)
        self._serial = serial
        self._close_context(why.error)
        placement = self._next(why, ready=True, digest=digest)
        assert placement is not None
        return placement

    def synced(self) -> None:
        """Record that this worker has the state of its epoch.

        Raises:
            RendezvousError: the server cannot be reached.
        """
        self._serial = max(self._serial, 0)
        self._client.synced(self._epoch)

    def finished(self) -> None:
        """Record that training is complete, so that there is no further epoch, even if the server cannot be told."""
        self._has_finished, self._is_in = True, False
        try:
            self._client.finished()
        except RendezvousError as error:
            logger.warning("the end of training could not be reported: %s", error)

    def listen(self, listener: Callable[[int], None] | None) -> None:
        """Have a function called, on the thread that hears news, with each change that is announced; see ``update``."""
        self._listener = listener

    def update(self) -> tuple[int, int]:
        """Return what would change at this moment, without asking the server; any thread may call.

        Returns:
            a number that grows with each change of this, and the sum of 1 if workers are removed and 2 if workers are
            added; 0 for nothing.
        """
        news = self._news
        return news.serial, news.update if news.epoch == self._epoch else 0

    def leaving(self) -> None:
        """Announce that this worker will end soon, and wants to leave at the next commit. Any thread may call.

        Raises:
            RendezvousError: the server cannot be reached.
        """
        self._client.leaving()

    def close(self, reason: str = "") -> None:
        """End the membership, with this process.

        Args:
            reason: the error that it ends with; empty if its work is done.
        """
        if self._closed.is_set() or os.getpid() != self._owner:
            return
        if not reason and self.placement is not None and not self._is_in and not self._has_finished:
            # A program that never enters elastic.run ends well without reporting it, and its status may go unseen.
            self.finished()
        self._closed.set()
        self._close_context(reason)
        self._participant.client.close()
        self._thread.join(_LISTENER_SECONDS)

    # Epochs.

    def _next(self, why: _Why, *, ready: bool, digest: str = "") -> Placement | None:
        """Ask for an epoch until one comes about; its Context is the current one then.

        Returns:
            the place in it; None if this worker works alone.
        """
        while True:
            with self._listening() as listener:
                answer = self._ask(why, listener, ready=ready, digest=digest)
                if isinstance(answer, Alone):
                    engine = open_single_rank(self.config, ProvisionalEngine, counters=self._participant.counters)
                    self._take(Context(self.config, engine.topology, 0, engine, plan=answer))
                    return None
                self.placement, self._epoch = answer, answer.topology.epoch
                try:
                    self._check_addresses(answer)
                    context = self._connect(answer, listener)
                except RendezvousRefusedError:
                    raise
                except (HorovodInternalError, RendezvousError, AuthenticationError) as error:
                    # What the ranks say to each other while they connect is gone with a server that is restarted.
                    if isinstance(error, AuthenticationError) and not error.restarted:
                        raise
                    logger.info("epoch %d has not come about: %s", self._epoch, error)
                    why = _Why.of(error)
                    self._release_port()
                    continue
            try:
                self._take(context)
                self._client.up(self._epoch)
            except HorovodInternalError as error:  # while init()'s process sets were added
                self._close_context(str(error))
                why = _Why.of(error)
                continue
            return answer

    def _listening(self) -> socket.socket:
        """Listen for others, in case this worker becomes rank 0. Between epochs this host's ports may be taken, or its
        address gone, for a while.

        Raises:
            ConfigError: this worker cannot listen. It would not be able to in the next epoch, either.
        """
        deadline = time.monotonic() + (self.config.elastic_timeout if self.context is not None else 0.0)
        while True:
            try:
                return self._participant.listen()
            except ConnectError as error:
                if time.monotonic() >= deadline or self._closed.is_set():
                    raise ConfigError(str(error)) from error
                logger.warning("%s", followed_by(error, f"trying again for up to {deadline - time.monotonic():g} s"))
            self._closed.wait(min(_PAUSE, max(0.0, deadline - time.monotonic())))

    def _ask(self, why: _Why, listener: socket.socket, *, ready: bool, digest: str) -> Placement | Alone:
        rank = None if self.placement is None else self.placement.rank
        try:
            return self._client.next_epoch(
                self._epoch,
                self._participant.info(rank, listener.getsockname()[1]),
                ready=ready,
                serial=self._serial,
                digest=digest,
                error=why.error,
                accused=why.accused,
                stood=time.monotonic() - why.since,
                timeout=2 * self.config.elastic_timeout + self.config.start_timeout + _MORE_SECONDS,
            )
        except DismissedError as error:
            if error.fate == "over" and self._epoch < 0:  # it arrived too late, and nothing failed
                raise DismissedError(str(error), fate="removed") from None
            raise

    def _check_addresses(self, placement: Placement) -> None:
        """Refuse addresses that cannot be used together: that is the end of the new workers to blame, not of the job.

        Raises:
            ConfigError: this worker is to blame, or no new worker is.
            ConnectError: other, new workers are to blame.
        """
        try:
            check_addresses(placement.topology, self._participant.reached_from)
        except ConfigError as error:
            unfit = [] if placement.fresh else self._unfit(placement)
            if placement.rank in unfit or not unfit:
                raise
            logger.warning("%s", followed_by(error, "this job goes on without such workers, which have just come"))
            raise ConnectError(str(error), missing=unfit) from error

    def _unfit(self, placement: Placement) -> list[int]:
        """Return the new members whose addresses the old ones cannot use; all if new ones cannot use each other's."""
        new, unfit = sorted(placement.new), []
        old = [rank for rank in range(placement.topology.size) if rank not in placement.new]
        for rank in new:
            try:
                check_addresses(placement.topology.restricted(sorted([*old, rank])), self._participant.reached_from)
            except ConfigError:
                unfit.append(rank)
        return unfit or new

    def _connect(self, placement: Placement, listener: socket.socket) -> Context:
        rank, topology = placement.rank, placement.topology
        epoch, first = topology.epoch, topology.workers[0]
        config = replace(self.config, epoch=epoch)
        world = World(rank, topology, f"{epoch}.0", 0, (first.address, first.port), scope=self._client.scope(epoch))
        engine: Engine
        engine, decided = self._participant.open(
            world,
            listener,
            self._sets,
            told=lambda: self._tell_master(placement),
            cancelled=lambda: self._news.voided >= epoch or self._closed.is_set(),
        )
        host, port = decided.get("master", ("", 0))
        self.master = (str(host), int(port)) if port else None
        clock_offset = decided["clock_offset"]
        reporting = self._participant.report(engine, clock_offset)
        return Context(
            config, topology, rank, engine, clock_offset=clock_offset, world=decided["world"], reporting=reporting
        )

    def _tell_master(self, placement: Placement) -> dict[str, Any]:
        """On rank 0: where the program's own torch.distributed may meet. A launcher has said so for the first epoch."""
        if placement.fresh and self.launched:
            return {}
        try:
            hold = hold_free_port(self.config.port_range)
        except ConfigError as error:
            logger.debug("%s", error)
            return {}
        self._hold = hold
        return {"master": [placement.topology.workers[0].address, hold.port]}

    def _take(self, context: Context) -> None:
        """Make a new Context the current one."""
        traced = None if self.context is None else self.context.traced
        self.context = context
        try:
            if traced is not None:
                context.start_timeline(*traced)
            self._install(context)
            self.is_new = False
        except HorovodInternalError:
            raise
        except BaseException:
            context.close()
            raise
        self._end_if_void(self._news)

    def _close_context(self, reason: str) -> None:
        if self.context is not None and not self.context.closed:
            self.context.close(reason)
        self._release_port()

    def _release_port(self) -> None:
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    # News.

    def _listen(self) -> None:
        """Hear news, on a thread of its own, as long as this worker belongs to the job."""
        number = -1
        while not self._closed.is_set():
            try:
                news = self._client.news(number, timeout=_POLL_SECONDS)
            except AuthenticationError as error:
                logger.debug("no more news: %s", error)
                return
            except (RendezvousError, ValueError) as error:  # the latter is about what the server has said
                logger.debug("no news: %s", error)
                self._closed.wait(_PAUSE)
                continue
            announced = news.serial != self._news.serial
            number, self._news = news.number, news
            self._end_if_void(news)
            listener, flags = self._listener, self.update()[1]
            if announced and flags and listener is not None:
                try:
                    listener(flags)
                except Exception:  # the program's own code: it must not keep this worker from further news
                    logger.exception("what listens to changes of the job's hosts has failed")

    def _end_if_void(self, news: News) -> None:
        """End the current epoch's engine if the server has found that the epoch is over."""
        context = self.context
        if context is None or context.closed or context.plan is not None or context.topology.epoch > news.voided:
            return
        if context.engine.error is None:
            context.engine.abort(PeerLostError(f"the epoch is over: {news.reason}"))

    def _after_fork_in_child(self) -> None:
        """Close the connection in a forked child: one that stayed open would hide this worker's end from the server."""
        close_keeping_numbers(self._participant.client.descriptors)


_MEMBERSHIPS: weakref.WeakSet[Membership] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for membership in list(_MEMBERSHIPS):
        membership._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
