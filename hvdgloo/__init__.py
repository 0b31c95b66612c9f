"""hvdgloo: Horovod's API for synchronous data-parallel training, without MPI and without compiling anything.

Import the front-end of your framework, e.g. ``import hvdgloo.torch as hvd``; launch with ``hvdgloo-run``.
"""

from __future__ import annotations

from hvdgloo.version import __version__

__all__ = ["__version__"]
