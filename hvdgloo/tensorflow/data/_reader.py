"""Reader: a training process's connection to a data service.

A thread tells the registry that this process is there, and notices when the service is shut down or lost. TensorFlow
itself does not: for an hour it keeps asking dispatchers and workers that are gone, inside an operator that nothing
interrupts. But it gives up at once when a dispatcher does not know its iteration. So the dispatcher's address has a
second part, a port of this process's that is free at first; when the service is gone, a dispatcher that knows no
iteration is started there, and whatever waits for data fails.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from typing import Any

import tensorflow as tf

from hvdgloo._job import process
from hvdgloo._net.ports import hold_free_port
from hvdgloo.config import format_endpoint
from hvdgloo.errors import DataServiceError, HvdglooError, InvalidArgumentError, RendezvousError
from hvdgloo.tensorflow.data._config import TfDataServiceConfig

logger = logging.getLogger(__name__)


class ServiceReader:
    """This process's side of one service; ``of`` returns the only instance."""

    def __init__(self, config: TfDataServiceConfig) -> None:
        self.entered = False
        self.shared_jobs = 0
        self._config = config
        self._client = config.compute_client()
        self._dispatcher: Any = None
        self._ended = ""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._hold = hold_free_port()
        threading.Thread(target=self._watch, name="hvdgloo-data-service", daemon=True).start()

    def start_dispatcher(self, rank: int) -> None:
        """Run this rank's dispatcher in this process.

        Raises:
            InvalidArgumentError: it has run before; the workers have found that one, and do not look for another.
        """
        if self._dispatcher is not None:
            raise InvalidArgumentError(
                "tf_data_service() can be entered once where dispatchers are on the training side: use one `with` "
                "around all that reads"
            )
        self._dispatcher, port = start_dispatcher()
        self._client.register_dispatcher(rank, format_endpoint(self._client.local_address(), port))

    def find(self, rank: int) -> str:
        """The address of the dispatcher of a rank, once all its workers run.

        Raises:
            DataServiceError: they did not start in time, or the service has ended.
        """
        if self._ended:
            raise DataServiceError(self._ended)
        dispatcher = rank % self._config.dispatchers
        endpoint = self._client.wait_for_dispatcher_registration(dispatcher)
        self._client.wait_for_dispatcher_worker_registration(dispatcher, self._config.workers_per_dispatcher)
        family, own = ("ipv6", "::1") if endpoint.startswith("[") else ("ipv4", "127.0.0.1")
        return f"{family}:{endpoint},{format_endpoint(own, self._hold.port)}"

    def explain(self, error: Exception) -> None:
        """Raise the cause of TensorFlow's error, if it was the end of the service.

        Raises:
            DataServiceError: the service was shut down or lost.
        """
        if self._ended:
            raise DataServiceError(self._ended) from error

    def leave(self, rank: int, wait: bool) -> None:
        """This rank has stopped reading. Its dispatcher ends, with ``wait`` once all others that use it have left."""
        try:
            if not self._ended:
                self._client.say_left(rank)
                if wait and self._dispatcher is not None and process.is_initialized():
                    ranks = range(rank, process.current().size, self._config.dispatchers)
                    self._client.wait_for_leaving(ranks)
        except RendezvousError as error:
            logger.warning("not all ranks have said that they no longer need dispatcher %d: %s", rank, error)
        if self._dispatcher is not None:
            self._dispatcher.stop()

    def close(self) -> None:
        """At the end of the process."""
        self._closed.set()
        self._hold.close()
        self._client.close()

    def _watch(self) -> None:
        interval = self._config.timeout / 4
        heard = time.monotonic()
        while not self._closed.is_set():
            try:
                self._client.say_present(interval)
                heard = time.monotonic()
                if self._client.has_ended(interval):
                    self._end("the data service was shut down, and has no more data for this rank")
                    return
            except HvdglooError as error:
                if time.monotonic() - heard >= 2 * interval:
                    self._end(f"the data service is lost, see what the compute job printed: {error}")
                    logger.error("%s. Reading from it fails from now on", self._ended)
                    return
                self._closed.wait(interval / 8)

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._ended = reason
            if self._dispatcher is not None:
                self._dispatcher.stop()
            self._hold.close()
            self._last_resort, _ = start_dispatcher(self._hold.port)
        self._client.close()


def start_dispatcher(port: int = 0) -> tuple[Any, int]:
    """A dispatcher of tf.data's service in this process, and its port."""
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
    return dispatcher, int(dispatcher.target.rpartition(":")[2])


_readers: dict[TfDataServiceConfig, ServiceReader] = {}


def of(config: TfDataServiceConfig) -> ServiceReader:
    """This process's Reader of a service."""
    if config not in _readers:
        _readers[config] = ServiceReader(config)
        atexit.register(_readers[config].close)
    return _readers[config]
