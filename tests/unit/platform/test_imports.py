"""Python's collector while modules are imported."""

from __future__ import annotations

import gc

import pytest

from hvdgloo._platform.imports import collector_paused


def test_the_collector_rests_and_goes_on() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_goes_on_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), collector_paused():
        raise ImportError
    assert gc.isenabled()


def test_a_program_without_it_stays_without() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
