"""A process that is used for a second job, as Spark's Python workers are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hvdgloo._job import process
from hvdgloo.errors import ConfigError


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a job of its own, and has been initialized."""
    monkeypatch.delenv("HVDGLOO_RENDEZVOUS", raising=False)
    process.init()
    yield
    process.shutdown()


@pytest.mark.usefixtures("alone")
def test_init_in_a_process_of_another_job_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDGLOO_RENDEZVOUS", "10.0.0.9:4000")
    with pytest.raises(ConfigError, match=r"still belongs to a job of its own.*10\.0\.0\.9:4000.*hvd\.shutdown\(\)"):
        process.init()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("rendezvous", "job", "wrong"),
    [("10.0.0.9:4000", "a", False), ("10.0.0.9:4001", "a", True), ("10.0.0.9:4000", "b", True), ("", "", False)],
)
def test_the_same_job_is_recognised(monkeypatch: pytest.MonkeyPatch, rendezvous: str, job: str, wrong: bool) -> None:
    """By its server's address and its id, since a port may be used again; init() may be called twice."""
    context = process.init()
    monkeypatch.setattr(context, "config", replace(context.config, rendezvous="10.0.0.9:4000", job_id="a"))
    monkeypatch.setenv("HVDGLOO_RENDEZVOUS", rendezvous)
    monkeypatch.setenv("HVDGLOO_JOB_ID", job)
    if wrong:
        with pytest.raises(ConfigError, match=r"still belongs to the job at 10\.0\.0\.9:4000"):
            process.init()
    else:
        assert process.init() is context
