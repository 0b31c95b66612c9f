"""The compute job of a data service: ``hvdgloo-run -np N -- python -m hvdgloo.tensorflow.data.compute_worker FILE``.

Rank 0 runs the service's registry and writes the configuration, with which the training job finds it, to FILE; every
rank runs a tf.data worker, and the first ones dispatchers unless those are on the training side. All end when the
training job shuts the service down, or with an error when it is gone.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

from hvdgloo._job import process
from hvdgloo._net.proofs import derive
from hvdgloo.errors import ConfigError, DataServiceError
from hvdgloo.rendezvous import RendezvousServer, generate_secret
from hvdgloo.tensorflow.data.compute_service import TfDataServiceConfig, compute_worker_fn
from hvdgloo.tensorflow.functions import broadcast_object
from hvdgloo.tensorflow.mpi_ops import barrier


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: float) -> None:
    """Be a process of the compute job, from the start of the service to its end.

    Args:
        dispatchers: how many; the job's processes are divided evenly among them.
        dispatcher_side: ``"compute"`` or ``"training"``, the job that runs them.
        configfile: where rank 0 writes the configuration; removed at the end.
        timeout: seconds; see ``TfDataServiceConfig``.

    Raises:
        ConfigError: (a ValueError) a value that cannot be used; the number of processes is not a multiple of
            dispatchers.
        DataServiceError: as for ``compute_worker_fn``.
    """
    job = process.init()
    workers = workers_per_dispatcher(job.size, dispatchers)
    # Each process derives the key from the job's secret, so that it does not cross the network.
    key = derive(job.secret, "tf.data service") if job.secret is not None else generate_secret()
    with ExitStack() as stack:
        endpoints: tuple[str, ...] = ()
        if job.rank == 0:
            Path(configfile).unlink(missing_ok=True)  # of a service that was killed
            registry = RendezvousServer(
                secret=key,
                size=job.size,
                bind=[job.topology.workers[0].address],
                port_range=job.config.port_range,
            )
            endpoints = stack.enter_context(registry).endpoints
        endpoints = broadcast_object(endpoints)
        config = TfDataServiceConfig(dispatchers, workers, dispatcher_side, endpoints, key, timeout)
        if job.rank == 0:
            config.write(configfile)
            stack.callback(Path(configfile).unlink, missing_ok=True)
        compute_worker_fn(config)
        barrier()  # the registry ends when all know that the service has


def workers_per_dispatcher(processes: int, dispatchers: int) -> int:
    """Return the number of processes of the compute job for each dispatcher.

    Raises:
        ConfigError: (a ValueError) they cannot be divided evenly.
    """
    if dispatchers < 1 or processes % dispatchers:
        raise ConfigError(
            f"the compute job has {processes} processes, which cannot be divided evenly among {dispatchers} dispatchers"
        )
    return processes // dispatchers


def parse_arguments(prog: str) -> argparse.Namespace:
    """The command line's, for a program that is started by ``prog``."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="The compute job of a tf.data service: prepares datasets for a training job.",
    )
    parser.add_argument("configfile", help="file to which the service's configuration is written for the training job")
    parser.add_argument("--dispatchers", type=int, default=1, help="number of dispatchers, by default 1")
    parser.add_argument(
        "--dispatcher-side",
        choices=("compute", "training"),
        default="compute",
        help="the job that runs the dispatchers, by default compute",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60,
        help="seconds that the parts of the service wait for each other, by default 60",
    )
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse_arguments("hvdgloo-run -np N -- python -m hvdgloo.tensorflow.data.compute_worker")
    try:
        main(arguments.dispatchers, arguments.dispatcher_side, arguments.configfile, arguments.timeout)
    except (ConfigError, DataServiceError) as error:
        sys.exit(f"compute_worker: {error}")
