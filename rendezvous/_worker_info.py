"""A worker's description of itself when it registers, as clients and the server share it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_MAX_TEXT = 255
_LIMITS = {
    "rank": 2**31,
    "index": 2**31,
    "port": 2**16,
    "pid": 2**31,
    "parent": 2**31,
    "control_fanin": 2**31,
    "control_tree_ranks": 2**31,
}


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's description of itself.

    Attributes:
        rank: its rank, if a launcher gave it one.
        index: its index among workers without a launcher, e.g. a Kubernetes job's completion index.
        host_name: its host's name, for messages.
        host_identity: see ``hvdgloo.rendezvous._host_identity``.
        address: IP address at which other workers reach it.
        port: port of its control listener; 0 if it has none.
        pid: its process id.
        parent: id of the process that started it; 0 if that is not known.
        control_fanin, control_tree_ranks: its settings; see ``Topology``. Without a fan-in it can be connected with
            rank 0 only.

    Raises:
        ValueError: at construction, naming the field that cannot be used.
    """

    rank: int | None
    index: int | None
    host_name: str
    host_identity: str
    address: str
    port: int
    pid: int
    parent: int = 0
    control_fanin: int = 0
    control_tree_ranks: int = 0

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if value is None and name in ("rank", "index"):
                continue
            if type(value) is not int or not 0 <= value < limit:
                raise ValueError(f"a worker's {name} must be a whole number from 0 to {limit - 1}, not {value!r:.50}")
        for name in ("host_name", "host_identity", "address"):
            text = getattr(self, name)
            if not isinstance(text, str) or len(text) > _MAX_TEXT or not text.isprintable():
                raise ValueError(f"a worker's {name} must be printable text of at most {_MAX_TEXT} characters")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> WorkerInfo:
        """Return the worker that ``to_dict`` describes.

        Raises:
            ValueError: naming what is missing, unknown or unusable.
        """
        if not isinstance(data, Mapping):
            raise ValueError("a worker must be a JSON object")
        expected = set(cls.__dataclass_fields__)
        if set(data) != expected:
            listed = ", ".join(sorted(str(name)[:50] for name in expected ^ set(data))[:8])
            raise ValueError(f"a worker's fields are {', '.join(sorted(expected))}; missing or unknown: {listed}")
        return cls(**data)
