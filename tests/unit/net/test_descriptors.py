"""The limit of open files: the soft limit is raised where that is permitted, and is never lowered."""

from __future__ import annotations

import resource

import pytest

from hvdgloo._net import descriptors
from hvdgloo._net.descriptors import reserve_descriptors
from hvdgloo.errors import ConfigError

UNLIMITED = resource.RLIM_INFINITY


class Limits:
    """A process with 10 open files, and its limits."""

    def __init__(self, soft: int, hard: int, *, most: int | None = None) -> None:
        self.soft, self.hard, self._most = soft, hard, most

    def get(self, kind: int) -> tuple[int, int]:
        assert kind == resource.RLIMIT_NOFILE
        return self.soft, self.hard

    def set(self, kind: int, limits: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_NOFILE
        assert limits[1] == self.hard
        assert self.soft < limits[0]
        if self._most is not None and limits[0] > self._most:
            raise ValueError("current limit exceeds maximum limit")
        self.soft = limits[0]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> type[Limits]:
    class Patched(Limits):
        def __init__(self, soft: int, hard: int, *, most: int | None = None) -> None:
            super().__init__(soft, hard, most=most)
            monkeypatch.setattr(resource, "getrlimit", self.get)
            monkeypatch.setattr(resource, "setrlimit", self.set)
            monkeypatch.setattr(descriptors, "_held", lambda: 10)

    return Patched


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "room"),
    [
        pytest.param(1024, 20000, 2266, 2000, id="as far as needed"),
        pytest.param(1024, UNLIMITED, 2266, 2000, id="no hard limit"),
        pytest.param(1024, 1500, 1500, 1234, id="as far as permitted"),
        pytest.param(4096, 20000, 4096, 2000, id="high enough"),
        pytest.param(UNLIMITED, UNLIMITED, UNLIMITED, 2000, id="no limit"),
    ],
)
def test_the_soft_limit_is_raised(limit: type[Limits], soft: int, hard: int, raised: int, room: int) -> None:
    limits = limit(soft, hard)
    assert reserve_descriptors(100, "it", "something", wanted=2000) == room
    assert limits.soft == raised


def test_what_is_needed_goes_before_what_is_spare(limit: type[Limits]) -> None:
    limit(256, 256)
    assert reserve_descriptors(230, "it", "something", wanted=2000) == 230
    assert reserve_descriptors(200, "it", "something", wanted=2000) == 200 + 30 // 2
    assert reserve_descriptors(200, "it", "something", wanted=210) == 210


def test_a_kernel_that_permits_less_than_the_hard_limit(limit: type[Limits]) -> None:
    limits = limit(256, UNLIMITED, most=1024)
    assert reserve_descriptors(100, "it", "something", wanted=2000) == 165
    assert limits.soft == 256


def test_too_few(limit: type[Limits]) -> None:
    limit(256, 300)
    with pytest.raises(ConfigError) as caught:
        reserve_descriptors(1023, "rank 0", "connections")
    text = "rank 0 needs 1023 more open files for connections, but 10 are open, and this process may have no more than"
    assert str(caught.value).startswith(f"{text} 300. Raise its hard limit on open files to 1289, ")


def test_open_files_are_counted() -> None:
    held = descriptors._held()
    with open("/dev/null") as one, open("/dev/null") as other:
        assert descriptors._held() == held + 2, (one, other)
