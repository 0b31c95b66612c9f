"""A callback for Lightning's ``Trainer``, of ``lightning`` and of ``pytorch_lightning``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hvdgloo._collectives.logged import Pause, record_metrics
from hvdgloo._job import process
from hvdgloo.errors import MissingDependencyError

__all__ = ["LogCallback"]


def _base() -> type:
    """Return the base of callbacks in the package that the program has imported, or else in the installed one.

    Raises:
        MissingDependencyError: neither is installed.
    """
    packages = ["lightning.pytorch", "pytorch_lightning"]
    for name in sorted(packages, key=lambda name: name not in sys.modules):
        try:
            base: type = import_module(name).Callback
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it is installed, and lacks something itself
        else:
            return base
    raise MissingDependencyError("hvdgloo.torch.lightning needs Lightning: pip install lightning")


_Base: Any = object if TYPE_CHECKING else _base()


class LogCallback(_Base):  # type: ignore[misc]
    """Shows the metrics and the progress of a ``Trainer`` on the job's page, in its report, ``hvdgloo-run top`` and
    ``/metrics``; see ``hvd.log``.

    Metrics are what the module passes to ``self.log()``, on rank 0; with ``sync_dist=True``, they are averages over all
    ranks. They are logged once a second, more often in the first seconds, and at the end of each epoch, validation and
    test. Of more than 64 names, the first 64 are shown. Checkpoints are marked on the charts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pause = Pause()
        self._steps: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning."""
        steps, epochs = trainer.max_steps, trainer.max_epochs
        in_epochs = trainer.num_training_batches * (epochs or 0) / trainer.accumulate_grad_batches
        ends_by_steps = steps > 0 and (epochs in (None, -1) or in_epochs >= steps)
        self._steps = steps if ends_by_steps else None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called by Lightning."""
        metrics = trainer.callback_metrics if self._pause.over() else {}
        if self._steps is None:
            self._log_epoch(trainer, metrics, step=batch_idx, steps=trainer.num_training_batches)
        else:
            _log(metrics, step=trainer.global_step - 1, steps=self._steps)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning."""
        self._log_epoch(trainer, trainer.callback_metrics)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning."""
        _log(trainer.callback_metrics)  # with what the module logged after on_train_epoch_end above

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning."""
        if not trainer.sanity_checking:
            _log(trainer.callback_metrics)

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by Lightning."""
        _log(trainer.callback_metrics)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Called by Lightning."""
        process.group_counters().count_save("checkpoint")

    def _log_epoch(self, trainer: Any, metrics: Mapping[str, Any], **progress: object) -> None:
        if self._steps is None:
            progress |= {"epoch": trainer.current_epoch, "epochs": trainer.max_epochs}
        _log(metrics, **progress)


def _log(metrics: Mapping[str, Any], **progress: object) -> None:
    """Log metrics and progress, but no metric twice: Lightning has ``loss_step`` also as ``loss``."""
    distinct = {name: value for name, value in metrics.items() if f"{name}_step" not in metrics}
    record_metrics(process.group_counters(), distinct, **progress)
