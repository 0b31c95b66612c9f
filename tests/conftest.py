"""Fixtures for all tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import frameworks
from tests.support.world import World

BACKENDS = ("local", "gloo", "inline")


def _require(backend: str) -> None:
    """Skip what cannot run here, unless HVDGLOO_TEST_BACKENDS says that it must."""
    missing = backend == "gloo" and importlib.util.find_spec("torch") is None
    if missing:
        text = "the gloo backend needs torch"
        if backend in os.environ.get("HVDGLOO_TEST_BACKENDS", "").split(","):
            pytest.fail(text)
        pytest.skip(text)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend in turn."""
    _require(request.param)
    return str(request.param)


@pytest.fixture
def world(backend: str) -> Iterator[Callable[..., World]]:
    """``world(size, **settings)``: a World over each backend in turn, closed after the test."""
    worlds: list[World] = []

    def make(size: int, **options: Any) -> World:
        worlds.append(World(size, backend, **options))
        return worlds[-1]

    yield make
    for made in worlds:
        made.close()


@pytest.fixture(params=frameworks.NAMES)
def framework(request: pytest.FixtureRequest) -> frameworks.Framework:
    """Each framework in turn."""
    return frameworks.load(request.param)
