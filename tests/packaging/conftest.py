"""Shared fixtures of this folder: distributions that are built once, and an environment that has one installed."""

from __future__ import annotations

import pytest

from tests.packaging.building import Built, Environment, build_all, checkout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    return build_all(checkout(folder / "checkout"), folder)


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel that was made of the sdist."""
    return Environment(tmp_path_factory.mktemp("installed") / "venv", built.wheel)
