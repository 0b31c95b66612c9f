"""tf.data's service, spread over a compute job and a training job by hvdgloo; with Horovod's names.

A dispatcher hands out the work of its workers. Rank r of the compute job is a worker of dispatcher r % dispatchers, and
rank r of the training job reads through dispatcher r % dispatchers. Dispatchers run on the first ranks of either job
(``dispatcher_side``).

Importing this module gives ``tf.data.Dataset`` the method ``send_to_data_service``.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import tensorflow as tf

from hvdgloo._job import process
from hvdgloo.config import format_endpoint, parse_endpoint
from hvdgloo.errors import ConfigError, DataServiceError, InvalidArgumentError
from hvdgloo.tensorflow.data import _reader as readers
from hvdgloo.tensorflow.data._config import TfDataServiceConfig

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]

_POLL_SECONDS = 0.1


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Use a data service in a process of the training job.

    Where dispatchers are on the training side, this rank's runs until the end of the ``with``, which waits for the
    other ranks that use it (at most the service's timeout, and only if ``hvd.init()`` was called); a process can then
    enter it only once.

    Args:
        compute_config: the service's configuration.
        rank: this process's rank in the training job.

    Returns:
        (as the target of the ``with``) the address of this rank's dispatcher, for
        ``tf.data.experimental.service.distribute(service=...)``. It may have several parts.

    Raises:
        DataServiceError: dispatcher or workers did not start in time; or, in place of TensorFlow's own error, the
            service was shut down or lost while the body of the ``with`` read from it.
        RendezvousError: the service's registry cannot be reached.
        InvalidArgumentError: (a ValueError) it is entered a second time.
    """
    reader = readers.of(compute_config)
    good = False
    try:
        if compute_config.dispatcher_side == "training" and rank < compute_config.dispatchers:
            reader.start_dispatcher(rank)
        address = reader.find(rank)
        reader.entered = True
        yield address
        good = True
    except tf.errors.OpError as error:
        reader.explain(error)
        raise
    finally:
        reader.entered = False
        reader.leave(rank, wait=good)


def send_to_data_service(
    dataset: Any,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: Any = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """Have a dataset prepared by a data service; also a method of ``tf.data.Dataset`` once this module is imported.

    What comes before this call runs on the workers, what is applied to the result runs here. Python functions
    (``from_generator``, ``py_function``) do not travel.

    Args:
        dataset: a ``tf.data.Dataset``.
        compute_config: the service's configuration.
        rank: this process's rank in the training job.
        size: number of the training job's ranks; needed with ``round_robin``.
        processing_mode: what each worker takes of what the dataset begins with (files, numbers, slices): a part
            ("distributed_epoch", so that the workers take every element once), everything ("parallel_epochs"), or a
            ``tf.data.experimental.service.ShardingPolicy``.
        reuse_dataset: the ranks of a dispatcher share one pass over the dataset, so that each element goes to one of
            them; otherwise each rank gets all of it. All ranks make their calls for the same datasets in the same
            order.
        round_robin: as ``reuse_dataset``, and the ranks take turns, each time all from one worker: with one worker per
            dispatcher, what a rank gets follows from the dataset alone. The dataset must be endless (``repeat()``).

    Returns:
        the dataset of what the service prepares.

    Raises:
        DataServiceError: dispatcher or workers did not start in time, or the service has ended.
        RendezvousError: the service's registry cannot be reached.
        InvalidArgumentError: (a ValueError) ``round_robin`` without ``size``; dispatchers are on the training side, and
            this is not inside ``tf_data_service``.
    """
    if round_robin and size is None:
        raise InvalidArgumentError("round_robin=True needs size, the number of ranks of the training job")
    reader = readers.of(compute_config)
    if compute_config.dispatcher_side == "training" and not reader.entered:
        raise InvalidArgumentError(
            "dispatchers are on the training side: call send_to_data_service() inside "
            "`with tf_data_service(compute_config, rank):`, which runs them"
        )
    address = reader.find(rank)
    sharing: dict[str, Any] = {}
    if reuse_dataset or round_robin:
        sharing["job_name"] = f"hvdgloo-{reader.shared_jobs}"
        reader.shared_jobs += 1
    if round_robin:
        readers_of_dispatcher = range(rank % compute_config.dispatchers, size or 0, compute_config.dispatchers)
        sharing |= {
            "consumer_index": readers_of_dispatcher.index(rank),
            "num_consumers": len(readers_of_dispatcher),
        }
    distribute = tf.data.experimental.service.distribute
    return dataset.apply(distribute(processing_mode=processing_mode, service=address, **sharing))


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Be a process of the compute job until the training job shuts the service down; calls ``hvd.init()`` if needed.

    ``compute_worker`` is the program that also runs the registry, at ``compute_config.addresses``.

    Raises:
        ConfigError: (a ValueError) the job does not have dispatchers x workers_per_dispatcher processes.
        DataServiceError: a dispatcher did not start in time, or cannot be reached; or, on rank 0, no rank of the
            training job has used the service for its timeout.
        RendezvousError: the registry cannot be reached.
    """
    job = process.init()
    dispatchers, workers = compute_config.dispatchers, compute_config.workers_per_dispatcher
    if job.size != dispatchers * workers:
        raise ConfigError(
            f"a data service of {dispatchers} dispatchers with {workers} workers each needs a compute job of "
            f"{dispatchers * workers} processes, and this one has {job.size}"
        )
    address = job.topology.workers[job.rank].address
    with closing(compute_config.compute_client()) as client:
        dispatcher_id = job.rank % dispatchers
        dispatcher = None
        if compute_config.dispatcher_side == "compute" and job.rank < dispatchers:
            dispatcher, port = readers.start_dispatcher()
            client.register_dispatcher(dispatcher_id, format_endpoint(address, port))
        worker = _start_worker(client.wait_for_dispatcher_registration(dispatcher_id), address, compute_config.timeout)
        client.register_worker_for_dispatcher(dispatcher_id, job.rank // dispatchers)
        if job.rank == 0:
            client.wait_for_shutdown_or_silence()
        else:
            client.wait_for_shutdown()
    worker.stop()
    if dispatcher is not None:
        dispatcher.stop()


def _start_worker(dispatcher: str, address: str, timeout: float) -> Any:
    """A worker of tf.data's service in this process, which others reach at ``address``."""
    try:
        # TensorFlow would try for an hour, whatever its dispatcher_timeout_ms.
        socket.create_connection(parse_endpoint(dispatcher), timeout).close()
    except OSError as error:
        raise DataServiceError(
            f"the worker at {address} has not reached its dispatcher at {dispatcher} within {timeout:g} s ({error}); "
            "check that that process is still there, and that no firewall is in the way"
        ) from error
    service = tf.data.experimental.service
    host = f"[{address}]" if ":" in address else address
    return service.WorkerServer(service.WorkerConfig(dispatcher, worker_address=f"{host}:%port%"))
