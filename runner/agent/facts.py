"""Facts about a host for ``hvdgloo-run doctor``, collected by the host's agent.

Frameworks are found without being imported: an import would take seconds, and a crash would take the agent with it.
Facts are not judged here; ``doctor`` does that, because it knows all hosts.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hvdgloo._platform import machine
from hvdgloo.runner.agent import preflight
from hvdgloo.runner.processes.bootstrap import REQUIRED
from hvdgloo.runner.protocol.frames import Require
from hvdgloo.version import __version__

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "pygloo": ("pygloo",),
    "tensorflow": (
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-gpu",
        "tensorflow-intel",
        "tensorflow-macos",
        "tensorflow-rocm",
        "intel-tensorflow",
        "tf-nightly",
        "tf-nightly-cpu",
    ),
    "keras": ("keras", "keras-nightly"),
    "jax": ("jax",),
    "mxnet": ("mxnet", "mxnet-*"),
    "numpy": ("numpy",),
    "pyspark": ("pyspark", "pyspark-client"),
}
"""Import names, and the names under which each can be installed."""

_SHM = "/dev/shm"
_NVIDIA_TIME = 10.0


@dataclass(frozen=True)
class GpuFacts:
    """A device as nvidia-smi lists it. ``memory`` is its total, in bytes."""

    name: str
    memory: int


@dataclass(frozen=True)
class Facts:
    """A host as its agent sees it. Sizes are in bytes; a value that cannot be determined is None or empty.

    Attributes:
        hostname, user, system, processor: of the machine.
        python, executable: the interpreter that runs the agent, and workers.
        packages: import name to version; the version is empty if there is no metadata. Absent packages are left out.
        lacking: the missing packages of ``REQUIRED``.
        certificates: True if a certificate for TLS can be made.
        torch_cuda, torch_rocm: the versions of CUDA and of ROCm that torch was built for; None if built without.
        cores, machine_cores: usable cores, given affinity and control groups; existing cores.
        memory, memory_limit: the machine's memory; the limit of the control groups around this process.
        shm_size, shm_free: size and free space of /dev/shm.
        gpus, driver: as reported by NVIDIA's driver.
        amd_gpus: the number of usable AMD GPUs, if there are no NVIDIA GPUs.
        visible_gpus: the number of usable GPUs of either vendor.
        open_files, open_files_most: the soft and the hard limit.
        directory, missing, machine: requirements of the workers that are missing; see ``frames.Lacking``.
    """

    hostname: str = ""
    user: str = ""
    system: str = ""
    processor: str = ""
    python: str = ""
    executable: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    lacking: Sequence[str] = ()
    certificates: bool = True
    torch_cuda: str | None = None
    torch_rocm: str | None = None
    cores: int = 1
    machine_cores: int = 1
    memory: int | None = None
    memory_limit: int | None = None
    shm_size: int | None = None
    shm_free: int | None = None
    gpus: Sequence[GpuFacts] = ()
    amd_gpus: int = 0
    visible_gpus: int = 0
    driver: str = ""
    open_files: int | None = None
    open_files_most: int | None = None
    directory: str = ""
    missing: Sequence[str] = ()
    machine: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the form in which facts are sent, and which ``--json`` shows."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Facts:
        known = {f.name for f in fields(cls)}
        values = {name: value for name, value in data.items() if name in known}
        return cls(**{**values, "gpus": tuple(GpuFacts(**gpu) for gpu in data.get("gpus", ()))})


def examine(environ: Mapping[str, str], required: Require) -> Facts:
    """Collect the facts about this host.

    Args:
        environ: the agent's own environment, for finding GPUs and programs.
        required: the files and programs that workers need.
    """
    absent = preflight.lacking(required, environ)
    soft, hard = (_finite(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    shm_size, shm_free = _space(_SHM)
    gpus, driver = _nvidia()
    cuda, rocm = _torch_platforms()
    return Facts(
        hostname=platform.node(),
        user=_user(),
        system=f"{platform.system()} {platform.release()}",
        processor=platform.machine(),
        python=platform.python_version(),
        executable=sys.executable,
        packages={"hvdgloo": __version__, **installed(_distributions())},
        lacking=[module for module in REQUIRED if not machine.has_package(module)],
        certificates=machine.has_package("cryptography"),
        torch_cuda=cuda,
        torch_rocm=rocm,
        cores=machine.usable_cores(),
        machine_cores=os.cpu_count() or 1,
        memory=_memory(),
        memory_limit=machine.memory_limit(),
        shm_size=shm_size,
        shm_free=shm_free,
        gpus=gpus,
        amd_gpus=0 if gpus else machine.amd_gpus(),
        visible_gpus=machine.visible_gpus(environ),
        driver=driver,
        open_files=soft,
        open_files_most=hard,
        directory=absent.directory,
        missing=absent.things,
        machine=absent.machine,
    )


# Python and packages.


def _distributions() -> dict[str, str]:
    """Return names, as package indices normalise them, and versions of all installed packages."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a folder left behind by a failed installation has none
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return found


def installed(distributions: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of the importable packages of ``PACKAGES``."""
    return {
        module: next(_matching(names, distributions), "")
        for module, names in PACKAGES.items()
        if machine.has_package(module)
    }


def _matching(names: Sequence[str], distributions: Mapping[str, str]) -> Iterator[str]:
    for name in names:
        if name.endswith("*"):
            yield from (version for found, version in distributions.items() if found.startswith(name[:-1]))
        elif name in distributions:
            yield distributions[name]


def _torch_platforms() -> tuple[str | None, str | None]:
    """Return the versions of CUDA and of ROCm that torch was built for, from a file that need not be imported."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None, None
    if spec is None or spec.origin is None:
        return None, None
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
            return parse_torch(file.read())
    except (OSError, UnicodeDecodeError):
        return None, None


def parse_torch(text: str) -> tuple[str | None, str | None]:
    """Parse the versions of CUDA and of ROCm in a torch/version.py (which calls ROCm's interface ``hip``)."""
    cuda, rocm = (
        re.search(rf"^{name}\b[^=\n]*=\s*(?:['\"](?P<version>[^'\"\n]+)['\"]|None)", text, re.MULTILINE)
        for name in ("cuda", "hip")
    )
    return cuda and cuda["version"], rocm and rocm["version"]


# The machine.


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # a container's user may have no name


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _space(path: str) -> tuple[int | None, int | None]:
    """Return size and free space of a file system."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None, None
    return status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _nvidia() -> tuple[tuple[GpuFacts, ...], str]:
    """Return the GPUs that NVIDIA's driver reports, and the driver's version."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"],
            capture_output=True,
            timeout=_NVIDIA_TIME,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return (), ""
    return parse_nvidia(done.stdout.decode("utf-8", "replace")) if done.returncode == 0 else ((), "")


def parse_nvidia(text: str) -> tuple[tuple[GpuFacts, ...], str]:
    """Parse the output of ``nvidia-smi --query-gpu=name,memory.total,driver_version``."""
    gpus, driver = [], ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.rsplit(",", 2)]
        if len(cells) == 3:
            name, memory, driver = cells
            gpus.append(GpuFacts(name, int(memory) * 1024 * 1024 if memory.isdigit() else 0))
    return tuple(gpus), driver
