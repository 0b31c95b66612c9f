"""Small functions, where programs of Horovod import them from."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdgloo.common.util import num_rank_is_power_2

__all__ = ["check_num_rank_power_of_2", "refs_to_vars", "vars_to_refs"]


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Tell whether a number of ranks is 1, 2, 4, 8, ...; Adasum needs no such number here."""
    return num_rank_is_power_2(num_rank)


def vars_to_refs(vars: Any) -> Any:
    """Return references, which can be hashed, in place of variables, which cannot; for a list or tuple, a tuple."""
    return tuple(vars_to_refs(each) for each in vars) if isinstance(vars, (list, tuple)) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """The variables again; for a tuple, a list."""
    return [refs_to_vars(each) for each in refs] if isinstance(refs, (list, tuple)) else refs.deref()


def _executing_eagerly() -> bool:
    """Tell whether operations run at once, and not in a graph or a function."""
    return bool(tf.executing_eagerly())
