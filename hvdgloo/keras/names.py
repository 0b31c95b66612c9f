"""Names of gradients: the same on all ranks whose models have the same variables, whatever else a rank has built."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

from hvdgloo.errors import InvalidArgumentError


def gradient_names(variables: Sequence[Any]) -> list[str]:
    """One for each variable, from all of their shapes and types and its place among them."""
    described = repr([(tuple(v.shape), str(v.dtype)) for v in variables])
    digest = hashlib.sha256(described.encode()).hexdigest()[:8]
    return [f"gradients.{digest}.{index}" for index in range(len(variables))]


def grouped(groups: Any, names: Sequence[str], variables: Sequence[Any]) -> list[list[str]]:
    """The names of gradients that are sent as one.

    Args:
        groups: how many groups, or lists of variables, or None.
        names, variables: of all gradients.

    Raises:
        InvalidArgumentError: (a ValueError) it is none of these.
    """
    if groups is None or groups == 0:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        count = min(groups, len(names))
        bounds = [len(names) * i // count for i in range(count + 1)] if count else [0]
        return [list(names[a:b]) for a, b in itertools.pairwise(bounds)]
    if not isinstance(groups, (list, tuple)):
        raise InvalidArgumentError("groups must be a number of groups, 0 or more, or a list of lists of variables")
    name_of = {id(variable): name for name, variable in zip(names, variables, strict=True)}
    return [[name_of[id(v)] for v in group if id(v) in name_of] for group in groups]
