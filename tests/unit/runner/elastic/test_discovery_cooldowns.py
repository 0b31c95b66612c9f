"""Cooldown of a host that has failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvdgloo.runner.elastic.discovery import HostState


class TestHostState:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [1000.0]
        monkeypatch.setattr("hvdgloo.runner.elastic.discovery.time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr("hvdgloo.runner.elastic.discovery.random", SimpleNamespace(random=lambda: 0.0))
        return now

    def test_for_ever(self, clock: list[float]) -> None:
        state = HostState()
        event = state.get_event()
        assert not state.is_blacklisted()
        assert not state.is_resurrected()
        state.blacklist()
        assert event.is_set()
        clock[0] += 1e9
        assert state.is_blacklisted()
        state.whitelist()
        assert not state.is_blacklisted()
        assert not state.get_event().is_set()

    def test_for_longer_each_time(self, clock: list[float]) -> None:
        state = HostState((10, 30))
        for seconds in (20, 30):
            state.blacklist()
            state.blacklist()  # changes nothing: it is out already
            clock[0] += seconds - 0.1
            assert state.is_blacklisted()
            clock[0] += 0.2
            assert not state.is_blacklisted()
            assert state.is_resurrected()
            state.whitelist()
            assert not state.is_resurrected()
