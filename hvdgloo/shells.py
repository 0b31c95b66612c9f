"""Classes of distributed objects: each derives from the class of the user's object, and has its name.

Programs ask ``isinstance``, and checkpoints and logs show the class's name.
"""

from __future__ import annotations

from typing import Any

_classes: dict[tuple[type, type], type[Any]] = {}


def shell_class(mixin: type, base: type, module: str | None = None) -> type[Any]:
    """The class that is ``mixin`` first and ``base`` otherwise; one for each pair, so that equals have equal types.

    Args:
        module: where it claims to be from, if not where ``base`` is from.
    """
    if (mixin, base) not in _classes:
        names = {"__module__": module or base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        _classes[mixin, base] = type(base.__name__, (mixin, base), names)
    return _classes[mixin, base]
