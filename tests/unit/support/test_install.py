"""The program by which the Makefile installs: what it tells of pip's work, and what the demo says at its end."""

from __future__ import annotations

import http.server
import io
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdgloo.runner.cli.flags import build_parser
from hvdgloo.runner.cli.main import command_line, split_all
from tests.support import install
from tests.support.launching import run_command
from tests.support.pages import ROOT
from tests.support.threads import Task

SMALL, LARGE = "Downloading tqdm-4.67-py3-none-any.whl (78 kB)", "Downloading torch-2.13.0-cp311-linux.whl (191.8 MB)"
PIP = """\
import os, pathlib, signal, sys, tempfile, time
signal.alarm(60)
assert sys.argv[1:3] == ["-m", "pip"], sys.argv
print("Collecting torch", flush=True)
print("  Downloading torch-2.13.0-cp311-linux.whl (191.8 MB)", flush=True)
here = pathlib.Path(tempfile.mkdtemp())
assert pathlib.Path(sys.executable).parent.parent not in here.parents
(here / "part").write_bytes(bytes(30_000_000))
told = pathlib.Path(os.environ["TOLD"])
while not told.exists():
    time.sleep(0.02)
print("Installing collected packages: mpmath, torch", flush=True)
if "broken" in sys.argv:
    sys.exit("ERROR: no space left")
"""


class Watched(io.StringIO):
    """An output; a file appears once something has been written to it."""

    def __init__(self, word: str, then: Path) -> None:
        super().__init__()
        self._word, self._then = word, then

    def write(self, text: str) -> int:
        if self._word in text:
            self._then.touch()
        return super().write(text)


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python whose pip fetches torch until the output says that it is still at it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "pip.py").write_text(PIP)
    python = tmp_path / "bin/python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(tmp_path / "pip.py"))} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("TOLD", str(tmp_path / "told"))
    return python


def test_what_is_fetched_is_told_with_its_size_and_a_silence_with_how_far_it_is(pip: Path, tmp_path: Path) -> None:
    out = Watched(" 30 MB so far", tmp_path / "told")
    assert install.install(pip, ["torch"], out, silence_s=0.2) == 0
    lines = [line.strip() for line in out.getvalue().splitlines()]
    after = lines[lines.index("torch-2.13.0, 192 MB") + 1 :]  # before, it may have been silent as well
    assert any(line.startswith("still fetching torch-2.13.0: 30 MB so far, ") for line in after[:-2])
    assert lines[-2] == "unpacking 2 packages; 192 MB fetched so far"
    assert lines[-1].startswith("done: 192 MB fetched, ")
    assert not list(tmp_path.glob("fetched-*"))


def test_if_pip_fails_all_that_it_said_is_shown(pip: Path, tmp_path: Path) -> None:
    out = Watched(" 30 MB so far", tmp_path / "told")
    assert install.install(pip, ["broken"], out, silence_s=0.2) == 1
    assert "Collecting torch" in out.getvalue()
    assert "ERROR: no space left" in out.getvalue()
    assert out.getvalue().endswith("failed with status 1\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (LARGE, "torch-2.13.0, 192 MB"),
        (SMALL, None),
        ("  Downloading numpy-2.4-cp311-linux.whl.metadata (62 kB)", None),
        ("  Using cached scipy-1.17.0-cp311-linux.whl (35.4 MB)", "scipy-1.17.0, from pip's cache"),
        ("Processing /somewhere/torch-2.13.0+cpu-cp311-linux.whl", "torch-2.13.0+cpu, from a file on this machine"),
        ("Processing /the/checkout", None),
        ("Installing collected packages: hvdgloo", "unpacking 1 package; 0 MB fetched so far"),
        ("Requirement already satisfied: torch", None),
    ],
)
def test_what_a_line_of_pips_means(line: str, said: str | None) -> None:
    assert install.Story().hear(line) == said


def test_small_packages_are_counted_though_not_told() -> None:
    story = install.Story()
    for line in (SMALL, LARGE, SMALL):
        story.hear(line)
    assert story.megabytes == pytest.approx(191.8 + 2 * 0.078)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """A package index that has torch."""
    (tmp_path / "torch").mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(tmp_path))  # type: ignore[arg-type]

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Task(server.serve_forever)
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.result(10)


def test_an_index_is_asked_whether_it_has_torch(index: str) -> None:
    assert install.answers(index)
    assert install.answers(f"{index}/")
    assert not install.answers(f"{index}/nothing")


def test_an_index_that_does_not_answer_is_given_up_soon() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert not install.answers(address, timeout=0.2)
    assert not install.answers(address, timeout=0.2), "no server is there"


def test_what_is_no_web_server_is_no_index() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)

        def speak() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)  # closed with the request unread, the connection would be reset
                connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = Task(speak)
        assert not install.answers(f"http://127.0.0.1:{server.getsockname()[1]}", timeout=10)
        thread.result(10)


def test_every_installation_goes_through_it_and_says_how_much_there_is_to_fetch() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert not re.search(r"^[^#\n]*pip install", text, re.M), "with $(INSTALL) it says what it does"
    said = re.findall(r"^\t\$\(INSTALL\) \S+ \"([^\"]*)\"", text, re.M)
    assert len(said) == text.count("$(INSTALL) $(") > 8
    without = {"hvdgloo"}
    assert [what for what in said if what not in without and not re.search(r"\d+ MB to fetch", what)] == []


def test_an_extra_s_requirements_include_the_extras_that_it_names(tmp_path: Path) -> None:
    metadata = tmp_path / "setup.cfg"
    metadata.write_text(
        "[options]\ninstall_requires =\n    flask >= 2.3\n[options.extras_require]\ntls =\n    cryptography\n"
        "unit =\n    hvdgloo[tls, top]\n    # a reason\n    pytest >= 8, < 9.2\ntop =\n    rich\nother =\n    ray\n"
    )
    needed = install.requirements("unit", metadata)
    assert sorted(needed) == ["cryptography", "flask >= 2.3", "pytest >= 8, < 9.2", "rich"]
    with pytest.raises(KeyError):
        install.requirements("units", metadata)


def test_the_demo_installs_no_tool_of_the_tests(tmp_path: Path) -> None:
    command = ["make", "--dry-run", "--no-print-directory", f"VENV={tmp_path / 'venv'}", "demo"]
    recipe = run_command(command, cwd=ROOT, timeout=30, check=True).stdout
    installed = [shlex.split(line)[3:] for line in recipe.replace("\\\n", "").splitlines() if "install.py" in line]
    packages = [argument for line in installed for argument in line[1:] if not argument.startswith("-")]
    assert packages == ["https://download.pytorch.org/whl/cpu", "torch==2.13.0", ".[examples]"]
    (job,) = (line for line in recipe.splitlines() if "hvdgloo-run -np" in line)
    assert shlex.split(job)[1:] == ["-np", "2", "--page", "--report", "build/demo.html", "examples/torch_digits.py"]
    (shows,) = (line for line in recipe.splitlines() if "docs/after-the-demo.txt" in line)
    said = run_command(shlex.split(shows), cwd=ROOT, timeout=30, check=True).stdout
    assert f"source {tmp_path}/venv/bin/activate" in said
    assert f"  {tmp_path}/venv/bin/hvdgloo-run doctor" in said
    last = (ROOT / "docs/after-the-demo.txt").read_text(encoding="utf-8").splitlines()[-1]
    assert "build/demo.html" in last, "the demo ends with the path of its report"


def commands_after_the_demo() -> list[str]:
    lines = (ROOT / "docs/after-the-demo.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.startswith("  hvdgloo-run")]


def test_there_are_commands_to_try_after_the_demo() -> None:
    assert len(commands_after_the_demo()) >= 3
    assert all(len(line) <= 100 for line in commands_after_the_demo()), "make puts a folder before them"


@pytest.mark.parametrize("command", commands_after_the_demo())
def test_what_the_demo_tells_to_try_is_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parser = build_parser()
    flags, program, doctor = split_all(shlex.split(command)[1:], parser.values)
    line = command_line(parser, parser.given(flags), program, doctor=doctor)
    assert line.spec.command[-1].endswith("examples/torch_digits.py")
    assert line.notices == ()
