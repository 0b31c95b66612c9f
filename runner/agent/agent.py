"""The process on each host of a job: ``python -m hvdgloo.runner.agent``, with frames on its standard input and output.

The agent starts this host's workers, passes on their output, and ends them all when the job is over, on request, or
when the launcher is lost: the end of the stream is an order to die, and so is a long silence of a launcher on another
host.

There are two processes. The watchdog (``watchdog``) forks before anything else, adopts every orphan below it, and
waits. However the agent proper ends, the watchdog then ends the rest of the job and closes the stream.

The agent proper has one thread and one selector, and never blocks.
"""

from __future__ import annotations

import errno
import math
import os
import select
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import IO, Any

from hvdgloo._net.descriptors import reserve_descriptors
from hvdgloo._net.event_loop import EventLoop
from hvdgloo._net.ports import loopback
from hvdgloo._platform import machine
from hvdgloo.errors import ConfigError, LaunchError
from hvdgloo.runner.agent import watchdog
from hvdgloo.runner.agent.foreign_mpi import ForeignMpiWatch
from hvdgloo.runner.agent.observing import Observing
from hvdgloo.runner.agent.preflight import lacking
from hvdgloo.runner.agent.probes import HostDiscovery
from hvdgloo.runner.agent.recorded import RecordedErrors, folder_of, remove_recorded
from hvdgloo.runner.agent.relaying import RelayListener
from hvdgloo.runner.agent.watchdog import Mark
from hvdgloo.runner.agent.worker_pipes import WorkerPipes
from hvdgloo.runner.processes import reaper
from hvdgloo.runner.processes.worker_process import WorkerProcess
from hvdgloo.runner.protocol import heartbeat
from hvdgloo.runner.protocol.channel import FrameChannel
from hvdgloo.runner.protocol.frames import (
    CHUNK,
    PREAMBLE,
    PROTOCOL,
    Beat,
    Blob,
    Cleared,
    Dying,
    Examine,
    Examined,
    Exited,
    Finish,
    Frame,
    Hello,
    Leaving,
    Require,
    Result,
    Signal,
    Spawn,
    Spawned,
    SpawnFailed,
    Start,
    Stop,
    StopWorker,
    Suspend,
    Sweep,
)
from hvdgloo.runner.protocol.heartbeat import Silence
from hvdgloo.version import __version__

PROCESS_NAME = "hvdgloo-agent"
"""Name among the processes of the host; the command line may be the launcher's, or contain a program."""

LEFTOVER_GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL for background processes, once the workers have ended."""

DRAIN_TIME = 2.0
"""Seconds to wait for the end of a pipe whose writers are all dead; it lasts longer only if a process outside the job
keeps the pipe open."""

TASK_ENDED = "its task has ended"
"""Reason for ending the workers of an agent that runs inside a task (of Spark, for example)."""

REPEATED = 1.0
"""Seconds in which a second SIGTERM counts as the same request: a signal to a process group also reaches the watchdog,
which passes it on."""

_FILES = 2  # of a worker: the ends of its pipes, except for standard input, which at most one worker has
_POLL = 0.05  # seconds between looks at a process group, whose end no signal reports

_RESULT_MARK = 1024 * 1024  # results are read from their files only while fewer bytes than this wait to be sent


class Agent:
    """The agent proper.

    Args:
        channel: to the launcher.
        mark: shared with the watchdog, which reads the agent's id from it.
        environ: the agent's own environment, for finding GPUs.
        lifeline: a descriptor whose end means that the process that started the agent has ended; None if there is none.
    """

    def __init__(self, channel: FrameChannel, mark: Mark, environ: dict[str, str], lifeline: int | None = None) -> None:
        self._channel = channel
        self._lifeline = lifeline
        self._mark = mark
        self._environ = environ
        self._watchdog_pid = os.getppid()
        self._loop = EventLoop()
        self._selector = self._loop.selector
        self._workers: dict[int, WorkerProcess] = {}
        self._by_pid: dict[int, WorkerProcess] = {}
        self._blob: IO[bytes] | None = None
        self._start: Start | None = None
        self._memory = machine.MemoryWatch()
        self._discovery = HostDiscovery(self._selector, channel.send)
        self._relay = RelayListener(self._selector, channel.send)
        self._observing = Observing(self._selector, channel)
        self._pipes = WorkerPipes(self._selector, channel, self._workers)
        self._recorded = RecordedErrors()
        self._foreign_mpi = ForeignMpiWatch(channel.send)
        self._observer: dict[str, str] = {}  # the variable that tells workers where to report
        self._last_beat = time.monotonic()
        self._step = heartbeat.FIRST / heartbeat.STEPS
        self._silence = Silence(heartbeat.BEFORE_START, self._last_beat)
        self._sign: socket.socket | None = None
        self._abandoned: Sweep | None = None
        self._suspended = False
        self._stop_deadline: float | None = None
        self._order_to_die = ""
        self._left_at: float | None = None  # when the host was asked for
        self._leaving_told = False
        self._finish = False
        self._handlers: dict[type[Frame], Callable[[Any], None]] = {
            Require: self._on_require,
            Start: self._on_start,
            Blob: self._on_blob,
            Spawn: self._on_spawn,
            Signal: self._on_signal,
            Stop: self._on_stop,
            StopWorker: self._on_stop_worker,
            Suspend: self._on_suspend,
            Finish: self._on_finish,
            Sweep: self._on_sweep,
            Examine: self._on_examine,
            Beat: lambda _: None,
            **self._discovery.handlers,
            **self._relay.handlers,
            **self._observing.handlers,
            **self._pipes.handlers,
        }

    # The loop.

    def run(self) -> None:
        """Serve until the job is over on this host."""
        self._watch_signals()
        self._selector.register(self._channel.receive_fd, selectors.EVENT_READ, self._on_readable)
        if self._lifeline is not None:
            self._selector.register(self._lifeline, selectors.EVENT_READ, self._on_lifeline)
        self._channel.send(self._hello())
        while not self._over():
            self._turn(self._patience())
            self._reap()
            self._send_results()
            self._forget()
            self._discovery.tick()
            self._observing.tick()
            self._foreign_mpi.tick()
            self._keep_time()
        self._end()

    def _over(self) -> bool:
        """Tell whether every worker has ended, and so have the processes around them that were granted time to end."""
        if not (self._finish or self._order_to_die):
            return False
        if any(worker.running or not self._told(worker) for worker in self._workers.values()):
            return False
        if self._stop_deadline is None or time.monotonic() >= self._stop_deadline:
            return True
        return not any(worker.group_lives() for worker in self._workers.values())

    def _told(self, worker: WorkerProcess) -> bool:
        return worker.reported or bool(self._order_to_die)

    def _patience(self) -> float:
        deadline = self._last_beat + self._step
        if not self._order_to_die:
            deadline = min(deadline, self._silence.deadline)
        for part in (self._discovery, self._observing, self._foreign_mpi):
            if part.deadline is not None:
                deadline = min(deadline, part.deadline)
        left = max(0.0, deadline - time.monotonic())
        # The end of a process inside a worker's process group shows only by polling, unless the agent adopted it.
        stopping = self._stop_deadline is not None or any(w.kill_at is not None for w in self._workers.values())
        return min(left, _POLL) if stopping else left

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._channel.lost:
            self._die("the launcher has ended")
        elif self._suspended:
            self._silence.heard(now)
        elif self._silence.over(now):
            self._judge_silence(now)
        if now - self._last_beat >= self._step:
            self._last_beat = now
            self._channel.beat()
        if self._left_at is not None and not self._leaving_told:
            self._leaving_told = True
            self._channel.send(Leaving())
        for worker in self._workers.values():
            worker.kill_if_late(now)
        if self._stop_deadline is not None and now >= self._stop_deadline:
            for worker in self._workers.values():
                if worker.running:
                    worker.kill_overdue()

    def _judge_silence(self, now: float) -> None:
        """Decide whether a silent launcher is lost. If its machine still acknowledges our data, it has not ended: a
        long call of the user's program, for example, keeps its interpreter from sending heartbeats."""
        ago, limit = self._channel.unanswered(), self._silence.timeout
        if ago < limit:
            self._silence.heard(now, ago)
        else:
            self._die(
                f"the launcher has been silent for {limit:g} s: its machine is cut off, switched off or overloaded, or "
                "one long call keeps its interpreter; in the last two cases, raise --heartbeat-timeout, or "
                "heartbeat_timeout= of run()"
            )

    def _watch_writes(self) -> None:
        self._loop.watch_writes(self._channel, wanted=self._channel.pending > 0 and not self._channel.lost)

    def _watch_signals(self) -> None:
        signal.set_wakeup_fd(self._loop.wake_up.writing_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        # A signal to the agent, or the end of the watchdog, ends the job on this host.
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._on_deadly_signal)

    def _on_deadly_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._order_to_die:
            return
        orphaned = os.getppid() != self._watchdog_pid
        now = time.monotonic()
        by_others = not orphaned and not ended(self._lifeline)
        if signum == signal.SIGTERM and self._start is not None and self._start.elastic and by_others:
            if self._left_at is None:
                self._left_at = now
            if now - self._left_at <= REPEATED:
                return
        if ended(self._lifeline):
            self._die(TASK_ENDED)  # which is why the system has sent this signal
        else:
            self._die("its watchdog was killed" if orphaned else f"it received {signal.Signals(signum).name}")

    def _on_lifeline(self) -> None:
        assert self._lifeline is not None
        self._selector.unregister(self._lifeline)
        self._lifeline = None
        self._die(TASK_ENDED)

    # Frames.

    def _on_readable(self) -> None:
        frames = self._channel.receive()
        self._silence.heard(time.monotonic())
        if self._channel.ended:
            self._selector.unregister(self._channel.receive_fd)
        for frame in frames:
            self._handlers[type(frame)](frame)  # type: ignore[index]  # no preamble, hence no Noise

    def _hello(self) -> Hello:
        from hvdgloo.rendezvous._host_identity import host_identity, host_name

        return Hello(
            PROTOCOL,
            __version__,
            host_name(),
            host_identity(),
            os.getpid(),
            machine.usable_cores(),
            machine.visible_gpus(self._environ),
            self._discovery.port,
            os.cpu_count() or 0,
            loopback(),
        )

    def _on_require(self, required: Require) -> None:
        self._channel.send(lacking(required, self._environ))

    def _on_start(self, start: Start) -> None:
        self._start = start
        self._step = start.heartbeat_timeout / heartbeat.STEPS
        self._silence = Silence(start.launcher_timeout or math.inf, time.monotonic())
        self._sign = reaper.attend(start.agent_id)
        self._mark.write(start.agent_id)
        self._recorded.attend(start.agent_id)
        self._observer = self._observing.attend(start.agent_id, self._environ)

    def _on_blob(self, blob: Blob) -> None:
        if self._blob is None:
            self._blob = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - for as long as the agent lives
        self._blob.write(blob.data)

    def _on_spawn(self, spawn: Spawn) -> None:
        assert self._start is not None, "the launcher sends Start first"
        if self._order_to_die:
            return
        try:
            if not self._workers or self._start.elastic:
                count = max(1, self._start.workers)
                workers = f"{count} worker{'s' if count > 1 else ''}"
                reserve_descriptors(_FILES * count, "the agent on this host", f"the pipes of {workers}")
            environ = self._worker_environment(spawn.number)
            worker = WorkerProcess(spawn, environ, self._start.cwd, self._blob)
        except (OSError, ConfigError) as error:
            missing = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
            self._channel.send(SpawnFailed(spawn.number, str(error), 127 if missing else 126))
            return
        self._workers[worker.number] = self._by_pid[worker.pid] = worker
        self._pipes.read(worker)
        if not self._start.elastic:  # an elastic job waits for all of its workers to call hvd.init()
            self._foreign_mpi.started(worker, environ)
        self._channel.send(Spawned(worker.number, worker.pid))

    def _worker_environment(self, number: int) -> Mapping[str, str]:
        assert self._start is not None
        mark = {reaper.AGENT_VARIABLE: self._start.agent_id, **self._observer, **self._recorded.variables(number)}
        if not self._start.inherit:
            return {**self._start.env, **mark}
        return {**self._environ, "PWD": self._start.cwd, **self._start.env, **mark}

    def _on_signal(self, frame: Signal) -> None:
        for worker in self._workers.values():
            worker.signal_group(frame.signum)

    def _on_stop(self, stop: Stop) -> None:
        deadline = time.monotonic() + stop.grace
        if self._stop_deadline is None or deadline < self._stop_deadline:
            self._stop_deadline = deadline
        for worker in self._workers.values():
            worker.signal_group(stop.signum)

    def _on_stop_worker(self, stop: StopWorker) -> None:
        worker = self._workers.get(stop.number)
        if worker is not None:
            worker.stop(stop.signum, time.monotonic() + stop.grace)

    def _on_suspend(self, frame: Suspend) -> None:
        self._suspended = frame.suspended

    def _on_examine(self, frame: Examine) -> None:
        asked = time.time()
        from hvdgloo.runner.agent.facts import examine

        facts = examine(self._environ, frame)
        self._channel.send(Examined(facts.to_json(), asked, time.time()))

    def _on_finish(self, _: Finish) -> None:
        self._finish = True

    def _on_sweep(self, frame: Sweep) -> None:
        self._abandoned = frame
        self._finish = True

    def _die(self, reason: str) -> None:
        if self._order_to_die:
            return
        self._order_to_die = reason
        self._channel.send(Dying(reason))
        self._on_stop(Stop(signal.SIGTERM, self._start.grace if self._start else 0.0))

    # Ends.

    def _reap(self) -> None:
        """Collect workers that have ended, and adopted orphans."""
        ended: list[WorkerProcess] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            worker = self._by_pid.pop(pid, None)
            if worker is not None:
                worker.ended(status)
                ended.append(worker)
        for worker in self._workers.values():
            worker.group_lives()
        # Of several workers that ended since the last look, one that was killed by a signal is more likely to be the
        # cause than those that noticed its loss and gave up.
        for worker in sorted(ended, key=lambda worker: (worker.status or 0) >= 0):
            if self._start is not None and self._start.elastic:
                # Its data loaders, for example, would be in the way of the worker that takes its place.
                worker.stop(signal.SIGTERM, time.monotonic() + LEFTOVER_GRACE)
            if worker.result is not None:
                worker.result.seek(0)
            else:
                self._tell_end(worker)

    def _tell_end(self, worker: WorkerProcess) -> None:
        assert worker.status is not None
        worker.reported = True
        killed = worker.status == -signal.SIGKILL and not worker.killed_by_us
        account = self._memory.account(worker.pid) if killed else ""
        if worker.status > 0 and (recorded := self._recorded.error(worker.number)):
            account = f"it recorded {recorded}"
        self._channel.send(Exited(worker.number, worker.status, account, overdue=worker.overdue))

    def _send_results(self) -> None:
        for worker in self._workers.values():
            if worker.running or worker.reported or worker.result is None:
                continue
            while self._channel.pending < _RESULT_MARK and not self._channel.lost:
                data = worker.result.read(4 * CHUNK)
                if not data:
                    self._tell_end(worker)
                    break
                self._channel.send(Result(worker.number, data))

    def _forget(self) -> None:
        """Forget workers of an elastic job once nothing is left of them: any number of others may take their places."""
        if self._start is None or not self._start.elastic:
            return
        for number, worker in list(self._workers.items()):
            if worker.reported and not worker.streams and not worker.group_lives():
                worker.close()
                del self._workers[number]

    def _end(self) -> None:
        """End the rest of the job, pass on its last output, and say goodbye."""
        self._discovery.close()
        self._relay.close()
        self._observing.close()
        self._recorded.close()
        grace = 0.0 if self._order_to_die or self._stop_deadline is not None else LEFTOVER_GRACE
        left = reaper.end_all(self._leftovers, grace=grace, reap=self._reap, rest=self._serve)
        if self._abandoned is not None:
            left |= reaper.end_abandoned(self._abandoned.agent_id, self._abandoned.grace, self._serve)
            remove_recorded(folder_of(self._abandoned.agent_id))
        self._drain()
        self._channel.send(Cleared(sorted(left)))
        self._flush_out()
        for worker in self._workers.values():
            worker.close()
        if self._sign is not None:
            self._sign.close()

    def _serve(self, seconds: float) -> None:
        """Serve the launcher, above all with heartbeats, for ``seconds`` seconds."""
        until = time.monotonic() + seconds
        while True:
            self._turn(max(0.0, until - time.monotonic()))
            self._keep_time()
            if time.monotonic() >= until:
                return

    def _turn(self, patience: float) -> None:
        """Serve the descriptors that are ready; wait for one if none is."""
        self._watch_writes()
        self._loop.turn(time.monotonic() + patience)

    def _leftovers(self) -> set[int]:
        agent_id = self._start.agent_id if self._start else ""
        ours = {os.getpid(), os.getppid()}
        return (reaper.descendants(os.getpid()) | reaper.processes_of(agent_id)) - ours

    def _drain(self) -> None:
        """Pass on the rest of the workers' output, as fast as the launcher gives credit."""
        quiet_since = time.monotonic()
        while self._pipes.open and not self._order_to_die:
            before = self._pipes.position
            self._turn(0.05)
            now = time.monotonic()
            self._keep_time()
            if self._pipes.position != before or self._pipes.await_credit:
                quiet_since = now
            elif now - quiet_since > DRAIN_TIME:
                return

    def _flush_out(self) -> None:
        while self._channel.pending and not self._channel.lost and not self._order_to_die:
            self._turn(min(0.5, self._step))
            self._keep_time()


def _ignore(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing, so that the signal still wakes the selector."""


def ended(lifeline: int | None) -> bool:
    """Tell whether the other end of a pipe that carries no data has been closed."""
    return lifeline is not None and bool(select.select([lifeline], [], [], 0.0)[0])


def main(preamble: bytes = PREAMBLE) -> int:
    """Run an agent whose stream is the standard input and output.

    Args:
        preamble: empty if the importer of this module has written it already.
    """

    def serve(mark: Mark) -> None:
        # No other output may reach the stream: descriptors 0 and 1 become /dev/null and standard error.
        receive, send = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        channel = FrameChannel(receive, send)
        channel.send_bytes(preamble)
        Agent(channel, mark, dict(os.environ)).run()

    return watched(serve)


def watched(serve: Callable[[Mark], None]) -> int:
    """Become the watchdog, and fork the agent proper, which calls ``serve``.

    If ``serve`` raises LaunchError, the agent ends with a line that gives the reason.
    """
    mark = Mark()
    reaper.take_name(PROCESS_NAME)
    reaper.become_subreaper()
    parent = os.getpid()
    memory = machine.MemoryWatch()
    agent = os.fork()
    if agent:
        os.close(0)
        return min(255, watchdog.watch(agent, mark, memory, os.environ))
    memory.close()  # the agent looks with a watch of its own
    reaper.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    reaper.become_subreaper()
    try:
        serve(mark)
    except LaunchError as error:
        sys.stderr.write(f"agent: {error}\n")
        return 1
    return 0
