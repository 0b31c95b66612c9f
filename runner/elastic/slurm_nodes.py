"""``--host-discovery-script slurm``: the nodes of a Slurm allocation that are up.

An allocation that was made with ``--no-kill`` outlives its nodes, and its node list never changes. Slurm knows which
nodes can be used: ``sinfo`` reports it, and so does ``scontrol`` if there is no ``sinfo``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence

from hvdgloo.runner.elastic.discovery import DiscoveryError, ProgramDiscovery
from hvdgloo.runner.job.spec import HostEntry

SLURM = "slurm"
"""Word that the user gives in place of a script's path."""

_UP = frozenset({"allocated", "completing", "draining", "idle", "mixed", "planned", "reserved"})
"""States of a node that runs a job's processes; a draining node does so until the job's end."""

_NOT_NOW = re.compile(r"[*~#%!^]")
"""Marks after a state: no answer, powered down, powering up or down, about to be, being rebooted."""

_LONG = re.compile(r"NodeName=(\S+).*? State=(\S+)")


class SlurmNodes(ProgramDiscovery):
    """A discovery of the nodes of an allocation that are up.

    Args:
        nodes: the nodes of the allocation.
        slots: slots of nodes for which Slurm gives no number; None lets the nodes decide.
        timeout: seconds that Slurm may take.
    """

    def __init__(self, nodes: Sequence[HostEntry], slots: int | None = None, *, timeout: float = 10.0) -> None:
        self._nodes = nodes
        self._slots = slots
        self._timeout = timeout

    def find_available_hosts_and_slots(self) -> dict[str, int | None]:
        """Return the nodes that are up, in the order of the allocation.

        Raises:
            DiscoveryError: neither command exists, or it fails, takes too long, or its output cannot be parsed.
        """
        names = ",".join(node.name for node in self._nodes)
        if shutil.which("sinfo") is not None:
            command = ["sinfo", "--noheader", "--Node", f"--nodes={names}", "--format=%N %T"]
            up = by_sinfo(self._output_of(command, self._timeout, "sinfo"))
        else:
            command = ["scontrol", "show", "node", names, "--oneliner"]
            up = by_scontrol(self._output_of(command, self._timeout, "scontrol"))
        return {node.name: node.slots or self._slots for node in self._nodes if node.name in up}


def by_sinfo(text: str) -> frozenset[str]:
    """Parse lines ``node state``, one for each partition of a node; return the nodes that are up.

    Raises:
        DiscoveryError: a line is something else.
    """
    states = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        node, _, state = line.partition(" ")
        if not state:
            raise DiscoveryError(f"sinfo: {line!r:.200} is not a node with its state")
        states[node] = state.strip().lower()
    return frozenset(
        node for node, state in states.items() if not _NOT_NOW.search(state) and state.rstrip("$@-+") in _UP
    )


def by_scontrol(text: str) -> frozenset[str]:
    """Parse a line ``NodeName=... State=ALLOCATED+DRAIN ...`` for each node; return the nodes that are up.

    Raises:
        DiscoveryError: a line is something else.
    """
    up = set()
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _LONG.match(line)
        if match is None:
            raise DiscoveryError(f"scontrol: {line!r:.200} is not a node with its state")
        state, *flags = match[2].lower().split("+")
        silent = _NOT_NOW.search(match[2]) or not {"down", "fail", "not_responding", "powered_down"}.isdisjoint(flags)
        if state in _UP and not silent:
            up.add(match[1])
    return frozenset(up)
