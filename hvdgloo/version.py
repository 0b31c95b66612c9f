"""The version, in a file that packaging reads without importing anything else, and the library's name."""

import sys

__version__ = "0.1.0"


def library_name() -> str:
    """Return the name by which the program knows this library: Horovod under ``hvdgloo.as_horovod``."""
    return str(getattr(sys.modules.get("horovod"), "stands_in_for", "hvdgloo"))
