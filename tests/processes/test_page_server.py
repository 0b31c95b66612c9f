"""The page's server over real sockets: who is let in, what is refused, and what those who may read get."""

from __future__ import annotations

import json
import re
import socket
import ssl
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hvdgloo._net.tls import Tls
from hvdgloo._observe.observatory import Observatory
from hvdgloo._observe.page import application, feed
from hvdgloo._observe.page.files import File
from hvdgloo._observe.page.page import Page
from hvdgloo._observe.top.source import UnixConnection
from hvdgloo._observe.trace_control import BusyError, Trace
from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous import _auth as auth
from hvdgloo.rendezvous._page_server.server import PageServer
from tests.support.launching import run_command
from tests.support.observed import SimulatedJob
from tests.support.page import PATIENCE, Answer, Caller, browser, script
from tests.support.rendezvous import until

SECRET = bytes(range(32))
STATUS, CONTROL = auth.status_token(SECRET), auth.control_token(SECRET)


class Tracing:
    """Has steps traced: the first trace is ready, and a second one is not."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._traces: list[Trace] = []

    def trace(self, steps: int) -> Trace:
        if self._traces:
            raise BusyError("trace 1 is not finished")
        self._path.write_text('[{"name": "x"}]')
        self._traces.append(Trace(1, steps, "ready", "done", 15))
        return self._traces[-1]

    def traces(self) -> list[Trace]:
        return self._traces

    def path(self, number: int) -> str:
        if number == 7:
            raise BusyError("trace 7 is not finished")
        if number != 1 or not self._traces:
            raise KeyError(number)
        return str(self._path)


@pytest.fixture(scope="module")
def job() -> SimulatedJob:
    job = SimulatedJob(ranks=4)
    job.advance(5)
    return job


@pytest.fixture
def server(job: SimulatedJob) -> Iterator[PageServer]:
    with PageServer(Page(job.observatory), secret=SECRET) as server:
        yield server


@pytest.fixture
def controlled(job: SimulatedJob, tmp_path: Path) -> Iterator[PageServer]:
    with PageServer(Page(job.observatory, Tracing(tmp_path / "trace.json")), secret=SECRET) as server:
        yield server


def refused(answer: Answer, status: int, reason: str) -> None:
    assert (answer.status, reason in answer.json()["reason"]) == (status, True), answer.body


# Links and cookies.


def test_the_printed_link_opens_the_page(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "files", lambda: {"index.html": File(b"<p>page", "text/html", '"t"')})
    link = urlsplit(server.link())
    opened = Caller(server).get(f"/?{link.query}", Accept="text/html")
    # Not a redirect: browsers would keep the cookie back after a click in a notebook, which is another site.
    assert opened.status == 200
    found = re.search(rb'http-equiv="refresh" content="0; url=(.+?)"', opened.body)
    assert found is not None
    cookie = opened.headers["Set-Cookie"].partition(";")[0]
    page = Caller(server).get(found[1].decode(), Cookie=cookie)
    assert (page.status, page.body) == (200, b"<p>page")


def test_a_link_that_was_used_opens_nothing_for_others(server: PageServer) -> None:
    query = urlsplit(server.link()).query
    stranger = Caller(server)
    assert "Set-Cookie" in stranger.get(f"/?{query}").headers
    again = stranger.get(f"/?{query}")
    assert "Set-Cookie" not in again.headers
    assert b"<h1>This link was already used.</h1>" in again.body
    assert b"hvdgloo-run top --link" in again.body
    assert b"http-equiv" not in again.body  # or others would not have the time to read it
    place = re.search(rb"href=\"(/.+?)\"", again.body)
    assert place is not None  # a browser that has the cookie finds its page again; others find this
    refused(stranger.get(place[1].decode()), 401, "needs a link")


def test_looking_ahead_does_not_use_a_link_up(server: PageServer) -> None:
    path = f"/?{urlsplit(server.link()).query}"
    assert Caller(server).request("HEAD", path).status == 401
    refused(Caller(server).get(path, Sec_Purpose="prefetch"), 403, "beforehand")
    assert Caller(server).get(path).status == 200


@pytest.mark.parametrize(
    "path", ["/", "/?token=", "/?token=x", "/v1/job", "/events", "/static/page.js", "/nix", "/at/x/"]
)
def test_strangers_see_nothing(server: PageServer, path: str) -> None:
    answer = Caller(server).get(path)
    refused(answer, 401, "link")
    assert (answer.headers["Connection"], answer.headers["WWW-Authenticate"]) == ("close", "Bearer")


def test_strangers_with_a_browser_are_told_in_words(server: PageServer) -> None:
    answer = Caller(server).get("/?token=<script>", Accept="text/html,*/*")
    assert (answer.status, answer.headers["Content-Type"]) == (401, "text/html; charset=utf-8")
    assert b"This link is not (or no longer) valid" in answer.body
    assert b"<script" not in answer.body


def test_after_a_click_on_another_site_the_page_is_asked_for_once_more(server: PageServer) -> None:
    """The browser has kept the cookie back; a request of the server's own page brings it, or the refusal stays."""
    place = browser(server).place
    clicked = Caller(server).get(place, Accept="text/html", Sec_Fetch_Site="cross-site")
    assert clicked.status == 401
    assert f"url={place}".encode() in clicked.body
    again = Caller(server).get(place, Accept="text/html", Sec_Fetch_Site="same-origin")
    assert again.status == 401
    assert b"http-equiv" not in again.body


def test_the_cookie_counts_at_its_place_alone(server: PageServer) -> None:
    visitor = browser(server)
    assert visitor.get("v1/job").status == 200
    refused(visitor.get("/v1/job"), 401, "needs a link")


def test_with_tls_the_cookie_is_for_tls(job: SimulatedJob) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with PageServer(Page(job.observatory), secret=SECRET, tls=Tls()) as server:
        assert server.link().startswith("https://127.0.0.1:")
        with urllib.request.urlopen(server.link(), context=context, timeout=PATIENCE) as opened:
            header = opened.headers["Set-Cookie"]
        assert header.startswith("__Secure-")
        assert header.endswith("; Secure")
        place = re.search(r"Path=(.+?);", header)
        assert place is not None
        address = f"{server.address[:-1]}{place[1]}events"
        request = urllib.request.Request(address, headers={"Cookie": header.partition(";")[0]})
        with urllib.request.urlopen(request, context=context, timeout=PATIENCE) as events:
            assert b"".join(events.readline() for _ in range(3)).startswith(b"retry: 2000\n\nevent: snapshot\n")


# Tokens.


@pytest.mark.parametrize("token", [STATUS, CONTROL])
def test_scripts_show_a_token(server: PageServer, token: str) -> None:
    assert script(server, token).get("/v1/job").status == 200


def test_a_wrong_token_is_refused(server: PageServer) -> None:
    refused(script(server, "x").get("/v1/job"), 401, "the token is wrong")


def test_who_has_a_token_gets_new_links(server: PageServer) -> None:
    link = urlsplit(script(server, STATUS).post("/v1/links", None).json()["url"])
    assert "Set-Cookie" in Caller(server).get(f"/?{link.query}").headers
    refused(browser(server).post("v1/links", None, Origin=server.address[:-1]), 403, "with a token")


# What other sites try.


def test_another_site_s_name_that_leads_here_is_refused(server: PageServer) -> None:
    refused(browser(server).get("v1/job", Host="evil.example:80"), 421, "this server is not evil.example:80")
    refused(script(server, STATUS).get("/v1/job", Host="evil.example"), 421, "this server is not evil.example")


def test_names_that_were_given_lead_here(job: SimulatedJob) -> None:
    with PageServer(Page(job.observatory), secret=SECRET, names=["gate.example"]) as server:
        assert script(server, STATUS).get("/v1/job", Host="gate.example:443").status == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_another_site_makes_a_browser_fetch_is_refused(server: PageServer, site: str) -> None:
    """``same-site``: another port of this host, which SameSite cookies do not tell apart."""
    visitor = browser(server)
    refused(visitor.get("v1/job", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors"), 403, "another site")
    assert visitor.get("v1/job", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate").status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "https://localhost"])
def test_another_site_cannot_push_the_button(controlled: PageServer, origin: str) -> None:
    refused(browser(controlled).post("v1/traces", {"steps": 1}, Origin=origin), 403, "another site")


def test_what_changes_something_must_say_where_it_comes_from(controlled: PageServer) -> None:
    refused(browser(controlled).post("v1/traces", {"steps": 1}), 403, "must have an Origin")
    assert browser(controlled).get("v1/traces").json()["traces"] == []


def test_every_answer_says_what_the_page_may_do(server: PageServer) -> None:
    visitor = browser(server)
    for answer in (
        visitor.get("v1/job"),
        visitor.get("nix"),
        visitor.get("v1/job", Host="evil.example"),
        Caller(server).get("/"),
        Caller(server).get(f"/?{urlsplit(server.link()).query}"),
    ):
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answer.headers["Cache-Control"] == "no-store"


# What is there to read.


def test_the_page_s_files_are_asked_for_again_only_if_they_have_changed(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "files", lambda: {"a/x.js": File(b"let x", "text/javascript", '"tag"')})
    visitor = browser(server)
    first = visitor.get("static/a/x.js")
    assert (first.status, first.body, first.headers["ETag"]) == (200, b"let x", '"tag"')
    assert first.headers["Cache-Control"] == "no-cache"
    assert visitor.get("static/a/x.js", If_None_Match='"tag"').status == 304
    assert visitor.get("static/a/x.js", If_None_Match='"other"').status == 200


@pytest.mark.parametrize(
    "path", ["static/../server.py", "static/%2e%2e/server.py", "static//etc/passwd", "static/", "static"]
)
def test_other_files_are_not_the_page_s(server: PageServer, path: str) -> None:
    assert browser(server).get(path).status == 404


def test_the_job(server: PageServer, job: SimulatedJob) -> None:
    answer = browser(server).get("v1/job")
    assert answer.headers["Content-Type"] == "application/json"
    snapshot = answer.json()
    assert snapshot["job"]["command"] == "hvdgloo-run -np 4 python train.py"
    assert snapshot["job"]["control"] is False
    assert len(snapshot["series"]["at"]) >= 5
    brief = browser(server).get("v1/job?curves=0").json()
    assert (brief["series"]["at"], brief["heat"]["at"]) == ([], [])
    assert brief["ranks"] == snapshot["ranks"]


def test_one_rank_s_curves(server: PageServer) -> None:
    assert len(browser(server).get("v1/ranks/3/series").json()["at"]) >= 5
    refused(browser(server).get("v1/ranks/4/series"), 404, "no rank 4")
    assert browser(server).get("v1/ranks/-1/series").status == 404


def test_output(server: PageServer) -> None:
    get = browser(server).get
    lines = get("v1/output").json()
    assert [line["number"] for line in lines] == sorted(line["number"] for line in lines)
    assert {line["rank"] for line in get("v1/output?rank=2").json()} == {2}
    assert [line["number"] for line in get("v1/output?after=3&limit=2").json()] == [4, 5]
    assert [line["number"] for line in get("v1/output?before=6&limit=2").json()] == [4, 5]
    assert get("v1/output?search=LOSS&limit=1").json() == [lines[-1]]
    assert get("v1/output?search=nothing%20of%20this").json() == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=2001", "rank=x", "after=-1", "before=1e3", "rank=", "limit=%C2%B2", f"after={'9' * 16}"]
)
def test_numbers_that_are_none(server: PageServer, query: str) -> None:
    answer = script(server, STATUS).get(f"/v1/output?{query}")
    assert answer.status == 400
    assert query.partition("=")[0] in answer.json()["reason"]


def test_metrics_are_prometheus(server: PageServer) -> None:
    answer = script(server, STATUS).get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    assert b"\n# TYPE hvdgloo_" in b"\n" + answer.body


def test_routes_that_are_none(server: PageServer) -> None:
    refused(browser(server).get("nix"), 404, "no such route: GET /nix")
    refused(script(server, CONTROL).post("/v1/job", None), 405, "method is not allowed")


@pytest.mark.parametrize("path", ["/v1/hello", "/v1/kv/scope/key"])
def test_routes_of_the_rendezvous_are_none_of_the_page_s(server: PageServer, path: str) -> None:
    """Such requests are answered by the front's own thread."""
    refused(Caller(server).get(path), 401, "needs a link")
    refused(script(server, STATUS).get(path), 404, "no such route")


# Tracing.


def test_the_button_has_steps_traced(controlled: PageServer) -> None:
    visitor, origin = browser(controlled), controlled.address[:-1]
    assert visitor.get("v1/traces").json() == {"control": True, "traces": []}
    assert visitor.get("v1/job").json()["job"]["control"] is True
    started = visitor.post("v1/traces", {"steps": 10}, Origin=origin)
    assert (started.status, started.json()["steps"]) == (202, 10)
    refused(visitor.post("v1/traces", {"steps": 10}, Origin=origin), 409, "trace 1 is not finished")
    trace = visitor.get("v1/traces/1")
    assert trace.body == b'[{"name": "x"}]'
    assert trace.headers["Content-Disposition"] == "attachment; filename=hvdgloo-trace-1.json"
    refused(visitor.get("v1/traces/2"), 404, "no trace 2")
    refused(visitor.get("v1/traces/7"), 409, "not finished")


def test_tracing_is_a_right_of_its_own(server: PageServer, controlled: PageServer) -> None:
    order = {"steps": 1}
    refused(script(server, CONTROL).post("/v1/traces", order), 403, "--page-control")
    refused(browser(server).post("v1/traces", order, Origin=server.address[:-1]), 403, "--page-control")
    assert browser(server).get("v1/traces").json()["control"] is False
    refused(browser(server).get("v1/traces/1"), 404, "no trace 1")
    refused(script(controlled, STATUS).post("/v1/traces", order), 403, "may only read")
    assert script(controlled, STATUS).get("/v1/job").json()["job"]["control"] is False
    assert script(controlled, CONTROL).post("/v1/traces", order).status == 202


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"steps": "1"}', b'{"steps": 1.5}', b'{"steps": 1, "x": 1}', b"\xff", b"[" * 4000]
)
def test_orders_that_are_none(controlled: PageServer, body: bytes) -> None:
    answer = script(controlled, CONTROL).request("POST", "/v1/traces", body, Content_Type="application/json")
    refused(answer, 400, '{"steps": n}')


@pytest.mark.parametrize("steps", [0, -1, 1001])
def test_how_many_steps_can_be_traced(controlled: PageServer, steps: int) -> None:
    refused(script(controlled, CONTROL).post("/v1/traces", {"steps": steps}), 400, "between 1 and 1000")


def test_forms_are_no_orders(controlled: PageServer) -> None:
    answer = script(controlled, CONTROL).request("POST", "/v1/traces", b'{"steps": 1}', Content_Type="text/plain")
    refused(answer, 415, "application/json")


def test_bodies_are_small(controlled: PageServer) -> None:
    assert script(controlled, CONTROL).post("/v1/traces", "x" * 5000).status == 413
    answer = script(controlled, CONTROL).request(
        "POST", "/v1/traces", b"2\r\n{}\r\n0\r\n\r\n", Transfer_Encoding="chunked"
    )
    refused(answer, 411, "Content-Length")


# Live events.


def test_events_arrive_as_things_happen(job: SimulatedJob) -> None:
    with PageServer(Page(job.observatory), secret=SECRET) as server, browser(server).watch() as events:
        assert events.headers["Content-Type"].startswith("text/event-stream")
        assert events.next()[0] == "snapshot"
        last = events.id
        job.advance()
        assert events.next()[0] == "update"
        with browser(server).watch(Last_Event_ID=last) as again:
            assert again.next()[0] == "update"
        server.stop("enough")
        kinds = [events.next(), events.next()]
        assert [kind for kind, _ in kinds] == ["snapshot", "end"]
        assert kinds[1][1] == {"reason": "enough"}
        assert events.next() == ("", None)


def test_only_so_many_can_watch(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MOST_READERS", 1)
    visitor = browser(server)
    assert visitor.request("HEAD", "events").status == 200
    with visitor.watch() as events:
        events.next()
        full = visitor.get("events")
        refused(full, 503, "as many readers as it can serve")
        assert full.headers["Retry-After"] == "5"
        assert visitor.get("v1/job").status == 200
    until(lambda: server.watchers == 0, "the connection's end", PATIENCE)


def test_who_watches_takes_no_thread(server: PageServer) -> None:
    visitor = browser(server)
    visitor.get("v1/job")
    before = threading.active_count()
    streams = [visitor.watch() for _ in range(40)]
    assert {stream.next()[0] for stream in streams} == {"snapshot"}
    # The one that writes events, and as many as answer at a time, which depends on the machine.
    assert threading.active_count() - before < len(streams) // 2
    for stream in streams:
        with stream:
            pass


# Its life.


def test_the_port_is_taken(job: SimulatedJob) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match=r"cannot listen on port"):
        PageServer(Page(job.observatory), secret=SECRET, port=other.getsockname()[1]).listen()


def test_the_link_is_known_before_anything_is_served(job: SimulatedJob) -> None:
    server = PageServer(Page(job.observatory), secret=SECRET).listen()
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", server.link())
        assert server.descriptors
        with pytest.raises(RuntimeError, match="listens already"):
            server.listen()
    finally:
        server.stop()
    assert server.descriptors == ()


def test_an_address_for_all_is_shown_by_the_host_s_name(job: SimulatedJob) -> None:
    server = PageServer(Page(job.observatory), secret=SECRET, addresses=["0.0.0.0"]).listen()
    assert server.address.startswith(f"http://{socket.gethostname()}:")
    server.stop()


def test_it_stops_quickly_and_may_be_stopped_again(job: SimulatedJob) -> None:
    server = PageServer(Page(job.observatory), secret=SECRET).start().start()
    address = urlsplit(server.address)
    with browser(server).watch() as events:
        events.next()
        began = time.monotonic()
        server.stop()
        server.stop()
        assert time.monotonic() - began < PATIENCE / 2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname or "", address.port or 0), timeout=PATIENCE).close()


def ask(path: str, target: str, **headers: str) -> tuple[int, Any]:
    with closing(UnixConnection(path)) as connection:
        connection.request("GET", target, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def test_a_unix_socket_asks_for_the_token_too(job: SimulatedJob, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with PageServer(Page(job.observatory), secret=SECRET, addresses=(), unix=path) as server:
        assert ask(path, "/v1/job")[0] == 401
        assert ask(path, "/v1/job", Authorization=f"Bearer {STATUS}")[1]["job"]["size"] == 4
        assert server.address == ""
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        with closing(UnixConnection(path)) as connection:
            connection.request("POST", "/v1/links", headers={"Authorization": f"Bearer {STATUS}"})
            refused(Answer(connection.getresponse()), 409, "without --page")
    assert not (tmp_path / "s").exists()


def test_a_socket_that_was_left_behind_is_replaced(job: SimulatedJob, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    with PageServer(Page(job.observatory), secret=SECRET, addresses=(), unix=path):
        assert ask(path, "/v1/job")[0] == 401


def test_a_file_is_not_replaced_by_a_socket(job: SimulatedJob, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigError, match="cannot listen on"):
        PageServer(Page(job.observatory), secret=SECRET, unix=str(tmp_path / "s")).listen()
    assert (tmp_path / "s").read_text() == "mine"


def test_nothing_is_made_before_it_is_asked_for(job: SimulatedJob, tmp_path: Path) -> None:
    made = threading.Event()

    def make() -> Observatory:
        made.set()
        return job.observatory

    path = str(tmp_path / "s")
    server = PageServer(Page(make), secret=SECRET, addresses=(), unix=path).start_on_demand()
    assert not made.is_set()
    assert ask(path, "/v1/job", Authorization=f"Bearer {STATUS}")[1]["job"]["size"] == 4
    assert made.is_set()
    server.stop()


def test_nothing_is_made_if_it_is_not_asked_for(tmp_path: Path) -> None:
    def make() -> Observatory:
        raise AssertionError("it was not asked for")

    server = PageServer(Page(make), secret=SECRET, addresses=(), unix=str(tmp_path / "s")).start_on_demand()
    server.stop()
    assert not (tmp_path / "s").exists()


def test_what_is_heavy_is_not_imported_before_it_is_asked_for(tmp_path: Path) -> None:
    program = f"""if True:
        import sys
        from hvdgloo._observe.page.page import Page
        from hvdgloo._observe.page.page import Page
        from hvdgloo.rendezvous._page_server.server import PageServer
        server = PageServer(Page(lambda: None), secret=bytes(32), unix={str(tmp_path / "s")!r}).start_on_demand()
        print(server.link())
        server.stop()
        print(*sorted({{"flask", "cheroot", "prometheus_client", "msgspec", "ssl"}} & set(sys.modules)))
    """
    done = run_command([sys.executable, "-c", program], timeout=50, check=True)
    assert done.stdout.splitlines()[1] == ""
