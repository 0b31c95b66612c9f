"""The error tree: as drawn, rooted, and fit to travel between processes with its facts."""

from __future__ import annotations

import builtins
import inspect
import pickle
import re
import sys
import types
from typing import Any

import cloudpickle
import pytest

from hvdgloo import errors

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
}

# For every class that takes facts: how to make one. The others take a message.
MADE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "DuplicateNameError": (("text",), {"name": "allreduce.x"}),
    "MismatchError": (("text",), {"name": "allreduce.x"}),
    "NotInitializedError": ((), {}),
    "JobShutdownError": (("text",), {"rank": 3}),
    "PeerLostError": (("text",), {"rank": 3, "host": "h2"}),
    "StallError": (("text",), {"names": ("a", "b"), "missing": (1, 2)}),
    "ConnectError": (("text",), {"rank": 3, "address": "10.0.0.5"}),
    "HostsUpdatedInterrupt": ((), {"skip_sync": True}),
    "HorovodVersionMismatchError": (("torch", "2.0", "2.1"), {}),
    "RendezvousError": (("text",), {"server": "h1:1234", "route": "/v1/status"}),
    "RendezvousTimeoutError": (("text",), {"server": "h1:1234", "route": "/v1/kv"}),
    "DismissedError": (("text",), {"fate": "over"}),
    "RendezvousRefusedError": (("text",), {"server": "h1:1", "route": "/v1", "status": 409, "reason": "taken"}),
    "RemoteTraceback": (("text",), {"rank": 3, "host": "h2", "traceback": "Traceback ..."}),
    "UnusableHostsError": (("text",), {"hosts": {"h1": "it refuses the login"}}),
    "HostsUnreachableError": (("text",), {"pairs": (("h1", "h2"),)}),
    "JobFailedError": (
        ("text",),
        {"rank": 3, "host": "h2", "exit_code": 137, "signal": 9, "last_lines": ("one", "two")},
    ),
}


def _make(name: str) -> BaseException:
    args, facts = MADE.get(name, (("text",), {}))
    error: BaseException = CLASSES[name](*args, **facts)
    return error


def _drawn() -> dict[str, tuple[str, set[str]]]:
    """From the docstring: class to the class it hangs from, and the foreign bases in brackets."""
    tree: dict[str, tuple[str, set[str]]] = {}
    above: list[str] = ["HvdglooError"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"    ([│ ]*)[├└]── (\w+)(?: \(([\w, ]+)\))?(?: .*)?", line)
        if match is None:
            continue
        depth = len(match[1]) // 4 + 1
        tree[match[2]] = (above[depth - 1], {base.strip() for base in (match[3] or "").split(",") if base})
        above[depth:] = [match[2]]
    return tree


def test_the_drawing_shows_every_class() -> None:
    assert set(_drawn()) | {"HvdglooError"} == set(CLASSES)


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"HvdglooError"}))
def test_each_class_hangs_where_it_is_drawn(name: str) -> None:
    parent, foreign = _drawn()[name]
    bases = set(CLASSES[name].__bases__)
    assert CLASSES[parent] in bases
    # What is inherited from the parent need not be drawn again, nor made a base again.
    assert {base.__name__ for base in bases - {CLASSES[parent]}} == foreign
    assert all(hasattr(builtins, base) for base in foreign)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_error_is_a_runtime_error(name: str) -> None:
    """Horovod's programs catch that class; the classes in brackets are caught as well."""
    error = _make(name)
    assert isinstance(error, RuntimeError)
    if isinstance(error, ImportError):
        assert error.msg == str(error)  # Python's own class has filled it in
    if isinstance(error, OSError):
        assert error.errno is None
        assert error.args == ("text",)


@pytest.mark.parametrize("name", sorted(CLASSES))
@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
def test_errors_travel_with_their_facts(name: str, pickler: Any) -> None:
    error = _make(name)
    again = pickler.loads(pickler.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


@pytest.mark.parametrize("name", sorted(MADE))
def test_facts_are_attributes(name: str) -> None:
    _, facts = MADE[name]
    error = _make(name)
    assert {fact: getattr(error, fact) for fact in facts} == facts


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_class_with_facts_is_tried_above(name: str) -> None:
    signature = inspect.signature(CLASSES[name].__init__)
    takes_facts = any(p.kind is p.KEYWORD_ONLY for p in signature.parameters.values())
    assert not takes_facts or name in MADE


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_class_says_what_it_is_for(name: str) -> None:
    assert CLASSES[name].__doc__
    assert str(_make(name))


def test_facts_given_as_lists_are_settled() -> None:
    names = ["a"]
    error = errors.StallError("text", names=names, missing=[1])
    names.append("b")
    assert (error.names, error.missing) == (("a",), (1,))


def test_not_initialized_is_caught_both_ways() -> None:
    """Horovod raises a ValueError where it is not initialised; elastic training catches HorovodInternalError."""
    with pytest.raises(ValueError, match=re.escape("hvd.init()")):
        raise errors.NotInitializedError
    with pytest.raises(errors.HorovodInternalError):
        raise errors.NotInitializedError


def test_not_initialized_says_what_programs_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "horovod", raising=False)
    assert str(errors.NotInitializedError()) == "hvdgloo has not been initialized; use hvd.init()."
    monkeypatch.setitem(sys.modules, "horovod", types.ModuleType("horovod"))  # Horovod itself is installed as well
    assert str(errors.NotInitializedError()) == "hvdgloo has not been initialized; use hvd.init()."


def test_version_mismatch_names_both_versions() -> None:
    assert str(_make("HorovodVersionMismatchError")) == "torch 2.0 is installed, but 2.1 is expected"
    assert str(errors.HorovodVersionMismatchError()) == "a framework  is installed, but another version is expected"
