"""``hvdgloo-run top``: how it finds a job, what it prints, and what it does on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdgloo._observe.page.page import Page
from hvdgloo._observe.top import command, source
from hvdgloo._observe.top.source import GoneError, decoded, of_link
from hvdgloo._observe.trace_control import BusyError, Trace
from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous import _auth as auth
from hvdgloo.rendezvous._page_server.server import PageServer
from hvdgloo.runner.cli.main import main
from tests.support.observed import SimulatedJob
from tests.support.page import script
from tests.support.terminal import Terminal, terminal

SECRET = bytes(range(32))
PATIENCE = 50.0
ID = "0123456789abcdef" * 2
JOB = SimulatedJob(ranks=4)
JOB.advance(5)

PUBLISHER = """if True:
    import os, sys
    from hvdgloo._observe.jobs import JobFile, published
    folder, id, unix, token, control = sys.argv[1:]
    with published(JobFile(id, os.getpid(), "hvdgloo-run\\tx", 1e9, unix, token, "", control), folder):
        print(os.getpid(), flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The private directory of a user who runs no job. Its name is short, as the names of sockets must be."""
    with tempfile.TemporaryDirectory(prefix="top") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        own = Path(runtime, "hvdgloo")
        own.mkdir(mode=0o700)
        yield own


@pytest.fixture
def server(folder: Path) -> Iterator[PageServer]:
    with PageServer(Page(JOB.observatory), secret=SECRET, unix=str(folder / "s")) as server:
        yield server


class Published:
    """A process that has published a job, as launchers do, and ends when it is told to."""

    def __init__(self, folder: Path, id: str = ID, control: str = "") -> None:
        arguments = [str(folder), id, str(folder / "s"), auth.status_token(SECRET), control]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.pid = int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.communicate("", timeout=50)


@pytest.fixture
def published(server: PageServer, folder: Path) -> Iterator[Published]:
    job = Published(folder)
    yield job
    job.end()


def top(*arguments: str) -> tuple[int, str]:
    out = io.StringIO()
    return command.main(arguments, out, os.environ), out.getvalue()


def test_once(published: Published) -> None:
    status, text = top("--once")
    assert status == 0
    assert text.splitlines()[0].startswith("running 5 s  hvdgloo-run -np 4 python train.py")
    assert len(text.splitlines()) > 8
    assert top()[1] == text  # as this is no terminal


def test_as_json(published: Published) -> None:
    status, text = top("--once", "--json")
    assert status == 0
    (line,) = text.splitlines()
    assert json.loads(line)["ranks"]["rank"] == [0, 1, 2, 3]
    assert len(json.loads(line)["series"]["at"]) >= 5
    assert decoded(text.encode()).job.size == 4


def test_who_looks_first_waits_for_the_ranks_to_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are asked when the job is observed, and answer within a second."""
    job = SimulatedJob(ranks=2, slow=None)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            job.advance(3)

    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    with PageServer(Page(job.observatory), secret=SECRET, unix=str(folder / "s")):
        published = Published(folder)
        assert "computing" in top("--once")[1].splitlines()[-1]
        assert json.loads(top("--once", "--json")[1])["job"]["state"] == "running"
        published.end()
    assert len(waits) == 3


def test_json_goes_on_until_the_job_is_over(
    published: Published, server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            server.stop()

    monkeypatch.setattr(command, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    status, text = top("--json", "--interval", "2.5")
    assert status == 0
    assert waits == [2.5] * 3
    assert [json.loads(line)["job"]["size"] for line in text.splitlines()] == [4, 4, 4]


def test_a_new_link(published: Published, server: PageServer) -> None:
    link = top("--link")[1].strip()
    assert link.startswith(server.address)
    source = of_link(link)
    assert decoded(source.snapshot()).job.size == 4
    source.close()
    with pytest.raises(ConfigError, match="each works once"):
        of_link(link)


def test_the_token_for_scripts(published: Published, server: PageServer) -> None:
    token = top("--token")[1].strip()
    assert script(server, token).get("/v1/job").status == 200
    assert script(server, token).post("/v1/traces", {"steps": 1}).status == 403


class Tracing:
    """Has steps traced; ready at the second look."""

    def __init__(self, folder: Path, state: str = "ready") -> None:
        self._file = folder / "merged"
        self._file.write_bytes(b"[]")
        self._state = state
        self._looks = 0

    def trace(self, steps: int) -> Trace:
        if self._looks:
            raise BusyError("the job is not running, so there are no steps to be traced")
        return Trace(1, steps, "tracing", "")

    def traces(self) -> list[Trace]:
        self._looks += 1
        return [Trace(1, 5, "tracing" if self._looks == 1 else self._state, "2 ranks of 2", 2)]

    def path(self, number: int) -> str:
        return str(self._file)


def test_steps_are_traced(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    control = Tracing(tmp_path)
    with PageServer(Page(JOB.observatory, control), secret=SECRET, unix=str(folder / "s")):
        job = Published(folder, control=auth.control_token(SECRET))
        assert top("--trace", "5") == (0, "hvdgloo-trace-1.json: 2 ranks of 2; open it in ui.perfetto.dev\n")
        assert (tmp_path / "hvdgloo-trace-1.json").read_bytes() == b"[]"
        with pytest.raises(ConfigError, match="refuses: the job is not running"):
            top("--trace", "5")
        job.end()


def test_a_trace_that_fails_and_one_that_would_overwrite_another(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hvdgloo-trace-1.json").write_text("mine")
    for state, message in (("ready", "cannot be written: File exists"), ("failed", "failed: 2 ranks of 2")):
        control = Tracing(tmp_path, state)
        with PageServer(Page(JOB.observatory, control), secret=SECRET, unix=str(folder / "s")):
            job = Published(folder, control=auth.control_token(SECRET))
            with pytest.raises(ConfigError, match=message):
                top("--trace", "5")
            job.end()
    assert (tmp_path / "hvdgloo-trace-1.json").read_text() == "mine"


def test_a_mistyped_option_is_recognized() -> None:
    with pytest.raises(ConfigError, match=r"^top: unknown argument --onec; did you mean --once\?$"):
        top("--onec")


def test_tracing_must_have_been_allowed(published: Published) -> None:
    with pytest.raises(ConfigError, match="--page-control"):
        top("--trace", "5")
    for steps in ("0", "x", "1001", "-1"):
        with pytest.raises(ConfigError, match=r"is not a number of steps from 1 to 1,000|expected one argument"):
            top("--trace", steps)


def test_without_rich_it_is_plain_text(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    _, drawn = top("--once")
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, text = top("--once")
    assert [line.split() for line in text.splitlines()] == [line.split() for line in drawn.splitlines()]


def test_a_job_elsewhere_is_read_by_its_link(server: PageServer) -> None:
    assert top(server.link(), "--once")[1].startswith("running")


@pytest.mark.parametrize("link", ["http://127.0.0.1:1", "ftp://h/?token=x", "http://h/x?y=z", "http:///?token=x"])
def test_what_is_no_link(link: str) -> None:
    with pytest.raises(ConfigError, match=r"looks like http://HOST:PORT/\?token="):
        top(link)


def test_a_job_is_named_by_its_id_or_its_launcher(published: Published, folder: Path) -> None:
    other = Published(folder, "f" * 32)
    for name in (ID, ID[:5], str(published.pid)):
        assert top(name, "--once")[0] == 0
    with pytest.raises(
        ConfigError,
        match=r"several jobs match; name one of these:\n  job +runs for  launcher  command\n"
        r"(  \w{12}  \d+ d( \d+ h)?  +\d+  hvdgloo-run\\tx\n?){2}$",
    ):
        top("--once")
    with pytest.raises(ConfigError, match="there is no job nix; these are running"):
        top("nix")
    status, listed = top()
    assert status == 0
    assert listed.startswith("You are running 2 jobs on this host; hvdgloo-run top JOB shows one of them:\n  job ")
    assert str(other.pid) in listed
    other.end()
    assert top("--once")[0] == 0


def test_there_is_no_job(folder: Path) -> None:
    with pytest.raises(ConfigError, match="you are running no job on this host"):
        top()


@pytest.mark.parametrize("interval", ["0", "-1", "x", "nan", "1e9"])
def test_intervals_that_are_none(interval: str) -> None:
    with pytest.raises(ConfigError, match="is not a number of seconds"):
        top("--interval", interval)


def test_a_job_that_does_not_answer(published: Published, server: PageServer) -> None:
    server.stop()
    with pytest.raises(GoneError, match="does not answer"):
        top("--once")


@pytest.mark.parametrize("text", [b"{}", b"[]", b"x", b'{"schema": 0}', b'{"schema": 1, "job": 3}'])
def test_another_version_is_recognized(text: bytes) -> None:
    with pytest.raises(ConfigError, match="another version of hvdgloo"):
        decoded(text)


OF_TERMINAL = "\x1b]0;gotcha\x07\x1b[2J\x9b2J\r\n"


@contextmanager
def hostile(status: int, body: bytes, *, endless: bool = False) -> Iterator[str]:
    """A link to what says it is a job's page: it lets every reader in, and then gives this answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            entering = self.path.startswith("/?token=")
            self.rfile.read(int(self.headers["Content-Length"] or 0))  # what is left unread resets the connection
            self.send_response(200 if entering else status)
            if entering:
                self.send_header("Set-Cookie", "hvdgloo=x; Path=/at/x/")
            if entering or not endless:
                self.send_header("Content-Length", str(0 if entering else len(body)))
            self.end_headers()
            try:
                while not entering:
                    self.wfile.write(body)
                    if not endless:
                        break
            except OSError:
                pass  # it was enough for the reader

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/?token=x"
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize("flags", [("--once",), ("--json", "--once"), ("--link",), ("--trace", "3")], ids=" ".join)
@pytest.mark.parametrize("body", [json.dumps({"reason": OF_TERMINAL}).encode(), OF_TERMINAL.encode(), b"[" * 100_000])
def test_a_refusal_does_nothing_to_the_terminal(flags: tuple[str, ...], body: bytes) -> None:
    with hostile(403, body) as link, pytest.raises(ConfigError, match="refuses: ") as caught:
        top(*flags, link)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("status", [200, 403])
@pytest.mark.parametrize("flags", [("--once",), ("--json", "--once"), ("--link",), ("--trace", "3")], ids=" ".join)
def test_an_answer_without_an_end_is_not_read_to_it(
    flags: tuple[str, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_MOST", 4 << 20)
    with hostile(status, b" " * (1 << 20), endless=True) as link, pytest.raises(GoneError, match="longer than 4 MiB"):
        top(*flags, link)


RANKS = {"rank": [0], "host": [0], "state": [0]}
STRANGE = [
    b"x",
    b"{}",
    json.dumps({"schema": 1, "ranks": RANKS}).encode(),
    json.dumps(
        {"schema": 1, "url": OF_TERMINAL, "number": 1, "steps": 1, "state": "ready", "text": OF_TERMINAL}
    ).encode(),
    b'{"schema": 1, "job": {"message": "\x1b[2J"}}',
]


@pytest.mark.parametrize("flags", [("--once",), ("--json", "--once"), ("--link",), ("--trace", "3")], ids=" ".join)
@pytest.mark.parametrize("body", STRANGE)
def test_a_strange_answer_is_an_error_in_a_line_or_harmless(
    flags: tuple[str, ...], body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_SETTLING", 0.0)
    with hostile(200, body) as link:
        try:
            _, printed = top(*flags, link)
        except ConfigError as error:
            printed = str(error)
    assert all(line.isprintable() for line in printed.split("\n"))


def test_the_launcher_s_command_line_knows_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert "you are running no job on this host" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["top", "--help"])
    assert ended.value.code == 0
    assert "usage: hvdgloo-run top" in capsys.readouterr().out


WITHOUT_RICH = """if True:
    import importlib.util, sys
    find_spec = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "rich" else find_spec(name, package)
    sys.modules["rich"] = None
    from hvdgloo.runner.cli.main import main
    sys.exit(main(["top", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("program", [("-m", "hvdgloo.runner", "top"), ("-c", WITHOUT_RICH)], ids=["rich", "plain"])
def test_on_a_terminal(published: Published, server: PageServer, folder: Path, program: tuple[str, ...]) -> None:
    """It takes the whole screen, keys work, and what was seen last stays when the job is over."""
    with started("--interval", "0.2", runtime=folder.parent, program=program) as screen:
        screen.wait_for(r"Rank 3 \(h2\) was last in", PATIENCE)
        assert b"\x1b[?1049h" in screen.raw  # the alternate screen
        first = rows(screen)
        screen.type("j")
        screen.until(lambda: rows(screen) == first[1:], PATIENCE, "the second rank on top")
        screen.type("\x1b[A")
        screen.until(lambda: rows(screen) == first, PATIENCE, "the first rank on top")
        server.stop()
        screen.wait_for(r"The job is over\.", PATIENCE)
        assert screen.end(PATIENCE) == 0
        assert b"Rank 3 (h2) was last in" in screen.raw.rpartition(b"\x1b[?1049l")[2]


@pytest.mark.parametrize("key", ["q", "\x03"], ids=["q", "Ctrl-C"])
def test_it_ends_when_asked_to(published: Published, folder: Path, key: str) -> None:
    with started("--interval", "3600", runtime=folder.parent) as screen:
        screen.wait_for("rank", PATIENCE)
        screen.type(key)
        assert screen.end(PATIENCE) == 0
        assert b"Traceback" not in screen.raw


def test_a_reader_that_goes_away_ends_it(published: Published, folder: Path) -> None:
    command_line = [sys.executable, "-m", "hvdgloo.runner", "top", "--json", "--interval", "0.1"]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(folder.parent)}
    with subprocess.Popen(command_line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["job"]["size"] == 4
        process.stdout.close()
        assert process.wait(PATIENCE) == 128 + signal.SIGPIPE
        assert process.stderr is not None
        assert process.stderr.read() == b""


def started(
    *arguments: str, runtime: Path, program: tuple[str, ...] = ("-m", "hvdgloo.runner", "top")
) -> AbstractContextManager[Terminal]:
    """``top`` on a terminal, for a user with this runtime folder."""
    env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    return terminal(*program, *arguments, env=env, cwd=runtime)


def rows(screen: Terminal) -> list[str]:
    """The ranks in the table."""
    return [found[1] for line in screen.lines if (found := re.match(r" *(\d+)  h\d", line))]
