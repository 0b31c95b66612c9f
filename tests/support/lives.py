"""Processes, as threads, that outlive the World they are in: what an elastic job's workers are to their front-ends.

Each ``Life`` is a process's: it keeps what the program has made (models, optimizers), and has a Context that is
replaced. A newcomer has made its things in a Context of its own, alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvdgloo._job.context import Context
from tests.support.world import World

T = TypeVar("T")


class Life:
    """One process.

    Attributes:
        name: its own, in whatever epoch.
        context: of the epoch that it is in.
        kept: what its program has made, by name.
    """

    def __init__(self, name: str, context: Context) -> None:
        self.name = name
        self.context = context
        self.kept: dict[str, Any] = {}

    def die(self) -> None:
        """As a death looks to the others."""
        self.context.engine._control.close()


class Lives:
    """The processes of one elastic job, epoch after epoch.

    Args:
        make: what a program does before ``elastic.run``: makes its things, and keeps them.
        backend, settings: of each World.
    """

    def __init__(self, make: Callable[[Life], None], backend: str = "inline", **settings: Any) -> None:
        self._make = make
        self._backend = backend
        self._settings = {"elastic": True, "operation_timeout": 10.0, **settings}
        self._lives: dict[str, Life] = {}
        self._open: list[World] = []

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Life:
        if name not in self._lives:
            alone = World(1, "inline", **self._settings)
            self._open.append(alone)
            life = self._lives[name] = Life(name, alone.contexts[0])
            self._make(life)
        return self._lives[name]

    def epoch(self, names: Sequence[str], body: Callable[[Life], T], **options: Any) -> list[T]:
        """The last epoch ends, and one of these processes, in this order of ranks, begins; in it, all call ``body``.

        Args:
            names: one letter for each.
            options: of the World, as ``wrap``.
        """
        members = [self[name] for name in names]
        self.close()
        world = World(len(members), self._backend, **{**self._settings, **options})
        self._open.append(world)
        for life, context in zip(members, world.contexts, strict=True):
            life.context = context
        return world.run(lambda context: body(members[context.rank]))

    def close(self) -> None:
        """The current epoch ends for all that are in it."""
        ended, self._open = self._open, []
        for world in ended:
            world.close()
