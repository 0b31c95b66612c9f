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
    │   ├── StallError                         a tensor waited longer than the stall shutdown time allows
    │   ├── ConnectError                       two ranks could not be connected with each other
    │   └── BackendError                       a data plane (Gloo, NCCL, ...) failed
    ├── EagerExecutionError                    the function is for TensorFlow 1's graphs
    ├── DataServiceError                       a tf.data service did not start, was lost, or has ended
    ├── WaitTimeoutError (TimeoutError)        a wait ended at the deadline its caller chose
    ├── HostsUpdatedInterrupt                  elastic training: the set of hosts changed
    ├── MissingDependencyError (ImportError)   an optional package is not installed
    │   └── HorovodVersionMismatchError        a framework's version changed since installation
    ├── StoreError                             a store of hvdgloo.spark cannot be written, read or reached
    ├── DataError (ValueError)                 a data set cannot be trained on
    ├── AuthenticationError                    a signature is absent or wrong
    ├── RendezvousError (ConnectionError)      the rendezvous service could not be reached or used
    │   ├── RendezvousTimeoutError (TimeoutError)  it answered, but what was awaited did not arrive in time
    │   ├── RendezvousRefusedError             it answered with an error status and a reason
    │   └── DismissedError                     an elastic job goes on without this worker, or has ended
    ├── RemoteTraceback                        the cause of a worker's exception that run() raises again
    └── LaunchError                            a job could not be started
        ├── HostsUnreachableError              hosts of a job cannot reach each other
        ├── UnusableHostsError                 hosts could not be reached, or lack something
        └── JobFailedError                     a job was started and did not succeed

Every class is a RuntimeError and also the class in brackets. Python's classes whose constructors set attributes
(ImportError, OSError and its subclasses) come first among the bases, so that their constructors run.

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
    """A distributed optimizer's methods were called in an order or a mode in which they make no sense."""


class GradientsInFlightError(OptimizerCallError):
    """Gradients were zeroed or computed again while being reduced: call step() or synchronize() first."""


class HorovodInternalError(HvdglooError):
    """A collective failed. Elastic training catches this class, restores its last commit and goes on."""

    # Time on the monotonic clock at which the first of the waits for other ranks that ended with this failure began:
    # an elastic job has made no progress since.
    waiting_since: float = math.inf

    # The operation in which the program first encountered this failure.
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
    """Tensors waited for missing ranks longer than the stall shutdown time allows."""

    def __init__(self, message: str, *, names: Sequence[str] = (), missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)
        self.missing = tuple(missing)


class ConnectError(HorovodInternalError):
    """Two ranks could not be connected with each other.

    ``missing``: all ranks that did not connect, where several were awaited.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, address: str | None = None, missing: Sequence[int] = ()
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.address = address
        self.missing = tuple(missing)


class BackendError(HorovodInternalError):
    """A data plane failed, for a reason other than the above."""


class EagerExecutionError(HvdglooError):
    """The function is for graphs of TensorFlow 1, and the program runs eagerly."""


class DataServiceError(HvdglooError):
    """A tf.data service (``hvdgloo.tensorflow.data``) did not start in time, was lost, or has ended."""


class WaitTimeoutError(TimeoutError, HvdglooError):
    """A wait ended at the deadline that its caller chose. The result may still arrive."""


class HostsUpdatedInterrupt(HvdglooError):  # noqa: N818 - Horovod's name
    """The set of hosts changed while an elastic job was training.

    ``skip_sync`` is True if state does not have to be synchronised again (hosts were only removed).
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
        restarted: True if the rendezvous server reports that it was restarted since the run that the message is for.
    """

    restarted: bool = False


class RendezvousError(ConnectionError, HvdglooError):
    """The rendezvous service could not be reached or used."""

    def __init__(self, message: str, *, server: str = "", route: str = "") -> None:
        super().__init__(message)
        self.server = server
        self.route = route


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """The service was reached, but what was awaited (workers, a key) did not arrive before the deadline."""


class RendezvousRefusedError(RendezvousError):
    """The service answered with an error status. ``reason`` is its explanation."""

    def __init__(self, message: str, *, server: str = "", route: str = "", status: int = 0, reason: str = "") -> None:
        super().__init__(message, server=server, route=route)
        self.status = status
        self.reason = reason


class DismissedError(RendezvousError):
    """This worker has no part in any further epoch of its elastic job.

    Attributes:
        fate: "removed" if the job continues without it, "over" if others finished their training, "failed" if the job
            failed.
    """

    def __init__(self, message: str, *, fate: str = "removed") -> None:
        super().__init__(message)
        self.fate = fate


class RemoteTraceback(HvdglooError):  # noqa: N818 - not a failure itself, but the trace of one
    """The cause (``__cause__``) of a worker's exception that ``hvdgloo.run.run`` raises again in the caller.

    Attributes:
        rank, host: the worker's.
        traceback: the traceback as the worker would have printed it.
    """

    def __init__(self, message: str, *, rank: int | None = None, host: str = "", traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.traceback = traceback


class LaunchError(HvdglooError):
    """A job could not be started. Nothing is left running."""


class HostsUnreachableError(LaunchError):
    """Hosts of a job cannot reach each other. The text lists the addresses that were tried, with results.

    ``pairs``: (from, to) for each host that cannot reach another.
    """

    def __init__(self, message: str, *, pairs: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.pairs = tuple(pairs)


class UnusableHostsError(LaunchError):
    """Hosts cannot be used: they could not be reached, or lack what a worker needs.

    Attributes:
        hosts: each host's name, and why it cannot be used.
    """

    def __init__(self, message: str, *, hosts: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.hosts = dict(hosts or {})


class JobFailedError(LaunchError):
    """A job was started and did not succeed.

    Attributes:
        rank: the first worker that failed; None if it was an agent or the launcher itself.
        host: the host on which it ran.
        exit_code: its exit status, 128+N if signal N ended it.
        signal: the signal's number, or None.
        last_lines: the end of its output.
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
