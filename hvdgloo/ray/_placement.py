"""Room for the workers in Ray's cluster: a placement group of our own, or the caller's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from hvdgloo.errors import ConfigError, LaunchError
from hvdgloo.ray._settings import Demand, counted

_SOON, _LOOK = 0.5, 0.02
"""Seconds within which an earlier job's resources are released, and between two checks for it."""


@dataclass(frozen=True)
class Reservation:
    """Room for all workers.

    Attributes:
        group: Ray's placement group.
        bundles: for each worker, the index of its actor's bundle; -1 for any bundle that has room.
        ours: True if the group was created here, and so has to be removed here.
    """

    group: Any
    bundles: tuple[int, ...]
    ours: bool

    def release(self) -> None:
        """Remove the placement group, if it was created here."""
        if self.ours:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self.group)


def reserve(demand: Demand, *, timeout: float, use_current: bool) -> Reservation:
    """Reserve room for all workers, before any of them is started.

    Args:
        timeout: seconds to wait for room.
        use_current: take it from the placement group that this process is in, if it is in one.

    Raises:
        ConfigError: the cluster can never have that much room.
        LaunchError: there was no room in time.
    """
    import ray

    current = ray.util.get_current_placement_group() if use_current else None
    if current is not None:
        return Reservation(current, _bundles_of(current, demand), ours=False)
    lack = lacking(demand, node_resources(ray.nodes()))
    if lack and not _may_grow():
        raise ConfigError(lack)
    deadline = monotonic() + timeout
    _await_room(demand, min(timeout, _SOON))
    group = ray.util.placement_group(demand.bundles, strategy=demand.strategy)
    try:
        if not group.wait(max(0.0, deadline - monotonic())):
            raise LaunchError(
                f"Ray's cluster had no room within {timeout:g} s for {lack or _taken(demand)}. "
                "Wait for other jobs to end, add nodes, or ask for less; "
                "create_settings(placement_group_timeout_s=...) waits longer"
            )
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    if demand.hosts is None:
        return Reservation(group, tuple(range(demand.workers)), ours=True)
    return Reservation(group, tuple(n // demand.workers_per_host for n in range(demand.workers)), ours=True)


def _await_room(demand: Demand, seconds: float) -> None:
    """Wait a moment for resources that are about to be released.

    Ray considers resources in use for a tenth of a second after they were released. If it is asked for a placement
    group meanwhile, it retries at growing intervals, up to a second after there was room.
    """
    import ray

    deadline = monotonic() + seconds
    while monotonic() < deadline:
        free = ray.available_resources()
        if all(free.get(name, 0) >= demand.workers * amount for name, amount in demand.each.items()):
            return
        sleep(_LOOK)


def node_resources(nodes: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return the resources of each living node in the result of ``ray.nodes()``."""
    return [dict(node["Resources"]) for node in nodes if node["Alive"]]


def lacking(demand: Demand, nodes: Sequence[Mapping[str, float]]) -> str:
    """Explain why these nodes can never hold the workers, even if they are otherwise unused; empty if they can.

    Args:
        nodes: the resources of each node.
    """
    for name, amount in demand.each.items():
        there = sum(node.get(name, 0) for node in nodes)
        needed = demand.workers * amount
        if there < needed:
            return f"{demand}: that is {counted(needed, name)} in all; {_has(name, nodes)}"
    bundle = demand.bundles[0]
    roomy = sum(_fits(bundle, node) for node in nodes)
    if demand.hosts is None:
        places = sum(_places(bundle, node) for node in nodes)
        if places < demand.workers:
            shown = "; ".join(_has(name, nodes) for name in demand.each)
            return f"{demand}: there is room on the nodes for {places}; {shown}"
    elif roomy < demand.hosts:
        shown = " and ".join(counted(amount, name) for name, amount in bundle.items())
        return (
            f"{demand}: that is {shown} on each, which {roomy} of {counted(len(nodes), 'node')} can give; "
            + "; ".join(_has(name, nodes) for name in demand.each)
        )
    return ""


def _places(bundle: Mapping[str, float], node: Mapping[str, float]) -> int:
    return int(min(node.get(name, 0) // amount for name, amount in bundle.items()))


def _fits(bundle: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return _places(bundle, node) > 0


def _has(name: str, nodes: Sequence[Mapping[str, float]]) -> str:
    amounts = [node.get(name, 0) for node in nodes]
    each = f" ({', '.join(f'{amount:g}' for amount in amounts)})" if len(nodes) > 1 else ""
    return f"the cluster has {counted(sum(amounts), name)} on {counted(len(nodes), 'node')}{each}"


def _taken(demand: Demand) -> str:
    """Describe how much of the needed resources is free now."""
    import ray

    free, there = ray.available_resources(), ray.cluster_resources()
    return f"{demand}: " + "; ".join(
        f"{counted(demand.workers * amount, name)} needed, {free.get(name, 0):g} of {there.get(name, 0):g} free"
        for name, amount in demand.each.items()
    )


def _may_grow() -> bool:
    """Return whether an autoscaler may add nodes, so that missing resources may yet appear."""
    try:
        from ray._private.state import state

        config = state.get_cluster_config()
    except Exception:  # noqa: BLE001 - not part of Ray's public interface; then we wait, and report the lack afterwards
        return True
    if config is None:
        return False
    return any(group.max_count == -1 or group.max_count > group.min_count for group in config.node_group_configs)


def _bundles_of(group: Any, demand: Demand) -> tuple[int, ...]:
    """Choose a bundle of the caller's placement group for each worker.

    Raises:
        ConfigError: the workers do not fit, even if nothing else is in the group.
    """
    places = {index: _places(demand.each, bundle) for index, bundle in enumerate(group.bundle_specs)}
    if demand.hosts is None:
        if sum(places.values()) < demand.workers:
            raise ConfigError(
                f"{demand}: this program's placement group has room for {sum(places.values())} (its bundles are "
                f"{group.bundle_specs}); make it larger, or let the executor create its own: "
                "RayExecutor(..., use_current_placement_group=False)"
            )
        return (-1,) * demand.workers
    import ray

    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    chosen: list[int] = []
    left = Counter(dict.fromkeys(nodes.values(), demand.workers_per_host))
    by_node: dict[str, list[int]] = {}
    for index, count in sorted(places.items()):
        node = nodes[index]
        taken = min(count, left[node])
        left[node] -= taken
        by_node.setdefault(node, []).extend([index] * taken)
    full = [node for node, missing in left.items() if not missing]
    if len(full) < (demand.hosts or 0):
        raise ConfigError(
            f"{demand} do not fit into this program's placement group, which has room for "
            f"{counted(demand.workers_per_host, 'worker')} on only {counted(len(full), 'node')}; let the executor "
            "create its own: RayExecutor(..., use_current_placement_group=False)"
        )
    for node in full[: demand.hosts]:
        chosen += by_node[node]
    return tuple(chosen)
