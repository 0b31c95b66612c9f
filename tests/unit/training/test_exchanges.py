"""Exchanges of which Ctrl-C may end the wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvdgloo._training.exchanges import ResumableExchanges


class Answers:
    """Exchanges that have been started; each wait takes the next answer, an error or a value."""

    def __init__(self, *answers: BaseException | int) -> None:
        self._answers = list(answers)
        self.started = 0
        self.used: list[int] = []

    def start(self) -> Callable[[], int]:
        self.started += 1
        return self._wait

    def _wait(self) -> int:
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def test_an_interrupted_wait_is_taken_up_again_and_nothing_is_sent_twice() -> None:
    exchanges, answers = ResumableExchanges(), Answers(KeyboardInterrupt(), 3)
    with pytest.raises(KeyboardInterrupt):
        exchanges.make("kinds", answers.start, answers.used.append)
    assert "kinds" in exchanges
    exchanges.make("kinds", answers.start, answers.used.append)
    assert (answers.started, answers.used) == (1, [3])
    assert "kinds" not in exchanges


def test_a_failed_exchange_is_made_again() -> None:
    exchanges, answers = ResumableExchanges(), Answers(ValueError("ranks disagree"), 4)
    with pytest.raises(ValueError, match="ranks disagree"):
        exchanges.make("kinds", answers.start, answers.used.append)
    exchanges.make("kinds", answers.start, answers.used.append)
    assert (answers.started, answers.used) == (2, [4])


def test_of_another_job_nothing_is_taken_up() -> None:
    exchanges, answers = ResumableExchanges(), Answers(KeyboardInterrupt(), 5)
    with pytest.raises(KeyboardInterrupt):
        exchanges.make("kinds", answers.start, answers.used.append)
    exchanges.clear()
    exchanges.make("kinds", answers.start, answers.used.append)
    assert (answers.started, answers.used) == (2, [5])
