"""TensorBoard's event files, written without TensorFlow."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import socket
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from hvdgloo._platform.files import create

__all__ = ["ScalarLogs", "are_possible"]


def are_possible() -> bool:
    """Return whether TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


_NUMBERS = itertools.count()
"""Numbers that distinguish files created within one second."""


class ScalarLogs:
    """Metrics of each epoch, in a directory for ``tensorboard --logdir``. A context manager.

    Args:
        folder: a local directory; created if it does not exist.
    """

    def __init__(self, folder: str) -> None:
        # Not TensorBoard's EventFileWriter, which imports TensorFlow where that is installed: it takes seconds, and
        # hundreds of megabytes.
        records = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        os.makedirs(folder, exist_ok=True)
        now = time.time()
        # TensorBoard recognises such files by "tfevents".
        name = f"events.out.tfevents.{int(now):010}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._writer = records.RecordWriter(os.fdopen(create(os.path.join(folder, name)), "wb"))
        self._add(self._event(wall_time=now, file_version="brain.Event:2"))

    def __enter__(self) -> ScalarLogs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the numbers among ``values`` under their names, and flush the file."""
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        made = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in numbers.items()]
        self._add(self._event(step=step, wall_time=time.time(), summary=self._summary(value=made)))

    def _add(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()
