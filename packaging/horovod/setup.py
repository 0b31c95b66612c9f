"""Refuses to be installed beside Horovod; the metadata is in setup.cfg.

Only a source distribution or a checkout can refuse, since nothing of a wheel runs while it is installed. For a wheel
there are two other nets: it shares no module with Horovod (horovod.py says how), and ``horovodrun`` refuses to start.
"""

import sys
import sysconfig
from pathlib import Path

from setuptools import find_namespace_packages, setup

INSTALLING = {"bdist_wheel", "dist_info", "editable_wheel", "install", "develop"}
"""Commands that run where the result is installed, unlike the one that builds a source distribution."""


def horovod() -> Path | None:
    """Return the directory in which Horovod is installed, or None.

    pip builds in an environment of its own, which hides installed packages from ``import``, but not their directories.
    """
    for name in ("platlib", "purelib"):
        folder = Path(sysconfig.get_path(name), "horovod")
        if (folder / "__init__.py").is_file():
            return folder
    return None


found = horovod()
if found is not None and not INSTALLING.isdisjoint(sys.argv):
    sys.exit(
        f"Horovod itself is installed here ({found}), and hvdgloo-horovod brings the same import name: "
        "run `pip uninstall horovod` first, or use an environment without it."
    )

# setuptools regards a directory of stubs as a namespace package.
setup(packages=find_namespace_packages(include=["horovod-stubs", "horovod-stubs.*"]))
