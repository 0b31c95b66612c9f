"""The address of a data service, as a value: written by the compute job, read by the training job."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdgloo._platform.files import PRIVATE, replacing
from hvdgloo.config import parse_endpoint
from hvdgloo.errors import ConfigError, WaitTimeoutError
from hvdgloo.tensorflow.data._registry import ComputeClient

_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class TfDataServiceConfig:
    """The address of a data service, which the compute job writes to a file, and the training job reads.

    ``TfDataServiceConfig.read(filename, wait_for_file_creation=False, timeout=600)`` is the inverse of ``write``: it
    raises ConfigError (a ValueError) for a file that cannot be used, and WaitTimeoutError if no file appears in time.
    ``from_dict`` is the inverse of ``to_dict``.

    Args:
        dispatchers: how many there are, at least 1.
        workers_per_dispatcher: how many each of them has, at least 1.
        dispatcher_side: ``"compute"`` or ``"training"``: the job on whose ranks 0 to dispatchers-1 they run.
        addresses: ``host:port`` of the service's registry, at least one.
        key: anyone who knows it may use and end the service. It is left out of the representation.
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
        with replacing(os.fspath(filename), PRIVATE) as file:
            file.write(json.dumps(self.to_dict()).encode())

    @classmethod
    def read(
        cls, filename: str | os.PathLike[str], wait_for_file_creation: bool = False, timeout: float = 600
    ) -> TfDataServiceConfig:
        """Read a file that ``write`` has written.

        Args:
            wait_for_file_creation: wait up to ``timeout`` seconds for the file, which the compute job may write later.

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
            verbose: with 2 each step is logged as INFO, otherwise as DEBUG.
        """
        return ComputeClient(self.addresses, self.key, self.timeout, verbose)
