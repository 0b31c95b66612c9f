"""One attempt to run a job, as far as jobs of a fixed size and elastic ones differ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from hvdgloo.runner.console.console import Console
from hvdgloo.runner.console.startup_view import StartDisplay
from hvdgloo.runner.launch_observer import LaunchObserver
from hvdgloo.runner.launch_result import LaunchResult
from hvdgloo.runner.supervise.host_state import HostState
from hvdgloo.runner.supervise.supervisor import Supervisor
from hvdgloo.runner.supervise.visits import Orders
from hvdgloo.runner.transport.base import Spawner


class Attempt(Orders):
    """One attempt to run a job, and the source of its supervisor's orders.

    Attributes:
        spawner: starts the agents.
        hosts: the states of the job's hosts, which come and go in an elastic job.
        supervisor: set before ``run``.
    """

    spawner: Spawner
    hosts: Sequence[HostState]
    supervisor: Supervisor

    def rank_of(self, number: int) -> int:
        """Return the present rank of the worker with this number."""
        return number

    @abstractmethod
    def run(self, console: Console, observer: LaunchObserver, display: StartDisplay) -> None:
        """Start agents and workers, and supervise them to their end; ``display`` shows the start."""

    @abstractmethod
    def result(self, console: Console) -> LaunchResult:
        """Return the result of the job, which has ended."""
