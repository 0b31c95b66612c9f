"""The version, in a file that packaging can read without importing anything else; and the library's name."""

import sys

__version__ = "0.1.0"


def library_name() -> str:
    """What the program knows this library as: where ``horovod`` stands for it (``hvdgloo.as_horovod``), Horovod."""
    return str(getattr(sys.modules.get("horovod"), "stands_in_for", "hvdgloo"))
