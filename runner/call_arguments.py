"""Checks of arguments that functions which start jobs share, whatever they start them on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TypeVar

from hvdgloo.errors import ConfigError

T = TypeVar("T")


def judge_controllers(
    call: str, use_gloo: bool | None, use_mpi: bool | None, mpi_name: str, mpi_value: str | None
) -> None:
    """Check a call's arguments about MPI, which does not exist here. Call this from the function that the user calls.

    Args:
        call: the name of that function.
        mpi_name, mpi_value: an argument that is for MPI only; a warning reports that it has no effect.

    Raises:
        ConfigError: MPI is requested.
    """
    if use_gloo and use_mpi:
        raise ConfigError(f"{call}(): use_gloo and use_mpi exclude each other, and there is only Gloo here")
    if use_mpi:
        raise ConfigError(f"{call}(use_mpi=True): there is no MPI here; leave it out")
    if mpi_value:
        warnings.warn(f"{call}({mpi_name}=...) has no effect: there is no MPI here", stacklevel=3)


def renamed(
    call: str, name: str, value: T, old_name: str, old: T | None, *, default: T | None = None, stacklevel: int = 3
) -> T:
    """Return the value of an argument that has two names; the older one gives a warning.

    Args:
        call: the name of the function that the user calls.
        default: the value if nothing was given.
        stacklevel: the warning's stack level; by default for a caller that the user calls.

    Raises:
        ConfigError: both were given, and differ.
    """
    if old is None:
        return value
    warnings.warn(f"{call}({old_name}=...) is an old name; write {name}=", DeprecationWarning, stacklevel=stacklevel)
    if value != default and value != old:
        raise ConfigError(f"{call}(): {name}={value!r} and {old_name}={old!r} contradict each other")
    return old


def check_call(call: str, function: object, args: object, kwargs: object) -> None:
    """Check that a function can be called with these arguments, before anything is started.

    Args:
        call: the name of the function that the user calls.
        args, kwargs: may be None.

    Raises:
        ConfigError: the first argument is not a function, or the others are not its arguments.
    """
    if not callable(function):
        raise ConfigError(
            f"{call}(): the first argument is a function, not {function!r}; its arguments follow it, in args="
        )
    check_arguments(call, args, kwargs)


def check_arguments(call: str, args: object, kwargs: object) -> None:
    """Check that a function can be called with these arguments; see ``check_call``."""
    if args is not None and (isinstance(args, (str, bytes)) or not isinstance(args, Iterable)):
        raise ConfigError(f"{call}(args={args!r}): give a tuple of arguments, even of one: args=({args!r},)")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise ConfigError(f"{call}(kwargs={kwargs!r}): give a dictionary of names and values")


def names(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return names of network interfaces: one, several or none."""
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)
