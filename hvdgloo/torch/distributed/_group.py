"""A process group of torch.distributed on hvdgloo's data planes.

Up to torch 2.13 only ``ProcessGroup`` can be extended in Python, as torchft does: an object of this class takes the
place of torch's own group. Python's functions call the methods below directly. C++ (DDP, functional collectives) calls
those for which torch has a trampoline.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, Work

from hvdgloo._job import excepthook, process
from hvdgloo._job.logging import configure_logging
from hvdgloo.config import Config, unknown_variables
from hvdgloo.errors import InvalidArgumentError
from hvdgloo.torch.distributed import _record, _tensors
from hvdgloo.torch.distributed._connection import Connection
from hvdgloo.torch.distributed._messages import Messages
from hvdgloo.torch.distributed._monitored import MonitoredBarriers
from hvdgloo.torch.distributed._processes import MOST_WATCHED, publish_process
from hvdgloo.torch.distributed._queue import OperationQueue
from hvdgloo.torch.distributed._record import Record
from hvdgloo.torch.distributed._reductions import Reductions
from hvdgloo.torch.distributed._transfers import Transfers

logger = logging.getLogger(__name__)

_opened: Counter[str] = Counter()
"""The number of groups of each name that this process has made: a store may still hold the keys of an earlier one."""

_groups: weakref.WeakSet[HvdglooProcessGroup] = weakref.WeakSet()

_not_shut: set[OperationQueue] = set()
"""The queues of groups that have not been shut down: while there are any, the process reports on them."""

_ProcessGroup: Any = dist.ProcessGroup
"""Without torch's stubs, which know neither its overloads' common form nor what older versions call the methods."""


class HvdglooProcessGroup(Reductions, Transfers, _ProcessGroup):  # type: ignore[misc]
    """One rank's membership in a process group.

    Args:
        store: torch's, with this group's prefix.
        rank, size: within the group.
        timeout: of its operations.
        name: torch's number for it.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        _ProcessGroup.__init__(self, rank, size)  # with the store, C++ would not find this class's methods
        self._name, self._description = name, "undefined"
        _opened[name] += 1
        self._store = PrefixStore(f"hvdgloo/{_opened[name]}", store)
        if 1 < size <= MOST_WATCHED:
            publish_process(PrefixStore("all", self._store), rank)
        counters = _record.begin(rank, size)
        label = f"process group {name}" if name not in ("", "0") else "the default process group"
        queue = OperationQueue(
            label,
            None if counters is None else Record(counters, label),
            lambda seconds, cancelled: Connection(
                PrefixStore("all", self._store), rank, size, label, seconds, cancelled
            ),
        )
        Reductions.__init__(self, queue, rank, size, timeout.total_seconds())
        self._messages = Messages(self._store, rank, size, label, self._seconds, counters)
        self._monitored = MonitoredBarriers(self._store, rank, size, self._queue.check_peers)
        _groups.add(self)
        _not_shut.add(self._queue)

    # What torch.distributed asks about a group ------------------------------------------------------------------------

    # rank() and size() stay C++'s: torch.compile would trace into Python's, and refuse what they touch.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "hvdgloo"

    def name(self) -> str:
        return "hvdgloo"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    _set_group_name = setGroupName

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._description = desc

    _set_group_desc = setGroupDesc

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> HvdglooProcessGroup:
        return self

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def get_group_store(self) -> Store:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def monitored_barrier(self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called it; the error names those that have not."""
        self._monitored.wait(self._seconds if timeout is None else timeout, wait_all_ranks)

    def abort(self) -> None:
        self._queue.abort()
        self._messages.abort()

    def shutdown(self) -> None:
        if self._queue in _not_shut:
            _not_shut.remove(self._queue)
            if not _not_shut:
                _record.end()  # with the last report, which names the groups' planes
        self._messages.close()
        self._queue.close()

    def _after_fork_in_child(self) -> None:
        self._queue.after_fork_in_child()
        self._messages.after_fork_in_child()

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Work:  # noqa: N803
        (tensor,) = tensors
        return self._messages.send(_tensors.source(tensor), dstRank, tag, tensors)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Work:  # noqa: N803
        (tensor,) = tensors
        memory, back = _tensors.target(tensor)
        return self._messages.receive(memory, back, srcRank, tag, tensors)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        (tensor,) = tensors
        memory, back = _tensors.target(tensor)
        return self._messages.receive(memory, back, None, tag, tensors)


def create(options: Any, pg_options: Any = None) -> HvdglooProcessGroup:
    """Make a group, as torch.distributed asks for it.

    Raises:
        ConfigError: a variable in the environment has a value that it cannot have.
        InvalidArgumentError: the rank is not one of so many.
    """
    if not 0 <= options.group_rank < options.group_size:
        raise InvalidArgumentError(
            f"rank {options.group_rank} of a process group of {options.group_size}: world_size must be greater than "
            "every rank; check the arguments of init_process_group, or RANK and WORLD_SIZE"
        )
    if not _opened:  # there may be no hvd.init(), which does it otherwise
        rank = (options.global_ranks_in_group or range(options.group_size))[options.group_rank]
        excepthook.install(rank)
        config = Config.from_env()
        configure_logging(config, rank)
        if rank == 0 and not process.is_initialized():
            for line in unknown_variables():
                logger.warning("%s", line)
        if config.as_gloo:
            logger.info("torch.distributed's groups of the backend gloo are made by hvdgloo (HVDGLOO_AS_GLOO)")
    return HvdglooProcessGroup(options.store, options.group_rank, options.group_size, options.timeout, options.group_id)


def _after_fork_in_child() -> None:
    _record.after_fork_in_child()
    _not_shut.clear()
    for group in list(_groups):
        group._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
