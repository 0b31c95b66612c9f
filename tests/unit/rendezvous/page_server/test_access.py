"""The access to a job's page: links that work once, cookies that count in one place, tokens, and names of the
server."""

from __future__ import annotations

import base64
import socket

import pytest

from hvdgloo.rendezvous import _auth as auth
from hvdgloo.rendezvous._page_server.access import Access, Visitor

SECRET = bytes(range(32))


def cookie(header: str | None) -> str:
    assert header
    return header.partition(";")[0]


def test_a_link_works_once() -> None:
    access = Access(SECRET)
    link = access.link()
    value = cookie(access.open(link))
    assert access.visitor(authorization="", cookies=value) == Visitor(controls=True, script=False)
    assert access.open(link) == ""  # no second cookie
    assert access.open("another") is None
    assert access.open(access.link()) != value


def test_a_cookie_counts_below_a_place_that_cannot_be_guessed() -> None:
    access = Access(SECRET)
    header = access.open(access.link())
    assert header is not None
    assert header.endswith(f"; Path={access.place}; HttpOnly; SameSite=Strict")
    assert len(access.place) > 20
    assert Access(SECRET).place != access.place


def test_with_tls_cookies_keep_to_tls() -> None:
    access = Access(SECRET, secure=True)
    header = access.open(access.link())
    assert header is not None
    assert header.startswith("__Secure-")
    assert header.endswith("; Secure")


def test_the_cookie_is_found_among_others() -> None:
    access = Access(SECRET)
    value = cookie(access.open(access.link()))
    visitor = access.visitor
    assert visitor(authorization="", cookies=f"a=b; hvdgloo=stale; {value}; =; c") is not None
    for wrong in ("", "hvdgloo=", "hvdgloo", value + "x", value.replace("hvdgloo", "hvdgloo2"), "hvdgloo=\udcff"):
        assert visitor(authorization="", cookies=wrong) is None


def test_cookies_of_another_server_are_worth_nothing() -> None:
    one, other = Access(SECRET), Access(SECRET)
    assert other.visitor(authorization="", cookies=cookie(one.open(one.link()))) is None


def test_the_status_token_reads_and_the_control_token_does_more() -> None:
    visitor = Access(SECRET).visitor
    status, control = auth.status_token(SECRET), auth.control_token(SECRET)
    assert status != control
    assert visitor(authorization=f"Bearer {status}", cookies="") == Visitor(controls=False, script=True)
    assert visitor(authorization=f"Bearer {control}", cookies="") == Visitor(controls=True, script=True)
    assert visitor(authorization=f"Bearer {auth.status_token(bytes(32))}", cookies="") is None
    assert visitor(authorization=status, cookies="") is None


def test_a_password_is_no_token_because_browsers_send_it_for_other_sites() -> None:
    basic = base64.b64encode(f"x:{auth.control_token(SECRET)}".encode()).decode()
    assert Access(SECRET).visitor(authorization=f"Basic {basic}", cookies="") is None


def test_a_wrong_token_is_not_mended_by_a_cookie() -> None:
    access = Access(SECRET)
    assert access.visitor(authorization="Bearer x", cookies=cookie(access.open(access.link()))) is None


def test_what_is_kept_is_bounded() -> None:
    access = Access(SECRET)
    first = access.link()
    links = [access.link() for _ in range(64)]
    assert access.open(first) is None
    oldest = cookie(access.open(links[0]))
    for _ in range(1024):
        newest = access.open(access.link())
    assert access.visitor(authorization="", cookies=oldest) is None
    assert access.visitor(authorization="", cookies=cookie(newest)) is not None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:80",
        "10.1.2.3",
        "[::1]:8080",
        "[fe80::1]",
        "localhost",
        "LocalHost:1",
        "x.localhost:5",
        "gate.example:8",
    ],
)
def test_names_that_lead_here(host: str) -> None:
    assert Access(SECRET, names=["Gate.example"]).answers_to(host)


def test_the_host_s_own_name_leads_here() -> None:
    access = Access(SECRET)
    assert access.answers_to(f"{socket.gethostname()}:80")
    assert access.answers_to(f"{socket.gethostname().upper()}.")


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "[evil]:80", "1.2.3", "a b"]
)
def test_other_names_do_not(host: str) -> None:
    """A page of evil.example whose name was made to lead here (DNS rebinding) must not be taken for ours."""
    assert not Access(SECRET).answers_to(host)
