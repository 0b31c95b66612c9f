"""tf.data's service, spread over a compute job and a training job by hvdgloo; with Horovod's names.

A dispatcher hands out the work of its workers. Rank r of the compute job is a worker of dispatcher r % dispatchers, and
rank r of the training job reads through dispatcher r % dispatchers. Dispatchers run on the first ranks of either job
(``dispatcher_side``).

Importing this module gives ``tf.data.Dataset`` the method ``send_to_data_service``.
"""

from __future__ import annotations

import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdgloo import context
from hvdgloo.config import format_endpoint, parse_endpoint
from hvdgloo.errors import ConfigError, DataServiceError, InvalidArgumentError, WaitTimeoutError
from hvdgloo.tensorflow.data import reader as readers
from hvdgloo.tensorflow.data.registry import ComputeClient

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class TfDataServiceConfig:
    """How to reach a data service; the compute job writes it to a file, and the training job reads it.

    ``TfDataServiceConfig.read(filename, wait_for_file_creation=False, timeout=600)`` is the inverse of ``write``: it
    raises ConfigError (a ValueError) for a file that cannot be used, and WaitTimeoutError if it waits and none comes.
    ``from_dict`` is the inverse of ``to_dict``.

    Args:
        dispatchers: how many there are, at least 1.
        workers_per_dispatcher: likewise.
        dispatcher_side: ``"compute"`` or ``"training"``: the job on whose ranks 0 to dispatchers-1 they run.
        addresses: ``host:port`` of the service's registry, at least one.
        key: who knows it may use and end the service. It is left out of the representation.
        timeout: seconds that dispatchers and workers may take to start, and after which one job notices that the other
            is gone.

    Raises:
        ConfigError: (a ValueError) at construction, for a value that cannot be used.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: Sequence[str]
    key: bytes = field(repr=False)
    timeout: float = 60

    def __post_init__(self) -> None:
        for name in ("dispatchers", "workers_per_dispatcher"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} of a data service must be a whole number from 1, not {value!r}")
        if self.dispatcher_side not in ("compute", "training"):
            raise ConfigError(f"dispatcher_side must be 'compute' or 'training', not {self.dispatcher_side!r}")
        if isinstance(self.addresses, str) or not self.addresses:
            raise ConfigError(f"addresses must be a list of at least one host:port, not {self.addresses!r}")
        for address in self.addresses:
            try:
                parse_endpoint(address)
            except (ValueError, AttributeError):
                raise ConfigError(f"{address!r} in addresses of a data service is not host:port") from None
        object.__setattr__(self, "addresses", tuple(self.addresses))
        if not isinstance(self.key, bytes) or not self.key:
            raise ConfigError("key of a data service must be bytes, and not empty")
        if not isinstance(self.timeout, (int, float)) or not (0 < self.timeout < math.inf):
            raise ConfigError(f"timeout of a data service must be a number of seconds above 0, not {self.timeout!r}")

    def to_dict(self) -> dict[str, Any]:
        """All fields as values of JSON, the key in hexadecimal digits."""
        return {**vars(self), "addresses": list(self.addresses), "key": self.key.hex()}

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> TfDataServiceConfig:
        """The inverse of ``to_dict``.

        Raises:
            ConfigError: (a ValueError) a field is missing, unknown, or has a value that cannot be used.
        """
        try:
            return cls(**{**config, "key": bytes.fromhex(config["key"])})
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"this is not the configuration of a data service: {error}") from None

    def write(self, filename: str | os.PathLike[str]) -> None:
        """Write a file that only its user can read. It appears whole, or replaces another one at once."""
        path = Path(filename)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                json.dump(self.to_dict(), file)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise

    @classmethod
    def read(
        cls, filename: str | os.PathLike[str], wait_for_file_creation: bool = False, timeout: float = 600
    ) -> TfDataServiceConfig:
        """Read a file that ``write`` has written.

        Args:
            wait_for_file_creation: wait for the file, which the compute job may write later, ``timeout`` seconds.

        Raises:
            ConfigError: (a ValueError) it cannot be read, or holds something else.
            WaitTimeoutError: it was not there in time.
        """
        deadline = time.monotonic() + timeout
        while wait_for_file_creation and not os.path.exists(filename):
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"{os.fspath(filename)} was not there within {timeout:g} s: the compute job writes it on its rank "
                    "0. Does that job run, and is it the same file on both hosts?"
                )
            time.sleep(_POLL_SECONDS)
        try:
            config = json.loads(Path(filename).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{os.fspath(filename)}: {error.strerror}; the compute job writes it on its rank 0"
            ) from None
        except ValueError:
            config = None
        if not isinstance(config, dict):
            raise ConfigError(f"{os.fspath(filename)} does not hold the configuration of a data service")
        return cls.from_dict(config)

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """A client of the service's registry, whose ``shutdown()`` ends the service. It connects when it is first used.

        Args:
            verbose: 2 logs each step as INFO, else as DEBUG.
        """
        return ComputeClient(self.addresses, self.key, self.timeout, verbose)


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Use a data service in a process of the training job.

    Where dispatchers are on the training side, this rank's runs until the end of the ``with``, which waits for the
    other ranks that use it (at most the service's timeout, and only if ``hvd.init()`` was called); a process can enter
    it once then.

    Args:
        compute_config: of the service.
        rank: of this process in the training job.

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
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> Any:
    """Have a dataset prepared by a data service; also a method of ``tf.data.Dataset`` once this module is imported.

    What stands before this call runs on the workers, what is applied to the result runs here. Each worker takes a part
    of what the dataset begins with (files, numbers, slices). Python functions (``from_generator``, ``py_function``) do
    not travel.

    Args:
        dataset: a ``tf.data.Dataset``.
        compute_config: of the service.
        rank: of this process in the training job.
        size: number of the training job's ranks; needed with ``round_robin``.
        reuse_dataset: the ranks of a dispatcher share one pass over the dataset, so that each element goes to one of
            them; otherwise each rank gets all of it. All ranks make their calls for the same datasets in the same
            order.
        round_robin: likewise, and the ranks take turns, each time all from one worker: with one worker per dispatcher,
            what a rank gets follows from the dataset alone. The dataset must be without end (``repeat()``).

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
    return dataset.apply(distribute(processing_mode="distributed_epoch", service=address, **sharing))


tf.data.Dataset.send_to_data_service = send_to_data_service


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Be a process of the compute job until the training job shuts the service down; calls ``hvd.init()`` if needed.

    ``compute_worker`` is the program that also runs the registry, at ``compute_config.addresses``.

    Raises:
        ConfigError: (a ValueError) the job has not dispatchers x workers_per_dispatcher processes.
        DataServiceError: a dispatcher did not start in time, or cannot be reached; or, on rank 0, no rank of the
            training job has used the service for its timeout.
        RendezvousError: the registry cannot be reached.
    """
    job = context.init()
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
            f"the worker at {address} has not reached its dispatcher at {dispatcher} within {timeout:g} s: {error}. Is "
            "that process still there, and does no firewall stand between?"
        ) from error
    service = tf.data.experimental.service
    host = f"[{address}]" if ":" in address else address
    return service.WorkerServer(service.WorkerConfig(dispatcher, worker_address=f"{host}:%port%"))
