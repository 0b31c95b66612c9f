"""A data service's compute job on Spark: ``python -m hvdgloo.spark.tensorflow.compute_worker FILE``.

The driver runs the service's registry and writes the configuration, with which the training job finds it, to FILE.
A tf.data worker runs next to each of Spark's tasks, and dispatchers next to the first ones unless these are on the
training side. All end when the training job shuts the service down, or with an error when the training job is lost.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from hvdgloo.errors import HvdglooError
from hvdgloo.rendezvous import RendezvousServer, generate_secret
from hvdgloo.runner.network import interfaces
from hvdgloo.runner.network.interfaces import InterfaceFilter
from hvdgloo.spark._run import run
from hvdgloo.spark.common.backend import default_num_proc
from hvdgloo.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn
from hvdgloo.tensorflow.data.compute_worker import parse_arguments, workers_per_dispatcher

__all__ = ["main"]


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: float) -> None:
    """Run the compute job in as many processes as Spark runs tasks at once, from the service's start to its end.

    Args:
        dispatchers: number of dispatchers, among which the job's processes are divided evenly.
        dispatcher_side: ``"compute"`` or ``"training"``, the job that runs them.
        configfile: path of the configuration on the driver's machine; removed at the end.
        timeout: seconds; see ``TfDataServiceConfig``.

    Raises:
        ConfigError: (a ValueError) a value cannot be used, or the number of processes is not a multiple of
            ``dispatchers``.
        DataServiceError: as for ``compute_worker_fn``.
        LaunchError: there is no active SparkContext, or tasks did not start in time.
        JobFailedError: a process was killed, or the Spark job was cancelled.
    """
    size = default_num_proc()
    each = workers_per_dispatcher(size, dispatchers)
    key = generate_secret()
    with ExitStack() as stack:
        Path(configfile).unlink(missing_ok=True)  # may be left over from a service that was killed
        # Executors and the training job may be anywhere, so clients try one address after the other.
        addresses = interfaces.own_addresses()
        own = [*interfaces.candidates(addresses, InterfaceFilter()), *(each for each in addresses if each.loopback)]
        registry = stack.enter_context(RendezvousServer(secret=key, size=size, bind=[each.address for each in own]))
        config = TfDataServiceConfig(dispatchers, each, dispatcher_side, registry.endpoints, key, timeout)
        config.write(configfile)
        stack.callback(Path(configfile).unlink, missing_ok=True)
        run(compute_worker_fn, args=(config,), num_proc=size)


if __name__ == "__main__":
    from pyspark.sql import SparkSession

    arguments = parse_arguments("python -m hvdgloo.spark.tensorflow.compute_worker")
    SparkSession.builder.getOrCreate()
    try:
        main(arguments.dispatchers, arguments.dispatcher_side, arguments.configfile, arguments.timeout)
    except HvdglooError as error:
        sys.exit(f"compute_worker: {error}")
