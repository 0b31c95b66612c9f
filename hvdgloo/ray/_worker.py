"""A worker of a ``RayExecutor``: makes the calls that its actor passes on, one after another, until there are no more.

``runner.worker.function_task`` runs it as the job's function, so that everything else (ranks, output, supervision) is
as in any job. Between calls, the object of the user's class and the context of ``hvd.init()`` stay as they are.
"""

from __future__ import annotations

import os
import pickle
import sys
from enum import Enum
from typing import Any

from hvdgloo._platform import pickling
from hvdgloo.config import Config
from hvdgloo.ray import _calls
from hvdgloo.ray._calls import Connection, Part
from hvdgloo.runner.worker.function_task import TaskResult, failed

RETURNED, RAISED = b"returned", b"raised"
"""The first part of a reply; the second is the pickled result, whose buffers follow, or a pickled TaskResult."""


class Kind(Enum):
    """The kind of a call."""

    CREATE = "create"
    """Instantiation of the user's class; the object is kept."""
    EXECUTE = "execute"
    """Call of a function with that object."""
    RUN = "run"
    """Call of a function with given arguments."""


def serve() -> None:
    """Make calls until the actor closes the connection or ends."""
    name = os.environ.pop(_calls.VARIABLE)
    # Ray set these for the actor's own process; they would mislead another process that joins Ray.
    for variable in ("RAY_JOB_ID", "RAY_RAYLET_PID"):
        os.environ.pop(variable, None)
    with _calls.connect(name) as connection:
        connection.send([str(Config.from_env().rank).encode()])
        _serve(connection)


def _serve(connection: Connection) -> None:
    made: list[Any] = [None]
    while (message := connection.receive()) is not None:
        needs_ray, data = message
        reply = _call(bytes(needs_ray) == b"ray", data, made)
        del message, data
        connection.send(reply)
        del reply


def _call(needs_ray: bool, data: bytearray, made: list[Any]) -> list[Part]:
    """Make one call.

    Args:
        needs_ray: True if the arguments contain references to Ray's objects, which only a process that has joined Ray
            can read.
        made: list of one element, the object of the user's class.
    """
    sys.last_value = None  # a failure that this worker survived is not the cause of its later end
    try:
        if needs_ray:
            join_ray()
        kind, function, args, kwargs = pickle.loads(data)  # noqa: S301 - from the actor, a process of this user's
        result = function(*(made if Kind(kind) is Kind.EXECUTE else args), **kwargs)
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)
        return [RAISED, pickle.dumps(TaskResult(text=f"called sys.exit({code})", exited=True))]
    except BaseException as error:  # noqa: BLE001 - the caller of execute() must see any error
        return [RAISED, pickle.dumps(failed(error))]
    if Kind(kind) is Kind.CREATE:
        made[0], result = result, None
    try:
        return _packed(result)
    except Exception as error:  # noqa: BLE001 - objects may raise anything when they are pickled
        text = f"returned a {type(result).__name__} that cannot be pickled ({type(error).__name__}: {error})"
        sys.stderr.write(f"the function {text}\n")
        return [RAISED, pickle.dumps(TaskResult(text=text))]


def _packed(result: Any) -> list[Part]:
    dumps = pickling.dumps
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        dumps = ray.cloudpickle.dumps  # the result may have references to Ray's objects
    buffers: list[pickle.PickleBuffer] = []
    data = dumps(result, buffer_callback=buffers.append)
    return [RETURNED, data, *(buffer.raw() for buffer in buffers)]


def join_ray() -> None:
    """Have this process join Ray's cluster as a driver of its own."""
    import ray

    if not ray.is_initialized():
        # Address and namespace are in the environment, so that calls of Ray's functions join automatically, too.
        ray.init(log_to_driver=False, logging_level="ERROR")
