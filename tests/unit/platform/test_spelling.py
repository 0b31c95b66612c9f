"""Messages that hold text from elsewhere."""

from __future__ import annotations

import logging

import pytest

from hvdgloo._job.participant import Participant
from hvdgloo._platform.spelling import followed_by
from hvdgloo.config import Config
from hvdgloo.errors import RendezvousTimeoutError
from hvdgloo.rendezvous import RendezvousClient


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("connection refused", "connection refused; try again"),
        ("is it overloaded?", "is it overloaded? Try again"),
        ("it is gone.\n", "it is gone. Try again"),
        ("no!", "no! Try again"),
    ],
)
def test_a_clause_follows_whatever_mark_the_text_has(text: str, message: str) -> None:
    assert followed_by(RuntimeError(text), "try again") == message


def test_a_server_that_does_not_answer_yet_is_told_in_whole_sentences(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter([RendezvousTimeoutError("no answer; is its host overloaded?"), None])

    def local_address(self: RendezvousClient, *, timeout: float) -> str:
        error = next(answers)
        if error is not None:
            raise error
        return "127.0.0.1"

    monkeypatch.setattr(RendezvousClient, "local_address", local_address)
    monkeypatch.setattr(RendezvousClient, "is_elastic", lambda self, *, timeout: False)
    config = Config.from_env(
        {"HVDGLOO_RENDEZVOUS": "127.0.0.1:1", "HVDGLOO_SECRET": "ab" * 32, "HVDGLOO_START_TIMEOUT": "30"}
    )
    with caplog.at_level(logging.WARNING):
        Participant(config).client.close()
    assert caplog.messages == ["no answer; is its host overloaded? Trying for another 27 s (HVDGLOO_START_TIMEOUT)"]
