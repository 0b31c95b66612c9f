"""The entry point that torch calls."""

from __future__ import annotations

import pytest

from hvdgloo._torch_backend import why_too_old


@pytest.mark.parametrize("version", ["2.4.1", "2.6.0+cu124", "2.8.0a0+git123", "1.13"])
def test_an_old_torch_is_refused_in_a_sentence(version: str) -> None:
    assert why_too_old(version) == (
        f"torch.distributed over hvdgloo needs torch 2.9 or newer, and this is {version}: upgrade torch, or use the "
        'backend "gloo"'
    )


@pytest.mark.parametrize("version", ["2.9.0", "2.13.0+cpu", "2.15.0.dev20261101", "3.0.0", "built at home"])
def test_any_other_torch_is_not(version: str) -> None:
    assert why_too_old(version) == ""
