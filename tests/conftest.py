"""Fixtures for all tests."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hvdgloo._backends.select import gloo_provider
from tests.support import frameworks
from tests.support.hosts import Bed, HostSpec, available
from tests.support.launching import Launcher, clean_environment, launcher_in
from tests.support.world import MakeWorld, World, closed_later

BACKENDS = ("local", "gloo", "shm")
"""Backends that contracts are checked on; a module may have a list of its own under this name."""


def _require(backend: str) -> None:
    """Skip what cannot run here, unless HVDGLOO_TEST_BACKENDS says that it must."""
    if backend in ("gloo", "hierarchical") and not gloo_provider("auto"):
        text = f"the {backend} backend needs torch or pygloo"
        if backend in os.environ.get("HVDGLOO_TEST_BACKENDS", "").split(","):
            pytest.fail(text)
        pytest.skip(text)


def pytest_configure() -> None:
    # For all that tests start: OpenBLAS's threads are there, and busy, as soon as numpy is imported. That takes as much
    # processor time as the import itself, and nothing here multiplies large matrices.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with suppress(ImportError):  # not in every environment
        import hypothesis

        # A busy machine is slow; pytest limits the time of a whole test.
        slow = [hypothesis.HealthCheck.too_slow]
        hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=slow)
        hypothesis.settings.load_profile("busy")
    # A shell's script ignores Ctrl-C in what it starts in the background, and so would all that the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup does that
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    # The launcher's commands have Ctrl-C end the process at once. A test that calls one must not leave that to the
    # next test in this process.
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_itemcollected(item: pytest.Item) -> None:
    if " at 0x" in item.nodeid:  # which no two of pytest's processes would call alike
        raise pytest.UsageError(f"{item.nodeid}: give the test's parameters names (ids=)")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    # Modules and the tests themselves stay. The garbage collector need not go through them again and again: not
    # while they become more and more, which takes a quarter of the time, and not later, half a second each time.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        # Nearly all of what a test makes goes with the last reference to it; to look through it after each 700 objects
        # took a tenth of the processor time of tests with data planes.
        gc.set_threshold(20_000, 20, 20)
        # In each phase of each test pytest attaches its handlers to every logger that does not propagate. torch has
        # dozens of them, and their records reach pytest through the root as well.
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
                logger.propagate = True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = any("backend" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "backend" in metafunc.fixturenames and not own:
        metafunc.parametrize("backend", getattr(metafunc.module, "BACKENDS", BACKENDS), indirect=True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Have torch compute on one thread: ranks are threads here, and would take the cores from each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend in turn."""
    _require(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def spare_worlds() -> Iterator[dict[tuple[str, int], list[World]]]:
    """Worlds that a module's tests have used and left as they were, by backend and size."""
    spare: dict[tuple[str, int], list[World]] = {}
    yield spare
    for worlds in spare.values():
        for made in worlds:
            made.close()


@pytest.fixture
def world(
    request: pytest.FixtureRequest, backend: str, spare_worlds: dict[tuple[str, int], list[World]]
) -> Iterator[MakeWorld]:
    """``world(size, **settings)``: a World over each backend in turn, closed after the test.

    In a module that sets ``USED_AGAIN``, a world without settings of its own is the next test's, if all is well in it:
    to connect the ranks takes most of the time of such a test, and a job goes on after one collective, too. With
    ``fresh=True`` no test has used it.
    """
    used_again = getattr(request.module, "USED_AGAIN", False)
    worlds: list[World] = []
    plain: list[World] = []

    def make(size: int, *, fresh: bool = False, **options: Any) -> World:
        own = bool(fresh or options or not used_again)
        spare = [] if own else spare_worlds.get((backend, size), [])
        made = spare.pop() if spare else World(size, backend, **options)
        (worlds if own else plain).append(made)
        return made

    yield make
    for made in plain:
        if made.is_as_new:
            spare_worlds.setdefault((backend, made.size), []).append(made)
        else:
            worlds.append(made)
    for made in worlds:
        made.close()


@pytest.fixture
def ranks() -> Iterator[MakeWorld]:
    """``ranks(size, **settings)``: a World over the local backend, closed after the test."""
    with closed_later(partial(World, backend="inline")) as make:
        yield make


@pytest.fixture(params=frameworks.names())
def framework(request: pytest.FixtureRequest) -> frameworks.Framework:
    """Each framework in turn."""
    loaded = frameworks.load(request.param)
    if not loaded.writes and request.node.callspec.params.get("in_place"):
        pytest.skip(f"tensors of {loaded.name} cannot be written")
    return loaded


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """``hvdgloo-run`` in the test's folder; whatever is left of its jobs is ended after the test."""
    with launcher_in(tmp_path) as made:
        yield made


@pytest.fixture
def nothing_left(launcher: Launcher) -> Iterator[None]:
    """Fail a test that leaves processes behind."""
    yield
    launcher.assert_nothing_left()


@pytest.fixture
def clean_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a launcher or scheduler around the tests may have put into the environment."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)


def _require_bed() -> None:
    """Skip what needs hosts, unless HVDGLOO_TEST_REQUIRE_BED=1 says that it must run."""
    reason = available()
    if reason:
        text = f"no bed of hosts: {reason}"
        if os.environ.get("HVDGLOO_TEST_REQUIRE_BED") == "1":
            pytest.fail(text, pytrace=False)
        pytest.skip(text)


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """Three hosts, h1 to h3, that a module's tests share: none of these may break them for the others."""
    _require_bed()
    with Bed(["h1", "h2", "h3"]) as made:
        yield made


@pytest.fixture
def make_bed() -> Iterator[Callable[..., Bed]]:
    """``make_bed(specs, routed=False)``: a bed of a test's own, for special hosts and for accidents."""
    _require_bed()
    with ExitStack() as beds:

        def make(hosts: Sequence[str | HostSpec], *, routed: bool = False) -> Bed:
            return beds.enter_context(Bed(hosts, routed=routed))

        yield make
