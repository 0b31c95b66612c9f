"""Classes of distributed objects: each derives from the class of the user's object, and has that class's name.

Programs ask ``isinstance``, and checkpoints and logs show the class's name.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

_classes: dict[tuple[type, type, Hashable], type[Any]] = {}


def shell_class(mixin: type, base: type, module: str | None = None, options: Hashable = None) -> type[Any]:
    """The class that is ``mixin`` first and ``base`` otherwise; equal arguments give one class.

    Args:
        module: the class's ``__module__``, if not that of ``base``.
        options: stored as ``_hvd_options`` on the class, for methods without an instance.
    """
    if (mixin, base, options) not in _classes:
        names = {"__module__": module or base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        known = {} if options is None else {"_hvd_options": options}
        _classes[mixin, base, options] = type(base.__name__, (mixin, base), names | known)
    return _classes[mixin, base, options]
