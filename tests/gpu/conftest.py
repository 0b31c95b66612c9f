"""Tests of this folder need a CUDA device."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    """Skip what needs a GPU, unless HVDGLOO_TEST_REQUIRE_GPU=1 says that it must run."""
    required = os.environ.get("HVDGLOO_TEST_REQUIRE_GPU") == "1"
    try:
        import torch
    except ImportError:
        reason = "torch is not installed"
    else:
        reason = "" if torch.cuda.is_available() else "needs a CUDA device"
    if reason and required:
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)
