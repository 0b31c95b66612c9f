"""TensorBoard's event files, written without TensorFlow."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

__all__ = ["ScalarLogs", "are_possible"]


def are_possible() -> bool:
    """Whether TensorBoard is installed."""
    return importlib.util.find_spec("tensorboard") is not None


class ScalarLogs:
    """Numbers of each epoch, in a folder that ``tensorboard --logdir`` shows. A context manager.

    Args:
        folder: of this machine; made if it is not there.
    """

    def __init__(self, folder: str) -> None:
        self._writer = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(folder)
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary

    def __enter__(self) -> ScalarLogs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._writer.close()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the numbers among ``values`` under their names, and bring the file up to date."""
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        made = [self._summary.Value(tag=name, simple_value=float(value)) for name, value in numbers.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=made)))
        self._writer.flush()
