"""The first rank's files in a run's directory, next to the checkpoint: logs, and the user's callback's model."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from hvdgloo.spark.common import _logs
from hvdgloo.spark.common._training import Training

__all__ = ["RunFiles"]


class RunFiles:
    """A local directory that is copied to the store after every epoch. A context manager, on the first rank.

    Args:
        training: a training whose store keeps runs.
    """

    def __init__(self, training: Training) -> None:
        self._training, self._store = training, training.store
        self._stack = ExitStack()
        self._scalars: tuple[_logs.ScalarLogs, _logs.ScalarLogs] | None = None
        self.folder = self.logs = ""

    def __enter__(self) -> RunFiles:
        self.folder = str(self._stack.enter_context(self._store.get_local_output_dir()))
        self.logs = os.path.join(self.folder, self._store.logs_subdir)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is None:
                self.sync()

    def sync(self) -> None:
        """Copy the directory's files to the store."""
        self._store.sync(self.folder)

    def write_logs(self, epoch: int, values: Mapping[str, Any]) -> None:
        """Log the values of an epoch as TensorBoard's callback would, if it is installed; ``val_*`` values separately.

        Args:
            epoch: the epoch's number, from 0.
        """
        if not _logs.are_possible():
            return
        if self._scalars is None:
            train, validation = (
                self._stack.enter_context(_logs.ScalarLogs(os.path.join(self.logs, name)))
                for name in ("train", "validation")
            )
            self._scalars = train, validation
        measured = {name.removeprefix("val_"): value for name, value in values.items() if name.startswith("val_")}
        self._scalars[0].write(epoch, {f"epoch_{n}": v for n, v in values.items() if not n.startswith("val_")})
        self._scalars[1].write(epoch, {f"epoch_{name}": value for name, value in measured.items()})

    def keep(self, callback: Any, history: Mapping[str, Sequence[float]]) -> str:
        """Have a callback save into this directory, and tell it the best value of earlier epochs.

        Args:
            callback: a ModelCheckpoint, or another callback with a ``filepath``.
            history: metrics of earlier epochs of the run.

        Returns:
            the name of its file.
        """
        ending = ".weights.h5" if getattr(callback, "save_weights_only", False) else ".keras"
        name = os.path.basename(getattr(callback, "filepath", None) or f"best{ending}")
        if "{" in name:
            # Keras would fill in the epoch or a metric, but the file is looked for under one name.
            name = f"best{ending}"
        if name == self._training.checkpoint_filename:
            name = f"best_{name}"
        callback.filepath = os.path.join(self.folder, name)
        values = history.get(getattr(callback, "monitor", ""), ())
        if values and hasattr(callback, "best"):
            mode = getattr(callback, "mode", "auto")
            larger = mode == "max" or (mode == "auto" and callback.monitor.endswith(("acc", "accuracy", "auc")))
            callback.best = (max if larger else min)(values)
        return name

    def saved(self, name: str) -> bytes | None:
        """Return the file that a callback saved under this name, now or in an earlier part of the run; None if none."""
        path = os.path.join(self.folder, name)
        if os.path.exists(path):
            with open(path, "rb") as file:
                return file.read()
        stored = posixpath.join(self._store.run_path, name)
        return self._store.read(stored) if self._store.exists(stored) else None
