"""Classes of distributed objects: each is made from the class of the user's object, and has that class's name.

Programs ask ``isinstance``, libraries build further classes on ``type(optimizer).__bases__[0]`` or go past ours by
``super(type(optimizer), optimizer)``, and checkpoints and logs show the class's name. So the user's class is the first
base, and our members are in the class itself, where they precede everything inherited.
"""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import Any

_classes: dict[tuple[type, type, str | None, Hashable], type[Any]] = {}

_OF_THE_TEMPLATE = frozenset(
    {
        "__annotate__",
        "__annotate_func__",
        "__annotations__",
        "__annotations_cache__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__parameters__",
        "__qualname__",
        "__slots__",
        "__static_attributes__",
        "__weakref__",
    }
)
"""The names that a class body defines for the class itself, and not for its instances."""


def shell_class(template: type, base: type, module: str | None = None, options: Hashable = None) -> type[Any]:
    """Make a class with the members of ``template`` that is ``base`` otherwise; equal arguments give one class.

    Args:
        template: its members are copied, also inherited ones that ``base`` does not inherit; their ``super()`` is
            ``base``. It becomes the second base, so that
            ``isinstance`` recognises the classes made from it.
        base: the class of the user's object.
        module: the class's ``__module__``, if it is not ``base.__module__``.
        options: stored as ``_hvd_options`` on the class, for methods without an instance.
    """
    key = template, base, module, options
    if key not in _classes:
        cell = types.CellType()
        kinds = [kind for kind in reversed(template.__mro__) if not issubclass(base, kind)]
        members = {
            name: _with_class(value, cell)
            for kind in kinds
            for name, value in vars(kind).items()
            if name not in _OF_THE_TEMPLATE and name not in vars(kind).get("__slots__", ())
        }
        names = {"__module__": module or base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        known = {} if options is None else {"_hvd_options": options}
        made = type(base.__name__, (base, template), members | names | known)
        cell.cell_contents = made
        _classes[key] = made
    return _classes[key]


def _with_class(member: Any, cell: types.CellType) -> Any:
    """Return a member of a class body with ``super()`` and ``__class__`` referring to the class in the cell."""
    if isinstance(member, types.FunctionType):
        before = member.__closure__ or ()
        names = member.__code__.co_freevars
        closure = tuple(
            cell if name == "__class__" else _with_class_inside(other, cell)
            for name, other in zip(names, before, strict=True)
        )
        if all(after is other for after, other in zip(closure, before, strict=True)):
            return member
        copied = types.FunctionType(member.__code__, member.__globals__, member.__name__, member.__defaults__, closure)
        copied.__kwdefaults__, copied.__doc__ = member.__kwdefaults__, member.__doc__
        copied.__qualname__, copied.__module__ = member.__qualname__, member.__module__
        copied.__dict__.update(member.__dict__)
        return copied
    if isinstance(member, (classmethod, staticmethod)):
        return type(member)(_with_class(member.__func__, cell))
    if isinstance(member, property):
        fget, fset, fdel = (_with_class(part, cell) for part in (member.fget, member.fset, member.fdel))
        return property(fget, fset, fdel, member.__doc__)
    return member


def _with_class_inside(variable: types.CellType, cell: types.CellType) -> types.CellType:
    """Do the same for a variable that a member uses: a decorator's may hold the function as it was written."""
    try:
        value = variable.cell_contents
    except ValueError:  # it has none yet
        return variable
    changed = _with_class(value, cell) if isinstance(value, types.FunctionType) else value
    return variable if changed is value else types.CellType(changed)
