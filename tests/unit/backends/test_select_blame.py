"""Failed connections name the other rank in the job, whichever group of ranks was to be connected."""

from __future__ import annotations

from typing import Any

import pytest

from hvdgloo._backends import select
from hvdgloo._backends.select import Planes, plane_settings
from hvdgloo._backends.shm import backend as shm
from hvdgloo.config import Config
from hvdgloo.errors import ConnectError
from hvdgloo.rendezvous import MemoryStore
from tests.support.topologies import on_hosts

TOPOLOGY = on_hosts(2, 2)


def planes(rank: int) -> Planes:
    config = Config(secret=bytes(16), gloo_provider="torch")
    return Planes(config, plane_settings(config), TOPOLOGY, rank, MemoryStore(), "", "127.0.0.1")


def test_by_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectError("the second member did not come", rank=1, missing=[1])

    monkeypatch.setattr(shm, "ShmBackend", refuse)
    with pytest.raises(ConnectError) as error:
        planes(2).open(1, (2, 3))
    assert (error.value.rank, error.value.missing) == (3, (3,))


def test_by_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectError("member 1 could not connect", rank=1)

    monkeypatch.setattr(select, "gloo_backend", refuse)
    monkeypatch.setattr(select, "has_package", lambda _: True)
    with pytest.raises(ConnectError) as error:
        planes(3).open(1, (0, 3))
    assert error.value.rank == 3
