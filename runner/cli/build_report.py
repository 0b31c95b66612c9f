"""``hvdgloo-run --check-build``: the features available on this machine, in the layout that Horovod's users know.

Nothing is compiled here, so "built" means that our module for a feature exists, and so does the package that it needs.
The packages that carry Gloo are listed as well; the first available one is used, unless ``--gloo-provider`` names
another. Shared memory, which Horovod does not have, has its own row: jobs on one host need nothing else.
"""

from __future__ import annotations

import os

from hvdgloo._platform.machine import has_package
from hvdgloo.config import GLOO_PROVIDERS
from hvdgloo.version import __version__

_FRAMEWORKS = {"TensorFlow": "tensorflow", "PyTorch": "torch", "JAX": "jax", "MXNet": "mxnet"}


def build_table() -> str:
    """Return the text of ``--check-build``."""
    frameworks = {
        name: has_package(f"hvdgloo.{module}") and has_package(module) for name, module in _FRAMEWORKS.items()
    }
    providers = {package: has_package(package) for package in GLOO_PROVIDERS}
    operations = {
        "NCCL": _nccl(),
        "DDL": False,
        "CCL": False,
        "MPI": False,
        "Gloo": any(providers.values()),
        "Shared memory (between ranks of one host)": hasattr(os, "memfd_create"),
    }
    blocks: tuple[tuple[str, dict[str, bool]], ...] = (
        (f"hvdgloo v{__version__}:", {}),
        ("Available Frameworks:", frameworks),
        ("Available Controllers:", {"MPI": False, "Gloo": True}),
        ("Available Tensor Operations:", operations),
        ("Available Gloo Providers:", providers),
    )
    return "\n".join(
        f"{title}\n" + "".join(f"    [{'X' if there else ' '}] {name}\n" for name, there in rows.items())
        for title, rows in blocks
    )


def _nccl() -> bool:
    if not (has_package("hvdgloo._backends.nccl") and has_package("torch")):
        return False
    import torch.distributed

    return bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())
