"""The agent's ends of its workers' pipes.

Output is read only as far ahead as the launcher has given credit for, so a blocked terminal costs bounded memory here,
while other frames and heartbeats continue.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hvdgloo.runner.processes.worker_process import WorkerProcess
from hvdgloo.runner.protocol.channel import FrameChannel
from hvdgloo.runner.protocol.frames import Credit, Frame, Output, Stdin, StdinTaken


class WorkerPipes:
    """The passing on of workers' output and input.

    Args:
        selector: the agent's.
        channel: to the launcher.
        workers: the agent's workers by number.

    Attributes:
        handlers: frame type to handler.
    """

    def __init__(
        self, selector: selectors.BaseSelector, channel: FrameChannel, workers: Mapping[int, WorkerProcess]
    ) -> None:
        self._selector = selector
        self._channel = channel
        self._workers = workers
        self.handlers: dict[type[Frame], Callable[[Any], None]] = {Credit: self._on_credit, Stdin: self._on_stdin}

    @property
    def open(self) -> bool:
        """True if more output may follow."""
        return any(worker.streams for worker in self._workers.values())

    @property
    def await_credit(self) -> bool:
        """True if any worker's output is unread because the launcher does not keep up."""
        return any(not worker.may_be_read for worker in self._workers.values())

    @property
    def position(self) -> tuple[int, int]:
        """A value that changes whenever output is read or credit arrives."""
        workers = self._workers.values()
        return sum(w.unacknowledged for w in workers), sum(len(w.streams) for w in workers)

    def read(self, worker: WorkerProcess) -> None:
        """Pass on a worker's output, as far as there is credit."""
        for stream, pipe in worker.streams.items():
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._on_output, worker, stream))

    def _on_output(self, worker: WorkerProcess, stream: int) -> None:
        if worker.paused:
            return  # both of its pipes had data, and the first used up the credit
        data = worker.read(stream)
        if data is None:
            return
        if not data:
            self._selector.unregister(worker.streams[stream])
            worker.streams.pop(stream).close()
            return
        if self._channel.lost:
            return  # read on, so that workers do not stop at a full pipe while they have time to save their work
        worker.unacknowledged += len(data)
        self._channel.send(Output(worker.number, stream, data))
        if not worker.may_be_read:
            worker.paused = True
            for pipe in worker.streams.values():
                self._selector.unregister(pipe)

    def _on_credit(self, credit: Credit) -> None:
        worker = self._workers.get(credit.number)
        if worker is None:
            return  # its last output has been dealt with
        worker.unacknowledged -= credit.amount
        if worker.paused and worker.may_be_read:
            worker.paused = False
            self.read(worker)

    def _on_stdin(self, frame: Stdin) -> None:
        worker = self._workers.get(frame.number)
        if worker is None or worker.stdin is None:
            return
        if not frame.data:
            worker.close_stdin()
            return
        self._write_stdin(worker, memoryview(frame.data), registered=False)

    def _write_stdin(self, worker: WorkerProcess, data: memoryview, *, registered: bool) -> None:
        assert worker.stdin is not None
        if registered:
            self._selector.unregister(worker.stdin)
        try:
            data = data[os.write(worker.stdin.fileno(), data) :]
        except BlockingIOError:
            pass
        except OSError:
            worker.close_stdin()  # it no longer reads; what comes is dropped
            return
        if data:
            self._selector.register(
                worker.stdin, selectors.EVENT_WRITE, partial(self._write_stdin, worker, data, registered=True)
            )
        else:
            self._channel.send(StdinTaken(worker.number))
