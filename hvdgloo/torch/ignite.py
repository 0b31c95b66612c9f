"""A handler for the engines of pytorch-ignite."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvdgloo._collectives.logged import Pause, record_metrics
from hvdgloo._job import process
from hvdgloo.errors import MissingDependencyError

try:
    from ignite.engine import Engine, Events
    from ignite.handlers.checkpoint import CheckpointEvents
except ImportError as error:
    if (error.name or "").partition(".")[0] != "ignite":
        raise  # it is installed, and lacks something itself
    raise MissingDependencyError(
        "hvdgloo.torch.ignite needs pytorch-ignite 0.5.3 or later: pip install 'pytorch-ignite>=0.5.3'"
    ) from error

__all__ = ["LogHandler"]


Transform = Callable[[Any], Any]


class LogHandler:
    """Shows the metrics and the progress of engines on the job's page, in its report, ``hvdgloo-run top`` and
    ``/metrics``; see ``hvd.log``.

    Attach it after metrics and other handlers, on all ranks; rank 0's numbers are shown. Of more than 64 names, the
    first 64 are shown. What ignite's ``Checkpoint`` saves is marked on the charts.
    """

    def attach(self, engine: Engine, output_transform: Transform | None = None) -> None:
        """Show a trainer's progress, its metrics and its output: once a second, more often in the first seconds, and at
        the end of each epoch.

        Args:
            engine: an engine of ignite that trains.
            output_transform: a function of the engine's output that returns a dictionary of names and numbers, or a
                single number, which is shown as "output"; by default the output itself is taken.
        """
        engine.add_event_handler(Events.ITERATION_COMPLETED, _iteration_ended, Pause(), output_transform)
        engine.add_event_handler(Events.EPOCH_COMPLETED, _epoch_ended, output_transform)
        _mark_checkpoints(engine)

    def attach_evaluator(self, engine: Engine, tag: str) -> None:
        """Show the metrics of another engine whenever it has ended.

        Args:
            engine: an engine of ignite that evaluates.
            tag: prefix of the metrics' names: the accuracy of "validation" is shown as "validation/accuracy".
        """
        engine.add_event_handler(Events.COMPLETED, _evaluation_ended, tag)
        _mark_checkpoints(engine)


def _mark_checkpoints(engine: Engine) -> None:
    if not engine.has_registered_events(CheckpointEvents.SAVED_CHECKPOINT):
        engine.register_events(*CheckpointEvents)
    engine.add_event_handler(CheckpointEvents.SAVED_CHECKPOINT, process.group_counters().count_save, "checkpoint")


def _iteration_ended(engine: Engine, pause: Pause, output_transform: Transform | None) -> None:
    state = engine.state
    numbers = _numbers(state, output_transform) if pause.over() else {}
    if state.max_epochs is None:
        _log(numbers, step=state.iteration - 1, steps=getattr(state, "max_iters", None))
    else:
        length = state.epoch_length
        step = (state.iteration - 1) % length if length else None
        _log(numbers, step=step, steps=length, epoch=state.epoch - 1, epochs=state.max_epochs)


def _epoch_ended(engine: Engine, output_transform: Transform | None) -> None:
    state = engine.state
    in_epochs = {} if state.max_epochs is None else {"epoch": state.epoch - 1, "epochs": state.max_epochs}
    _log(_numbers(state, output_transform), **in_epochs)


def _evaluation_ended(engine: Engine, tag: str) -> None:
    _log({f"{tag}/{name}": value for name, value in engine.state.metrics.items()})


def _numbers(state: Any, output_transform: Transform | None) -> dict[str, Any]:
    """Return an engine's metrics and what it puts out, by name."""
    output = state.output if output_transform is None else output_transform(state.output)
    return {**(output if isinstance(output, Mapping) else {"output": output}), **state.metrics}


def _log(numbers: Mapping[str, Any], **progress: object) -> None:
    record_metrics(process.group_counters(), numbers, **progress)
