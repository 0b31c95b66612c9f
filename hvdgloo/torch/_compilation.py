"""Keeps torch.compile out of hvdgloo: a call in a compiled function is a graph break, and runs as it is written.

Ranks exchange data in the thread that calls, so Dynamo would otherwise trace through the front-end into sockets, locks
and numpy. ``torch.compiler.disable`` would do the same, but it imports all of Dynamo, which takes as long as importing
torch, and adds a frame to every call. What it leaves on a function is enough: attributes that stop Dynamo where it
would inline the function, and a note on the code object that this frame, and all below it, run uncompiled.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])

_REASON = (
    "hvdgloo exchanges data with other processes here, which no graph can hold; compile without fullgraph=True, or "
    "call it outside of the compiled function"
)


def uncompiled(function: F) -> F:
    """Make a call of a function a graph break, and run it and all that it calls uncompiled.

    Args:
        function: changed in place, if this torch can do that; its code object must be its own.
    """
    if not hasattr(eval_frame, "set_code_exec_strategy"):  # before torch 2.7
        return torch.compiler.disable(function)  # type: ignore[no-any-return, no-untyped-call]
    plain: Any = function
    plain._torchdynamo_disable = True
    plain._torchdynamo_disable_msg = _REASON
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(plain.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def uncompiled_methods(kind: type, *but: str) -> None:
    """``uncompiled`` for all public methods of a class, inherited ones included.

    Args:
        kind: where a method is inherited from a class that others share, this class gets it as its own if it had to be
            replaced.
        but: names of methods that Dynamo may trace, because they only read plain values.
    """
    for name in dir(kind):
        method = getattr(kind, name)
        if not name.startswith("_") and name not in but and isinstance(method, types.FunctionType):
            kept = uncompiled(method)
            if kept is not method:
                setattr(kind, name, kept)
