"""The handler of hvdgloo's messages: its own, or the program's. Each message is on the terminal once."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator

import pytest

from hvdgloo._job.logging import configure_logging
from hvdgloo.config import Config

LOG = logging.getLogger("hvdgloo")
ROOT = logging.getLogger()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    kept = [(log, log.handlers[:], log.level, log.propagate) for log in (LOG, ROOT)]
    LOG.handlers = []
    yield
    for log, handlers, level, propagate in kept:
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of a warning on the terminal."""
    logging.getLogger("hvdgloo.test").warning("look")
    captured = capsys.readouterr()
    return [line for line in (captured.err + captured.out).splitlines() if "look" in line]


@pytest.mark.parametrize(("agent", "place"), [("", " [3]"), ("0123", "")], ids=["alone", "under a launcher"])
def test_our_own_handler_shows_the_rank_where_nothing_else_does(
    agent: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(Config(log_hide_time=True, agent_id=agent), 3)
    (line,) = shown(capsys)
    assert line.startswith(f"[WARNING {os.path.basename(__file__)}:")
    assert line.endswith(f"]{place}: look")


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_a_root_logger_that_writes_to_the_terminal_is_enough(capsys: pytest.CaptureFixture[str], stream: str) -> None:
    configure_logging(Config(), 0)
    handler = logging.StreamHandler(getattr(sys, stream))
    handler.setFormatter(logging.Formatter("root: %(message)s"))
    ROOT.addHandler(handler)  # after init(), as before it
    assert shown(capsys) == ["root: look"]
    ROOT.removeHandler(handler)
    assert len(shown(capsys)) == 1


def test_a_root_logger_that_writes_elsewhere_gets_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Config(), 0)
    elsewhere = io.StringIO()
    ROOT.addHandler(logging.StreamHandler(elsewhere))
    assert len(shown(capsys)) == 1
    assert elsewhere.getvalue() == "look\n"


def test_a_root_logger_that_would_not_show_it_does_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Config(), 0)
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    ROOT.addHandler(handler)
    assert len(shown(capsys)) == 1
    handler.setLevel(logging.NOTSET)
    LOG.propagate = False
    assert len(shown(capsys)) == 1


def test_a_program_s_own_handler_of_our_logger_is_the_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    own = io.StringIO()
    LOG.addHandler(logging.StreamHandler(own))
    configure_logging(Config(), 0)
    assert shown(capsys) == []
    assert own.getvalue() == "look\n"
