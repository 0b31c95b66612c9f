"""A worker of ``hvdgloo.run.run``: it reads a function, calls it, and writes the result.

Function and result are passed through descriptors that the agent opened, so they may be of any size. Both are sealed
with the job's secret, and unpickled only after the seal has been checked.
"""

from __future__ import annotations

import os
import pickle
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hvdgloo
from hvdgloo._platform import pickling
from hvdgloo.config import Config
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.rendezvous._auth import seal, unseal
from hvdgloo.rendezvous._host_identity import host_identity

_FUNCTION = "function of run()"
_READ = 4 * 1024 * 1024


@dataclass(frozen=True)
class TaskResult:
    """The outcome of the call on one rank.

    Attributes:
        result: the pickled result, if the call returned and the result can be pickled.
        exception: the pickled exception, if the call raised one that can be pickled.
        text: the last line of the traceback, or the reason why the result cannot be pickled.
        traceback: as Python prints it, with the rank's own frames.
        exited: True if the function called sys.exit() instead of returning.
        secondary: True if the call failed because another rank did.
    """

    result: bytes | None = None
    exception: bytes | None = None
    text: str = ""
    traceback: str = ""
    exited: bool = False
    secondary: bool = False


def command(python: str, module: str = __name__) -> tuple[str, ...]:
    """Return the argv of a task, to which the agent adds two descriptors; or of another module of ours with a ``main``.

    It does not use ``-m``: that would put the current directory, and a json.py in it, first, and ``multiprocessing``
    would take this module for the user's main program.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(hvdgloo.__file__)))
    program = f"import sys; sys.path[:1] = []; sys.path.append(sys.argv.pop(1)); import {module} as t; t.main()"
    return (python, "-c", program, root)


def pack_function(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    secret: bytes,
    *,
    paths_of_their_own: bool = False,
) -> bytes:
    """Return a sealed call.

    Args:
        paths_of_their_own: workers look for modules where their own environment says; only workers on this machine also
            look in the caller's directories, after their own.

    Raises:
        InvalidArgumentError: the function or an argument cannot be pickled.
    """
    try:
        call = pickling.dumps((func, tuple(args), dict(kwargs)))
    except Exception as error:
        raise InvalidArgumentError(
            f"the function or its arguments cannot be sent to the workers ({type(error).__name__}: {error}); "
            "open files, locks and connections must be created inside the function"
        ) from error
    # The directories of the function's modules must be known before it is unpickled.
    machine = host_identity() if paths_of_their_own else None
    return seal(secret, pickle.dumps((python_version(), _installation(), list(sys.path), machine, call)), _FUNCTION)


def python_version() -> str:
    """Return the version of Python: only the same version can unpickle functions, because bytecode differs."""
    return "{}.{}".format(*sys.version_info)


def _installation() -> list[str]:
    """Return the directories that belong to this Python itself rather than to the programs that it runs."""
    paths = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    archive = os.path.join(os.path.dirname(paths[0]), f"python{python_version().replace('.', '')}.zip")
    return sorted({*paths, archive, *site.getsitepackages(), site.getusersitepackages()})


def adopt_path(
    path: Sequence[str], installation: Sequence[str], *, own: Sequence[str], here: Sequence[str]
) -> list[str]:
    """Return the directories from which a worker imports, so that it finds the same modules as the caller.

    Args:
        path: the caller's ``sys.path``.
        installation: the caller's directories of Python itself and its packages.
        own: this interpreter's directories of that kind. If they differ, they replace the caller's.
        here: this interpreter's ``sys.path``.
    """
    if list(own) == list(installation):
        return list(path)
    kept = beyond_installation(path, installation)
    return kept + [entry for entry in here if entry not in kept]


def follow_path(path: Sequence[str], installation: Sequence[str], *, here: Sequence[str]) -> list[str]:
    """Return the directories for workers with a path of their own, ``here``: the caller's directories come last."""
    return [*here, *(entry for entry in beyond_installation(path, installation) if entry not in here)]


def beyond_installation(path: Sequence[str], installation: Sequence[str] | None = None) -> list[str]:
    """Return the entries of a ``sys.path`` that do not belong to Python itself and its packages.

    Args:
        installation: Python's directories; by default this interpreter's.
    """
    folders = _installation() if installation is None else installation
    return [entry for entry in path if not any(_is_below(entry, folder) for folder in folders)]


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def name_of(rank: int | None, worker: str | None = None) -> str:
    """Return the purpose that a worker's outcome is sealed for, so that it cannot be taken for another worker's.

    Args:
        worker: its id in an elastic job, because ranks change there.
    """
    return f"worker {worker}" if worker is not None else f"rank {rank}"


def unpack_outcome(sealed: bytes, name: str, secret: bytes) -> TaskResult:
    """Return a worker's outcome.

    Args:
        name: see ``name_of``.

    Raises:
        AuthenticationError: this worker of this job did not write it.
    """
    outcome = pickle.loads(unseal(secret, sealed, f"outcome of {name}"))  # noqa: S301 - the seal was checked
    assert isinstance(outcome, TaskResult)
    return outcome


def main() -> None:
    """Run one task; ``sys.argv`` contains its descriptors."""
    function_fd, outcome_fd = int(sys.argv[1]), int(sys.argv[2])
    del sys.argv[1:]
    config = Config.from_env()
    assert config.secret is not None, "the launcher sets it"
    payload = unseal(config.secret, _read(function_fd), _FUNCTION)
    os.close(function_fd)
    version, installation, path, machine, call = pickle.loads(payload)  # noqa: S301 - the seal was checked
    if machine is None:
        sys.path[:] = adopt_path(path, installation, own=_installation(), here=sys.path)
    elif machine == host_identity():
        sys.path[:] = follow_path(path, installation, here=sys.path)
    outcome, status = _call(call) if version == python_version() else _wrong_version(version)
    name = name_of(config.rank, config.worker)
    _write(outcome_fd, seal(config.secret, pickle.dumps(outcome), f"outcome of {name}"))
    sys.exit(status)


def _wrong_version(version: str) -> tuple[TaskResult, int]:
    text = (
        f"has Python {python_version()} and cannot read a function of Python {version}; use the same one on all hosts "
        "(remote_python=, executable=)"
    )
    sys.stderr.write(f"this worker {text}\n")
    return TaskResult(text=text), 1


def _call(call: bytes) -> tuple[TaskResult, int | str | None]:
    try:
        func, args, kwargs = pickle.loads(call)  # noqa: S301 - the seal was checked
        result = func(*args, **kwargs)
    except SystemExit as error:
        return TaskResult(
            text=f"called sys.exit({'' if error.code is None else repr(error.code)})", exited=True
        ), error.code
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller of run() must see it
        return failed(error), 1
    try:
        return TaskResult(result=pickling.dumps(result)), 0
    except Exception as error:  # noqa: BLE001 - objects raise what they like when they are pickled
        text = f"returned a {type(result).__name__} that cannot be pickled ({type(error).__name__}: {error})"
        sys.stderr.write(f"the function {text}\n")
        return TaskResult(text=text), 1


def failed(error: BaseException) -> TaskResult:
    """Return the outcome of a rank whose function raised an exception; print the traceback."""
    from hvdgloo._job.excepthook import HINT, from_outside
    from hvdgloo.errors import HorovodInternalError

    own_frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = from_outside(error, own_frames).removeprefix(HINT)  # which is given once, where this is shown
    # As in any program that ends with an exception, call the hook that hvd.init() or the user installed.
    sys.excepthook(type(error), error.with_traceback(own_frames), own_frames)
    sys.last_value = error  # as the interpreter leaves it, for the code that informs the other ranks at exit
    sys.stderr.flush()
    return TaskResult(
        exception=_pickled(error),
        text=traceback.format_exception_only(type(error), error)[-1].strip(),
        traceback=text,
        secondary=isinstance(error, HorovodInternalError),
    )


def _pickled(error: BaseException) -> bytes | None:
    """Return the pickled exception if it survives pickling: many cannot be rebuilt from their state."""
    try:
        data = pickling.dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None  # noqa: S301 - made one line above
    except Exception:  # noqa: BLE001 - objects raise what they like; then the traceback's text has to suffice
        return None


def _read(descriptor: int) -> bytes:
    """Read the whole file, by position, because all tasks of a host share one descriptor's offset."""
    pieces: list[bytes] = []
    position = 0
    while piece := os.pread(descriptor, _READ, position):
        pieces.append(piece)
        position += len(piece)
    return b"".join(pieces)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest[:_READ]) :]
    os.close(descriptor)
