"""An agent's measurements of its host: shares of the time between two looks, and GPUs if NVML answers."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from hvdgloo._observe.samples import CODEC, Gpu, HostSample
from hvdgloo._platform import machine
from hvdgloo.runner.agent import measuring
from hvdgloo.runner.agent.measuring import Meter

Times = namedtuple("Times", "user nice system idle iowait steal guest guest_nice")


def sample(meter: Meter) -> HostSample:
    found = CODEC.decode(meter.sample())
    assert isinstance(found, HostSample)
    return found


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[Times]:
    """Return the successive results of ``psutil.cpu_times``."""
    answers: list[Times] = [Times(100, 0, 100, 1000, 0, 0, 50, 0)]
    monkeypatch.setattr(psutil, "cpu_times", lambda: answers.pop(0))
    return answers


def test_cores_are_counted_by_what_they_did_since_the_last_look(times: list[Times]) -> None:
    meter = Meter()
    # Of 10 s, 3 were spent in programs (1 of them in a virtual machine's), 1 was stolen, and 2 waited for disks.
    times.append(Times(102, 1, 100, 1004, 2, 1, 51, 0))
    first = sample(meter)
    assert first.cpu == pytest.approx(0.4)
    assert first.stolen == pytest.approx(0.1)
    times.append(Times(102, 1, 100, 1014, 2, 1, 51, 0))
    assert sample(meter).cpu == 0.0
    times.append(Times(102, 1, 100, 1014, 2, 1, 51, 0))
    assert sample(meter).cpu == 0.0, "no time has passed"


def test_a_limit_that_holds_the_job_back_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = [(5, 100), (8, 110), (8, 110)]
    monkeypatch.setattr(measuring, "throttled_periods", lambda: counters.pop(0))
    meter = Meter()
    assert sample(meter).throttled == pytest.approx(0.3)
    assert sample(meter).throttled == 0.0


def test_periods_of_a_quota_come_from_the_nearest_group_that_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "pod" / "container"
    inner.mkdir(parents=True)
    monkeypatch.setattr(machine, "_CGROUPS", str(tmp_path))
    monkeypatch.setattr(machine, "_own_groups", lambda controller: iter([str(inner)]))
    assert machine.throttled_periods() == (0, 0)
    (inner / "cpu.stat").write_text("usage_usec 5\nnr_periods 0\nnr_throttled 0\n")
    (tmp_path / "pod" / "cpu.stat").write_text("usage_usec 9\nnr_periods 40\nnr_throttled 4\nthrottled_usec 7\n")
    assert machine.throttled_periods() == (4, 40)


@pytest.mark.parametrize(
    ("text", "pressure"),
    [
        ("some avg10=12.50 avg60=3.00 avg300=1.00 total=99\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", 0.125),
        ("nonsense\n", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
)
def test_memory_pressure_is_read_where_the_kernel_tells_it(
    text: str | None, pressure: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "memory"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(measuring, "_PRESSURE", str(path))
    assert sample(Meter()).memory_pressure == pytest.approx(pressure)


def test_loopback_is_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    Counters = namedtuple("Counters", "bytes_sent bytes_recv")
    monkeypatch.setattr(
        psutil,
        "net_io_counters",
        lambda pernic: {"lo": Counters(7, 7), "eth0": Counters(1, 2), "ib0": Counters(10, 20)},
    )
    found = sample(Meter())
    assert (found.sent, found.received) == (11, 22)


@pytest.mark.parametrize("answer", [None, RuntimeError("no /proc/diskstats"), OSError(2, "no such file")])
def test_a_container_without_disks_has_none(answer: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def counters() -> None:
        if answer is not None:
            raise answer

    monkeypatch.setattr(psutil, "disk_io_counters", counters)
    found = sample(Meter())
    assert (found.read, found.written) == (0, 0)


class FakeNvml(ModuleType):
    """NVIDIA's library with two GPUs, of which one has fallen off the bus, and a part of one that knows less."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818 - its name there
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        if handle == 1:
            raise self.NVMLError
        return namedtuple("Memory", "used total")(4 * handle, 80)

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:  # noqa: N802
        return b"H100" if handle else "H100"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        if handle == 2:
            raise self.NVMLError_NotSupported
        return namedtuple("Use", "gpu memory")(93, 40)

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802
        return 1400

    def nvmlDeviceGetMaxClockInfo(self, handle: int, clock: int) -> int:  # noqa: N802
        return 1980


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    yield fake
    assert fake.open == 0, "the driver was let go"


def test_gpus_are_shown_as_far_as_they_answer(nvml: FakeNvml) -> None:
    meter = Meter()
    assert sample(meter).gpus == [Gpu(0, "H100", 0.93, 0, 80, 1400, 1980), Gpu(2, "H100", 0.0, 8, 80, 1400, 1980)]
    meter.close()


def test_a_driver_that_does_not_answer_is_no_gpu(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def count() -> int:
        raise nvml.NVMLError

    monkeypatch.setattr(nvml, "nvmlDeviceGetCount", count)
    assert sample(Meter()).gpus == []


def test_without_the_package_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter = Meter()
    assert sample(meter).gpus == []
    meter.close()
