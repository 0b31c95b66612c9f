"""Elastic training, whatever the framework: jobs that lose and gain workers, and go on.

::

    @hvd.elastic.run
    def train(state):
        while state.batch < batches:
            ...
            state.batch += 1
            state.commit()

    train(hvd.elastic.TorchState(model, optimizer, batch=0))

``loop`` has what ``run`` does, ``state`` what a program's progress is; the front-ends add how the tensors of their
framework are saved and sent. docs/elastic.md is the manual.
"""

from __future__ import annotations

from hvdgloo.elastic.loop import run, run_fn
from hvdgloo.elastic.news import notification_manager
from hvdgloo.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State", "notification_manager", "run", "run_fn"]
