"""The Ray cluster that this program has joined."""

from __future__ import annotations

from hvdgloo.errors import ConfigError, MissingDependencyError


def check_ray() -> None:
    """Check that there is a usable cluster.

    Raises:
        MissingDependencyError: Ray is not installed.
        ConfigError: this program has not joined a cluster, or only through Ray Client.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError("hvdgloo.ray needs Ray: pip install 'hvdgloo[ray]'") from error
    if ray.util.client.ray.is_connected():
        raise ConfigError(
            "RayExecutor does not work through Ray Client (ray.init('ray://...')), since workers could not reach this "
            "program: run it in the cluster, for example with `ray job submit`, or in a task or actor"
        )
    if not ray.is_initialized():
        raise ConfigError(
            "Ray is not initialized: call ray.init() before creating a RayExecutor (ray.init(address='auto') joins a "
            "running cluster)"
        )
