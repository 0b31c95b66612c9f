"""Every error that hvdgloo raises, in one tree.

::

    HvdglooError (RuntimeError)
    ├── ConfigError (ValueError)               a flag, variable, file or host list that cannot be used
    ├── InvalidArgumentError (ValueError)      a call that is wrong on this rank alone; nothing was sent
    │   ├── DuplicateNameError                 the name is already in flight in this process set
    │   └── OptimizerCallError (AssertionError)  a distributed optimizer's methods are called in a wrong order
    │       └── GradientsInFlightError         gradients are touched while they are being reduced
    ├── HorovodInternalError                   a collective failed; Horovod's well-known name
    │   ├── NotInitializedError (ValueError)   hvd.init() has not been called, or shutdown() has
    │   ├── MismatchError                      ranks disagree about one tensor; the job stays usable
    │   ├── JobShutdownError                   a rank ended its part of the job
    │   ├── PeerLostError                      a rank died, or stopped answering
    │   ├── StallError                         a tensor waited longer than the stall shutdown time
    │   ├── ConnectError                       two ranks could not be connected with each other
    │   └── BackendError                       a data plane (Gloo, NCCL, ...) failed
    ├── EagerExecutionError                    this is for graphs of TensorFlow 1
    ├── DataServiceError                       a tf.data service did not start, was lost, or has ended
    ├── WaitTimeoutError (TimeoutError)        a wait ended at the deadline its caller chose
    ├── HostsUpdatedInterrupt                  elastic training: the set of hosts changed
    ├── MissingDependencyError (ImportError)   an optional package is not installed
    │   └── HorovodVersionMismatchError        a framework's version changed since installation
    ├── StoreError                             a store of hvdgloo.spark cannot be written, read or reached
    ├── DataError (ValueError)                 a data set cannot be trained on
    ├── AuthenticationError                    a signature is absent or wrong
    ├── RendezvousError (ConnectionError)      the rendezvous service could not be reached or used
    │   ├── RendezvousTimeoutError (TimeoutError)  it answered, but what was awaited did not come
    │   ├── RendezvousRefusedError             it answered with a 4xx: status and reason
    │   └── DismissedError                     an elastic job goes on without this worker, or has ended
    ├── RemoteTraceback                        where a worker raised what run() raises again: its cause
    └── LaunchError                            a job could not be started
        ├── HostsUnreachableError              hosts of a job cannot reach each other
        ├── UnusableHostsError                 hosts that could not be reached, or lack something
        └── JobFailedError                     a job was started and did not succeed

Every class is a RuntimeError, and also what is given in brackets. Python's classes that set attributes of their own
(ImportError, OSError's) come first among the bases, so that they do.

An error carries its facts as attributes, and its text says what to do next. Errors are sent between processes
(``hvdgloo.run.run`` re-raises a worker's exception in the caller), so every class here can be pickled: facts passed by
keyword are restored from the instance's dictionary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hvdgloo.version import library_name


class HvdglooError(RuntimeError):
    """The root of the tree: ``except HvdglooError`` catches everything that hvdgloo raises on purpose.

    A RuntimeError, because Horovod's programs catch that class whatever went wrong.
    """


class ConfigError(HvdglooError, ValueError):
    """A setting cannot be used: a flag, an environment variable, a configuration file, a host list."""


class InvalidArgumentError(HvdglooError, ValueError):
    """A call's arguments are wrong on this rank alone. Nothing was sent; other ranks wait for a correct call."""


class DuplicateNameError(InvalidArgumentError):
    """A tensor of this name is already in flight in the same process set."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class OptimizerCallError(InvalidArgumentError, AssertionError):
    """A distributed optimizer's methods are called in an order, or in a mode, in which they have no meaning."""


class GradientsInFlightError(OptimizerCallError):
    """Gradients are zeroed, or computed again, while they are being reduced: call step() or synchronize() first."""


class HorovodInternalError(HvdglooError):
    """A collective failed. Elastic training catches this class, restores its last commit and goes on."""

    # When the first of those that met this failure in a wait for other ranks began to wait, on the monotonic clock:
    # from then on an elastic job has stood still.
    waiting_since: float = math.inf

    # The operation in which the program first met this failure.
    operation: str = ""


class NotInitializedError(HorovodInternalError, ValueError):
    """``hvd.init()`` has not been called, or ``hvd.shutdown()`` has been since."""

    def __init__(self, message: str = "") -> None:
        # Word for word Horovod's: programs look for it.
        super().__init__(message or f"{library_name()} has not been initialized; use hvd.init().")


class MismatchError(HorovodInternalError):
    """Ranks disagree about a tensor's dtype, shape, operation or parameters. Only that operation fails."""

    def __init__(self, message: str, *, name: str = "") -> None:
        super().__init__(message)
        self.name = name


class JobShutdownError(HorovodInternalError):
    """A rank called ``shutdown()`` or exited, which ends collective operations on all ranks."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLostError(HorovodInternalError):
    """A rank died (its connection ended) or stopped answering."""

    def __init__(self, message: str, *, rank: int | None = None, host: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host


class StallError(HorovodInternalError):
    """Tensors waited for missing ranks longer than the stall shutdown time."""

    def __init__(self, message: str, *, names: Sequence[str] = (), missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)
        self.missing = tuple(missing)


class ConnectError(HorovodInternalError):
    """Two ranks could not be connected with each other.

    ``missing``: all ranks that did not come, where several were waited for.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, address: str | None = None, missing: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.address = address
        self.missing = tuple(missing)


class BackendError(HorovodInternalError):
    """A data plane failed for a reason of its own."""


class EagerExecutionError(HvdglooError):
    """The function is for graphs of TensorFlow 1, and the program runs eagerly."""


class DataServiceError(HvdglooError):
    """A tf.data service (``hvdgloo.tensorflow.data``) did not start in time, was lost, or has ended."""


class WaitTimeoutError(TimeoutError, HvdglooError):
    """A wait ended at the deadline that its caller chose. The awaited result may still come."""


class HostsUpdatedInterrupt(HvdglooError):  # noqa: N818 - Horovod's name
    """The set of hosts changed while an elastic job was training.

    ``skip_sync`` is True if state need not be synchronised again (hosts were only removed).
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync

    def __str__(self) -> str:
        return "the set of hosts has changed; hvd.elastic.run handles this by itself"


class MissingDependencyError(ImportError, HvdglooError):
    """An optional package is needed but not installed. The text gives the command that installs it."""


class HorovodVersionMismatchError(MissingDependencyError):
    """A framework's version differs from the one present at installation.

    Kept for migrating programs' ``except`` clauses: nothing in hvdgloo is compiled, so hvdgloo itself never raises it.
    """

    def __init__(self, name: str = "", version: str = "", installed_version: str = "") -> None:
        super().__init__(
            f"{name or 'a framework'} {version} is installed, but {installed_version or 'another version'} is expected"
        )
        self.framework = name
        self.version = version
        self.installed_version = installed_version

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.framework, self.version, self.installed_version)


class StoreError(HvdglooError):
    """A store of ``hvdgloo.spark`` cannot be written, has nothing at a path, or is not the same one on all hosts."""


class DataError(HvdglooError, ValueError):
    """A data set cannot be trained on: an unknown column, a null, rows of different lengths, too few rows."""


class AuthenticationError(HvdglooError):
    """A message's signature is absent or wrong: the peer does not know this job's secret, or bytes were changed.

    Attributes:
        restarted: the rendezvous server says that it is another run than the one that the message was for.
    """

    restarted: bool = False


class RendezvousError(ConnectionError, HvdglooError):
    """The rendezvous service could not be reached or used."""

    def __init__(self, message: str, *, server: str = "", route: str = "") -> None:
        super().__init__(message)
        self.server = server
        self.route = route


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """The service was reached, but what was awaited (workers, a key) did not come before the deadline."""


class RendezvousRefusedError(RendezvousError):
    """The service answered with an error status. ``reason`` is its explanation."""

    def __init__(self, message: str, *, server: str = "", route: str = "", status: int = 0, reason: str = "") -> None:
        super().__init__(message, server=server, route=route)
        self.status = status
        self.reason = reason


class DismissedError(RendezvousError):
    """This worker is in no further epoch of its elastic job.

    Attributes:
        fate: "removed" if the job goes on without it, "over" if others have finished their training, "failed" if the
            job has failed.
    """

    def __init__(self, message: str, *, fate: str = "removed") -> None:
        super().__init__(message)
        self.fate = fate


class RemoteTraceback(HvdglooError):  # noqa: N818 - not a failure itself, but the trace of one
    """The cause (``__cause__``) of a worker's exception that ``hvdgloo.run.run`` raises again in the caller.

    Attributes:
        rank, host: of the worker.
        traceback: the traceback, as the worker would have printed it.
    """

    def __init__(self, message: str, *, rank: int | None = None, host: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.traceback = traceback


class LaunchError(HvdglooError):
    """A job could not be started. Nothing is left running."""


class HostsUnreachableError(LaunchError):
    """Hosts of a job cannot reach each other. The text says which addresses were tried, and the result of each.

    ``pairs``: (from, to) for each host that cannot reach another.
    """

    def __init__(self, message: str, *, pairs: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.pairs = tuple(pairs)


class UnusableHostsError(LaunchError):
    """Hosts cannot be used: they could not be reached, or lack what a worker needs.

    Attributes:
        hosts: each one's name, and why it cannot be used.
    """

    def __init__(self, message: str, *, hosts: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.hosts = dict(hosts or {})


class JobFailedError(LaunchError):
    """A job was started and did not succeed.

    Attributes:
        rank: the first worker that failed, None if it was an agent or the launcher itself.
        host: the host it ran on.
        exit_code: its exit status, 128+N if signal N ended it.
        signal: the signal's number, or None.
        last_lines: the end of what it printed.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str | None = None,
        exit_code: int = 1,
        signal: int | None = None,
        last_lines: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.signal = signal
        self.last_lines = tuple(last_lines)
