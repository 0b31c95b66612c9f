"""The registry of a data service: where its dispatchers, workers and readers find each other, and how it ends.

A store on a rendezvous server of its own, which rank 0 of the compute job runs; anyone who has the configuration's key
may use it. The training job's readers report regularly that they are there, so that a training job that died without
shutting the service down is noticed.

============================  ========================================================================
``dispatcher/<d>``            the address of dispatcher d
``worker/<d>/<w>``            there once worker w of dispatcher d runs
``present``                   set by readers, removed by the compute job
``left/<rank>``               there once a rank of the training job has read all that it wants
``end``                       there once the service is to end
============================  ========================================================================
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from hvdgloo.errors import DataServiceError, RendezvousError, RendezvousTimeoutError
from hvdgloo.rendezvous import HttpStore, RendezvousClient

logger = logging.getLogger(__name__)

_SCOPE = "tf.data"
_PROBE_SECONDS = 3.0  # for an address, if there are others to try
_SHUTDOWN_SECONDS = 5.0  # for reaching a service that may have ended already

_ended: set[bytes] = set()
"""Keys of services that this process has seen end."""


class ComputeClient:
    """Talks to the registry; made by ``TfDataServiceConfig.compute_client``. Any thread may call.

    Args:
        addresses: ``host:port`` of the registry; the first that answers is used.
        key: of the service.
        timeout: seconds that a call may take unless it says otherwise.
        verbose: with 2 each step is logged as INFO, otherwise as DEBUG.

    All methods raise RendezvousError if the registry cannot be reached, and AuthenticationError if the key is another
    service's.
    """

    def __init__(self, addresses: Sequence[str], key: bytes, timeout: float, verbose: int = 1) -> None:
        self._addresses = tuple(addresses)
        self._key = key
        self._timeout = timeout
        self._level = logging.INFO if verbose >= 2 else logging.DEBUG
        self._lock = threading.Lock()
        self._client: RendezvousClient | None = None

    def register_dispatcher(self, dispatcher_id: int, address: str) -> None:
        """Say that a dispatcher runs at ``address`` (``host:port``)."""
        self._say("dispatcher %d runs at %s", dispatcher_id, address)
        self._store.set(f"dispatcher/{dispatcher_id}", address.encode())

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float | None = None) -> str:
        """The address of a dispatcher, as soon as it runs.

        Raises:
            DataServiceError: it does not within ``timeout`` seconds.
        """
        seconds = self._timeout if timeout is None else timeout
        self._say("waiting for dispatcher %d", dispatcher_id)
        try:
            return self._store.get(f"dispatcher/{dispatcher_id}", timeout=seconds).decode()
        except RendezvousTimeoutError as error:
            raise DataServiceError(
                f"dispatcher {dispatcher_id} of the data service did not start within {seconds:g} s. It runs on rank "
                f"{dispatcher_id} of the compute job, or with --dispatcher-side training of the training job: is that "
                "running, and has it got this far? If it only needs longer, raise the compute job's --timeout"
            ) from error

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Say that a worker runs and has found its dispatcher."""
        self._say("worker %d of dispatcher %d runs", worker_id, dispatcher_id)
        self._store.set(f"worker/{dispatcher_id}/{worker_id}", b"")

    def wait_for_dispatcher_worker_registration(
        self, dispatcher_id: int, workers: int, timeout: float | None = None
    ) -> None:
        """Wait until all ``workers`` of a dispatcher run.

        Raises:
            DataServiceError: they do not within ``timeout`` seconds.
        """
        seconds = self._timeout if timeout is None else timeout
        self._say("waiting for the %d workers of dispatcher %d", workers, dispatcher_id)
        try:
            self._store.get_many([f"worker/{dispatcher_id}/{worker}" for worker in range(workers)], timeout=seconds)
        except RendezvousTimeoutError as error:
            raise DataServiceError(
                f"the {workers} workers of dispatcher {dispatcher_id} did not all start within {seconds:g} s: see what "
                "the compute job printed. If it only needs longer, raise its --timeout"
            ) from error

    def shutdown(self) -> None:
        """End the service: all processes of the compute job end. Does nothing if it has ended already."""
        if self._key in _ended:
            return
        self._say("shutting the data service down")
        try:
            self._store.set("end", b"", timeout=min(self._timeout, _SHUTDOWN_SECONDS))
        except RendezvousError as error:
            # Usually another rank has shut it down. If the compute job merely cannot be reached, it will miss its
            # readers.
            logger.info("the data service is not there to be shut down: %s", error)
        finally:
            self.close()

    def close(self) -> None:
        """Close all connections; a further call opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def wait_for_shutdown(self) -> None:
        """Wait until the service is shut down; for a process of the compute job."""
        while not self.has_ended(self._timeout):
            pass

    def wait_for_shutdown_or_silence(self) -> None:
        """Wait until the service is shut down, while readers show that they are there; for one process of the job.

        Raises:
            DataServiceError: no reader has shown up for the length of the service's timeout.
        """
        heard = time.monotonic()
        while not self.has_ended(self._timeout / 4):
            if self._store.delete("present"):
                heard = time.monotonic()
            elif time.monotonic() - heard >= self._timeout:
                raise DataServiceError(
                    f"no rank of the training job has used the data service for {self._timeout:g} s, and none has shut "
                    "it down: did the training job end? Its last act is TfDataServiceConfig.compute_client().shutdown()"
                    ". If it only starts later, raise the compute job's --timeout"
                )

    def has_ended(self, timeout: float) -> bool:
        """Tell whether the service is shut down by now, or within ``timeout`` seconds."""
        try:
            self._store.get("end", timeout=timeout)
        except RendezvousTimeoutError:
            return False
        _ended.add(self._key)
        return True

    def say_present(self, timeout: float) -> None:
        """Report that the training job is reading; takes at most ``timeout`` seconds."""
        self._store.set("present", b"", timeout=timeout)

    def say_left(self, rank: int) -> None:
        """Report that a rank of the training job has stopped reading."""
        self._store.set(f"left/{rank}", b"", timeout=min(self._timeout, _SHUTDOWN_SECONDS))

    def wait_for_leaving(self, ranks: Sequence[int]) -> None:
        """Wait until these ranks have stopped reading.

        Raises:
            RendezvousTimeoutError: some are still reading at the service's timeout.
        """
        self._store.get_many([f"left/{rank}" for rank in ranks])

    def local_address(self) -> str:
        """This host's IP address in its connection to the registry: the compute job reaches it there."""
        return self._connected.local_address(timeout=self._timeout)

    @property
    def _store(self) -> HttpStore:
        return self._connected.store(_SCOPE, timeout=self._timeout)

    @property
    def _connected(self) -> RendezvousClient:
        with self._lock:
            if self._client is None:
                self._client = self._choose()
            return self._client

    def _choose(self) -> RendezvousClient:
        *others, last = self._addresses
        for address in others:
            client = self._at(address)
            try:
                client.local_address(timeout=min(self._timeout, _PROBE_SECONDS))
                return client
            except RendezvousError as error:
                logger.debug("the data service's registry does not answer there: %s", error)
                client.close()
        return self._at(last)

    def _at(self, address: str) -> RendezvousClient:
        source = "the data service's configuration"
        return RendezvousClient(address, self._key, connect_timeout=self._timeout, secret_source=source)

    def _say(self, text: str, *facts: object) -> None:
        logger.log(self._level, text, *facts)
