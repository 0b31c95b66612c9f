"""The workers of ``hvdgloo.run.run``: where they import from, and what they cannot read."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import pytest

from hvdgloo.errors import AuthenticationError
from hvdgloo.runner.worker import function_task
from tests.support.launching import clean_environment, run_command

HERE = ["/opt/py/lib/python3.11", "/opt/py/lib/python3.11/site-packages"]
THERE = ["/usr/lib/python3.11", "/usr/lib/python3/dist-packages"]
SECRET = b"s" * 32


class TestPath:
    def test_the_same_installation_imports_from_the_same_places(self) -> None:
        path = ["", "lib", *HERE, "/editable/project"]
        assert function_task.adopt_path(path, HERE, own=HERE, here=["/anything"]) == path

    def test_pain_19_another_one_keeps_its_own_packages(self) -> None:
        path = ["", "/data/lib", HERE[0], f"{HERE[0]}/lib-dynload", HERE[1], "/editable/project"]
        adopted = function_task.adopt_path(path, HERE, own=THERE, here=["", *THERE])
        assert adopted == ["", "/data/lib", "/editable/project", *THERE]

    def test_a_name_that_merely_begins_alike_is_the_user_s(self) -> None:
        assert function_task.adopt_path([f"{HERE[0]}-mine"], HERE, own=THERE, here=THERE) == [f"{HERE[0]}-mine", *THERE]

    def test_this_interpreter_s_own_folders_are_found(self) -> None:
        own = function_task._installation()
        assert os.path.dirname(os.__file__) in own
        assert os.path.dirname(os.path.dirname(pytest.__file__)) in own


@pytest.mark.parametrize("version", ["3.9", "4.0"])
def test_a_function_of_another_python_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Pain 19: bytecode of another version fails in ways that are hard to understand."""
    with monkeypatch.context() as patch:
        patch.setattr(function_task, "python_version", lambda: version)
        (tmp_path / "function").write_bytes(function_task.pack_function(int, (), {}, SECRET))
    with open(tmp_path / "function", "rb") as function, open(tmp_path / "outcome", "wb") as outcome:
        done = run_command(
            [*function_task.command(sys.executable), str(function.fileno()), str(outcome.fileno())],
            pass_fds=(function.fileno(), outcome.fileno()),
            env={**clean_environment(), "HVDGLOO_SECRET": SECRET.hex(), "HVDGLOO_RANK": "3"},
            timeout=30,
        )
    assert done.returncode == 1
    found = function_task.unpack_outcome((tmp_path / "outcome").read_bytes(), "rank 3", SECRET)
    assert f"cannot read a function of Python {version}" in found.text
    assert found.result is None
    assert "Traceback" not in done.stderr


class _Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self._path,)


@pytest.mark.parametrize("seal", [b"", b"\0" * 32])
def test_pain_30_what_a_worker_left_is_unpickled_only_after_its_seal_was_checked(tmp_path: Path, seal: bytes) -> None:
    trap = tmp_path / "sprung"
    with pytest.raises(AuthenticationError, match="not unpickled"):
        function_task.unpack_outcome(seal + pickle.dumps(_Trap(trap)), "rank 0", SECRET)
    assert not trap.exists()
