"""Measurements of a host: its cores, memory, network, disks and GPUs, from psutil, the kernel and NVML."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil

from hvdgloo._observe.samples import CODEC, Gpu, HostSample
from hvdgloo._platform.machine import throttled_periods

_PRESSURE = "/proc/pressure/memory"


class Meter:
    """A meter of this host, from one ``sample`` to the next."""

    def __init__(self) -> None:
        self._times = psutil.cpu_times()
        self._periods = throttled_periods()
        self._gpus = _Nvml()

    def sample(self) -> bytes:
        """Return an encoded ``HostSample`` of the time since the last one, or since the beginning."""
        before, self._times = self._times, psutil.cpu_times()
        spent = {
            name: max(0.0, now - then) for name, now, then in zip(before._fields, self._times, before, strict=True)
        }
        # "guest" times are part of "user" and "nice".
        whole = sum(spent.values()) - spent.get("guest", 0.0) - spent.get("guest_nice", 0.0)
        idle = spent.get("idle", 0.0) + spent.get("iowait", 0.0)
        memory = psutil.virtual_memory()
        received, sent = _network()
        read, written = _disks()
        sample = HostSample(
            at=time.time(),
            cores=os.cpu_count() or 1,
            cpu=_share(whole - idle, whole),
            stolen=_share(spent.get("steal", 0.0), whole),
            throttled=self._throttled(),
            memory=max(0, memory.total - memory.available),
            memory_total=memory.total,
            memory_pressure=_pressure(),
            received=received,
            sent=sent,
            read=read,
            written=written,
            gpus=self._gpus.sample(),
        )
        return CODEC.encode(sample)

    def close(self) -> None:
        """Release the GPUs' driver."""
        self._gpus.close()

    def _throttled(self) -> float:
        (held_before, all_before), self._periods = self._periods, throttled_periods()
        held, periods = self._periods
        return _share(held - held_before, periods - all_before)


class _Nvml:
    """The GPUs, if NVIDIA's library is installed and works."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            import pynvml
        except ImportError:
            return  # nvidia-ml-py is optional
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:
            self.close()

    def sample(self) -> tuple[Gpu, ...]:
        return tuple(gpu for index, handle in enumerate(self._handles) if (gpu := self._gpu(index, handle)) is not None)

    def _gpu(self, index: int, handle: Any) -> Gpu | None:
        nvml = self._nvml
        try:
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name = nvml.nvmlDeviceGetName(handle)
            return Gpu(
                index=index,
                name=name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name),
                use=self._asked("nvmlDeviceGetUtilizationRates", handle) / 100,
                memory=memory.used,
                memory_total=memory.total,
                clock=self._asked("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
                clock_most=self._asked("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            )
        except nvml.NVMLError:
            return None  # it was reset, or has fallen off the bus

    def _asked(self, function: str, *arguments: Any) -> int:
        """Call a function of NVML; return 0 if this GPU (a part of one, for example) does not support it."""
        try:
            answer = getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLError_NotSupported:
            return 0
        return int(getattr(answer, "gpu", answer))

    def close(self) -> None:
        if self._nvml is not None:
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                pass
            self._nvml, self._handles = None, []


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _pressure() -> float:
    """Return the share of the last 10 s in which some process waited for memory; 0 if the kernel does not report it."""
    try:
        with open(_PRESSURE, encoding="ascii") as file:
            first = file.readline().split()
        return float(dict(word.split("=") for word in first[1:])["avg10"]) / 100
    except (OSError, ValueError, KeyError):
        return 0.0


def _network() -> tuple[int, int]:
    """Return the bytes received and sent by all interfaces but loopback."""
    try:
        counters = psutil.net_io_counters(pernic=True)
    except (OSError, RuntimeError):
        return 0, 0
    others = [each for name, each in counters.items() if not name.startswith("lo")]
    return sum(each.bytes_recv for each in others), sum(each.bytes_sent for each in others)


def _disks() -> tuple[int, int]:
    """Return the bytes read from and written to disks; 0 if the system does not report them, as in many containers."""
    try:
        counters = psutil.disk_io_counters()
    except (OSError, RuntimeError, NotImplementedError):
        counters = None
    return (0, 0) if counters is None else (counters.read_bytes, counters.write_bytes)
