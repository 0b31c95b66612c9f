"""Facts about this machine: its name, cores, GPUs and packages, and whether the kernel ran out of memory.

Nothing here imports a framework: asking torch for the number of GPUs would take longer than starting the job.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping

_CGROUPS = "/sys/fs/cgroup"
_KERNEL_KILL = re.compile(rb"out of memory: Killed process (\d+)", re.IGNORECASE)


def has_package(name: str) -> bool:
    """Tell whether a package can be imported. A directory of that name without code does not count."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def boot_id() -> str:
    """Name this boot of this machine; its containers share the name. Outside Linux: the machine's hardware address."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        import uuid

        return f"node {uuid.getnode():012x}"


def usable_cores() -> int:
    """Cores that this process may use: at least 1, at most what affinity and the control groups' quotas allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for quota in _quotas() if quota > 0]
    return max(1, min([cores, *(math.ceil(quota) for quota in quotas)]))


def visible_gpus(environ: Mapping[str, str]) -> int:
    """GPUs of this machine: NVIDIA's, or AMD's if there are none; or as many of them as the variables that CUDA and
    ROCm read leave visible."""
    present = _nvidia_gpus()
    if present:
        return _left(present, environ.get("CUDA_VISIBLE_DEVICES"))
    # ROCm's runtime hides GPUs first; what HIP reads, which also knows CUDA's name for it, counts those that are left.
    left = _left(amd_gpus(), environ.get("ROCR_VISIBLE_DEVICES"))
    return _left(left, environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")))


def _left(present: int, visible: str | None) -> int:
    """Return the number of GPUs that a list of numbers and identities leaves visible."""
    if visible is None or not present:
        return present
    chosen = 0
    for name in visible.split(","):
        # What follows the first entry that cannot be used is ignored.
        name = name.strip()
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= present):
            break
        chosen += 1
    return chosen


def _nvidia_gpus() -> int:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        pass
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    import subprocess

    try:
        listing = subprocess.run([program, "-L"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith(b"GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0


def amd_gpus(nodes: str = "/sys/class/kfd/kfd/topology/nodes") -> int:
    """AMD GPUs that this process may use.

    Args:
        nodes: where the kernel lists what ROCm can compute on. A node's properties can only be read if it may be used.
    """
    count = 0
    try:
        for node in os.listdir(nodes):
            with contextlib.suppress(OSError), open(os.path.join(nodes, node, "properties"), encoding="ascii") as file:
                # Processors are nodes, too, but have no such units.
                count += any(line.startswith("simd_count ") and line.split()[1] != "0" for line in file)
    except OSError:
        return 0
    return count


# Control groups.


class MemoryWatch:
    """Says what the kernel has to do with the end of a process that SIGKILL ended.

    The kernel's log names the processes that it kills for lack of memory, but it may be closed to this user, and in a
    container it has other numbers for them. Then its counters must do: the control groups', and the whole
    machine's, which may count other users' processes.

    Args:
        log: where the kernel's log is.
    """

    def __init__(self, log: str = "/dev/kmsg") -> None:
        self._last = self._count()
        self._log = -1
        try:
            self._log = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)
        except OSError:
            pass  # not readable here

    def account(self, pid: int) -> str:
        """Return a phrase about the end of a process; empty if the kernel reports that it has killed none for lack of
        memory since the last call, or since construction.
        """
        count, previous = self._count(), self._last
        self._last = count
        killed = self._killed()
        if pid in killed:
            return "the kernel ended it for lack of memory"
        if killed or (count or 0) > (previous or 0):
            return "the kernel ended a process for lack of memory at that time, most likely this one"
        if count is None:
            return "most likely by the kernel for lack of memory, of which this system keeps no count that can be read"
        return ""

    def close(self) -> None:
        """Close the kernel's log."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1

    def _killed(self) -> set[int]:
        """Return the processes that the kernel's log names, from where it was read last."""
        text = b""
        while self._log >= 0:
            try:
                piece = os.read(self._log, 8192)  # a record each
            except BrokenPipeError:
                continue  # what was to come next has been overwritten
            except OSError:
                break
            if not piece:
                break
            text += piece
        return {int(pid) for pid in _KERNEL_KILL.findall(text)}

    @staticmethod
    def _count() -> int | None:
        counts = [
            count
            for path in _own_groups("memory")
            for name in ("memory.events", "memory.oom_control")
            if (count := _counter(os.path.join(path, name), "oom_kill")) is not None
        ]
        machine = _counter("/proc/vmstat", "oom_kill")
        counts += [] if machine is None else [machine]
        return sum(counts) if counts else None


def memory_limit() -> int | None:
    """Bytes that this process's control groups, and those around them, allow; None where they set no limit."""
    limits = []
    for path in _own_groups("memory"):
        while len(path) >= len(_CGROUPS):
            limits += [_limit(os.path.join(path, name)) for name in ("memory.max", "memory.limit_in_bytes")]
            path = os.path.dirname(path)
    # Version 1 has no way to say "none": it gives a number near the largest possible.
    return min((limit for limit in limits if limit is not None and limit < 1 << 60), default=None)


def _limit(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _counter(path: str, name: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                key, _, value = line.partition(" ")
                if key == name:
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


def throttled_periods() -> tuple[int, int]:
    """Return the periods of its CPU quota in which this process's control group was held back, and all periods.

    0 and 0 where there is no quota.
    """
    for path in _own_groups("cpu"):
        while len(path) >= len(_CGROUPS):
            held, periods = (_counter(os.path.join(path, "cpu.stat"), name) for name in ("nr_throttled", "nr_periods"))
            if periods:
                return held or 0, periods
            path = os.path.dirname(path)
    return 0, 0


def _quotas() -> Iterator[float]:
    """CPU quotas, in cores, of this process's control groups and the groups around them."""
    for path in _own_groups("cpu"):
        while len(path) >= len(_CGROUPS):
            yield _quota(path)
            path = os.path.dirname(path)


def _quota(path: str) -> float:
    try:
        with open(os.path.join(path, "cpu.max"), encoding="ascii") as file:
            quota, period = file.read().split()
            return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        with open(os.path.join(path, "cpu.cfs_quota_us"), encoding="ascii") as file:
            microseconds = int(file.read())
        with open(os.path.join(path, "cpu.cfs_period_us"), encoding="ascii") as file:
            return microseconds / int(file.read())
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def _own_groups(controller: str) -> Iterator[str]:
    """Directories of the control groups (version 2, and version 1's for a controller) that this process is in."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            yield _existing(_CGROUPS, group)
        elif controller in controllers.split(","):
            yield _existing(os.path.join(_CGROUPS, controllers), group)


def _existing(root: str, group: str) -> str:
    # Inside a container the path may be the host's; the mounted folder is then the group itself.
    path = root + group.rstrip("/")
    return path if os.path.isdir(path) else root
