"""Elastic jobs on Ray."""

from __future__ import annotations

from typing import NoReturn

from hvdgloo.errors import ConfigError

__all__ = ["ElasticRayExecutor"]


def refuse_elastic() -> NoReturn:
    """Say that there are no elastic jobs on Ray.

    Raises:
        ConfigError: always.
    """
    raise ConfigError("elastic jobs are not supported on Ray; use RayExecutor with num_workers=, or hvdgloo-run")


class ElasticRayExecutor:
    """Refused: see ``refuse_elastic``."""

    def __init__(self, *_: object, **__: object) -> None:
        refuse_elastic()
