"""Settings of JAX for the tests of hvdgloo.jax."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(autouse=True, scope="package")
def _eight_bytes() -> Iterator[None]:
    """Expected values are numpy's, of float64."""
    import jax

    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)
