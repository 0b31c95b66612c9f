"""A data loader's skeleton, and a mixin that loads in a thread while the training loop computes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)


class BaseDataLoader:
    """A base class for loaders: subclasses define ``_iterate``, which yields batches; ``_process_batch`` may change
    each."""

    def __len__(self) -> int:
        """Return the number of batches."""
        raise NotImplementedError(f"{type(self).__name__} has to define __len__")

    def _iterate(self) -> Iterator[Any]:
        raise NotImplementedError(f"{type(self).__name__} has to define _iterate, which yields batches")

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        return batch


class _End:
    """The queue's last item; carries the error that ended the loading, if there was one."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class AsyncDataLoaderMixin:
    """Loads batches in a thread, ahead of their use: ``class Loader(AsyncDataLoaderMixin, MyLoader): ...``.

    Args:
        async_loader_queue_size: how many batches may wait; 0 loads in the training loop's own thread.
        async_loader_end_timeout: seconds that the loading thread has to end; it checks between batches.
        debug_data_loader: log what is loaded and used.

    Leaving the iteration early, or beginning another, ends the thread. An error in the thread is raised in the training
    loop.
    """

    def __init__(
        self,
        *args: Any,
        async_loader_queue_size: int = 64,
        async_loader_end_timeout: float = 5.0,
        debug_data_loader: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.async_loader_queue_size = async_loader_queue_size
        self.async_loader_end_timeout = async_loader_end_timeout
        self.debug_data_loader = debug_data_loader
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def close_async_loader(self) -> None:
        """End the thread; what it has loaded ahead is dropped.

        If the thread is in the middle of loading a batch, this waits for it, but no longer than
        ``async_loader_end_timeout`` seconds: after that the thread is left running (with a warning), loads that batch,
        drops it, and ends. It does not keep the program from ending.
        """
        if self._stop is not None and self._thread is not None:
            self._stop.set()
            self._thread.join(self.async_loader_end_timeout)
            if self._thread.is_alive():
                logger.warning(
                    "the thread of %s is still loading a batch after %g s; it ends once it has that batch",
                    type(self).__name__,
                    self.async_loader_end_timeout,
                )
            self._stop = self._thread = None

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc] # the loader that this is mixed into
            return
        self.close_async_loader()
        stop = self._stop = threading.Event()
        batches: queue.Queue[Any] = queue.Queue(self.async_loader_queue_size)
        self._thread = threading.Thread(
            target=self._load, args=(batches, stop), name="hvdgloo-data-loader", daemon=True
        )
        self._thread.start()
        try:
            while True:
                batch = batches.get()
                if isinstance(batch, _End):
                    if batch.error is not None:
                        raise batch.error
                    return
                self._say("used a batch, %d more are waiting", batches.qsize())
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            if self._stop is stop:
                self.close_async_loader()

    def _load(self, batches: queue.Queue[Any], stop: threading.Event) -> None:
        error: BaseException | None = None
        try:
            for batch in self._iterate():  # type: ignore[attr-defined]
                if not _put(batches, batch, stop):
                    return
                self._say("loaded a batch, %d are waiting", batches.qsize())
        except BaseException as raised:  # noqa: BLE001 - it belongs to the loop that waits for batches
            error = raised
        _put(batches, _End(error), stop)

    def _say(self, text: str, *details: object) -> None:
        if self.debug_data_loader:
            logger.info(text, *details)


def _put(batches: queue.Queue[Any], item: Any, stop: threading.Event) -> bool:
    """Queue an item as soon as there is room; False if the loader is closed instead."""
    while not stop.is_set():
        try:
            batches.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False
