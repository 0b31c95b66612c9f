"""The form of a worker's log: hvdgloo's messages on stderr, unless the program shows them itself."""

from __future__ import annotations

import logging
import sys

from hvdgloo.config import Config

_TRACE = 5
_LEVELS = {"TRACE": _TRACE, "FATAL": logging.CRITICAL}


class _Handler(logging.StreamHandler):  # type: ignore[type-arg] # generic from Python 3.11 on
    """A class of our own, so that the handler can be found again; writes to what sys.stderr is at that moment."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        """Show the record, unless the root logger already does: its handlers may come and go at any time."""
        if not _root_shows(record):
            super().emit(record)


def _root_shows(record: logging.LogRecord) -> bool:
    """Tell whether the root logger writes hvdgloo's records to the terminal, as after ``logging.basicConfig()``."""
    if not logging.getLogger("hvdgloo").propagate:
        return False
    return any(
        isinstance(handler, logging.StreamHandler)
        and handler.stream in (sys.stderr, sys.stdout)
        and record.levelno >= handler.level
        for handler in logging.getLogger().handlers
    )


def configure_logging(config: Config, rank: int | None) -> None:
    """Show hvdgloo's messages on stderr as ``[time: LEVEL file:line] [rank]: text``, without the rank in workers that a
    launcher's agent has started.

    A program that has attached handlers of its own to the ``hvdgloo`` logger keeps them, and no other is added. Where
    the root logger writes to the terminal (``logging.basicConfig()``, which importing MXNet calls), it shows them
    instead.
    """
    logging.addLevelName(_TRACE, "TRACE")
    log = logging.getLogger("hvdgloo")
    others = [handler for handler in log.handlers if not isinstance(handler, _Handler)]
    log.setLevel(_LEVELS.get(config.log_level, config.log_level))
    for handler in [handler for handler in log.handlers if isinstance(handler, _Handler)]:
        log.removeHandler(handler)
    if others:
        return
    handler = _Handler()
    time = "" if config.log_hide_time else "%(asctime)s.%(msecs)03d: "
    place = (
        "" if rank is None or config.agent_id else f" [{rank}]"
    )  # the launcher's prefix, or the file, names the rank
    handler.setFormatter(
        logging.Formatter(f"[{time}%(levelname)s %(filename)s:%(lineno)d]{place}: %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    log.addHandler(handler)
