"""Every call that concerns a GPU: streams, events, memory, kernels, NCCL. No other module calls ``torch.cuda``.

What is given to a GPU runs later, in order on a *stream*. A thread has a current stream on each GPU; its kernels,
copies and collectives go there. Streams are ordered among themselves by *events* only: one stream records, another
waits. Which stream is current depends on the thread and on the GPU that is meant, and "the current GPU" is hardly ever
that; so functions here take the GPU that they mean.

Memory that Python frees goes back to the stream that it was allocated on, and may be written there at once, whatever
other streams still do with it. So a function that hands memory to another stream keeps it until an event has happened
that follows its last use, or calls ``used_here``.

Tests put a simulated GPU in this module's place (``tests/support/gpus``): what is written against these functions can
be shown to be in order without any hardware.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvdgloo._backends import kernels
from hvdgloo._backends.base import first_line
from hvdgloo._platform.machine import boot_id
from hvdgloo._platform.temporary_variables import TemporaryVariables

logger = logging.getLogger(__name__)

Event = Any
"""An event, as ``record`` returns it: a ``torch.cuda.Event``, or a simulated one."""

Stream = Any
"""A stream, as ``current`` returns it: a ``torch.cuda.Stream``, or a simulated one; equal for the same stream only."""

_LONGEST_OPERATION = timedelta(days=1)

_THREAD_LOCAL = 1
"""CUDA's and HIP's number of the capture mode in which a thread is not concerned by what others capture."""

_settings = TemporaryVariables(
    {
        # torch's watchdog notes errors and timeouts, and leaves it to us to act on them,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
        # tells no other rank,
        "TORCH_NCCL_PROPAGATE_ERROR": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_DESYNC_DEBUG": "0",
        # does not sleep for a minute after an error, during which the group cannot be ended,
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
        # and is not itself watched by a thread that ends the process.
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        # NaNs are the program's business: this check ends the GPU's context.
        "TORCH_NCCL_NAN_CHECK": "0",
    }
)
"""Variables that torch reads when a group is made, under names of torch's own. A user's groups keep what the user has
set."""

# What there is -------------------------------------------------------------------------------------------------------


def platform() -> str:
    """Return what this torch was built for: "cuda", "rocm" (whose RCCL goes by NCCL's name there), or "cpu"."""
    if torch.version.hip is not None:
        return "rocm"
    return "cuda" if torch.version.cuda is not None else "cpu"


def nccl_version() -> int:
    """The version code of the NCCL that comes with torch: 22105 for 2.21.5; 0 if there is none."""
    if not (dist.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return int(major * 10000 + minor * 100 + patch)


def count() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(index: int) -> torch.device:
    """Make a GPU the one that is meant where a program names none."""
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def identity(device: torch.device) -> str:
    """Tell a GPU from all others of the job by what NCCL compares: its machine and its place on the PCI bus.

    ``NCCL_HOSTID`` stands for the machine where it is set. Slices of one GPU (MIG) have UUIDs of their own, but share
    its place: NCCL before 2.30 takes them for one GPU and refuses them to each other.
    """
    place = f"{os.environ.get('NCCL_HOSTID') or boot_id()} {_bus(device)}"
    return hashlib.sha256(place.encode()).hexdigest()[:32]  # NCCL_HOSTID may have any length


def _bus(device: torch.device) -> str:
    """Name a GPU's place on the PCI bus, or its UUID where the driver does not tell the place."""
    library, function = (
        ("libamdhip64.so", "hipDeviceGetPCIBusId") if platform() == "rocm" else ("libcuda.so.1", "cuDeviceGetPCIBusId")
    )
    place = ctypes.create_string_buffer(32)
    with contextlib.suppress(OSError, AttributeError):
        if not getattr(ctypes.CDLL(library), function)(place, len(place), device.index):
            return place.value.decode()
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device.index))


def host_index(device: torch.device) -> int:
    """Return a GPU's number among the host's, as NVML counts them, whichever of them this process sees; -1 if torch
    cannot tell."""
    try:
        return int(torch.cuda._get_nvml_device_index(device))
    except Exception:  # noqa: BLE001 - it is torch's own function; what it is wanted for is only shown
        return -1


def of(tensor: torch.Tensor) -> torch.device | None:
    """The GPU that a tensor is on; None for one on the CPU or another kind of device."""
    return tensor.device if tensor.is_cuda else None


# Streams and events --------------------------------------------------------------------------------------------------


def current(device: torch.device) -> Stream:
    """This thread's current stream on a GPU."""
    return torch.cuda.current_stream(device)


def current_key(device: torch.device) -> Hashable:
    """Return a value that tells this thread's current stream on a GPU from all others; much cheaper than
    ``current``."""
    key: Hashable = torch._C._cuda_getCurrentStream(device.index)
    return key


def use_own_stream(device: torch.device) -> None:
    """Give this thread a stream of its own on a GPU, if it has none yet.

    torch gives out a few dozen streams in turn. Streams of a higher priority are seldom asked for, so that the program
    does not get the same one; and the kernels of a collective should not queue behind others.
    """
    if torch.cuda.current_stream(device) == torch.cuda.default_stream(device):
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]


def use(stream: Stream) -> None:
    """Make a stream this thread's current one on its GPU, and that GPU this thread's current one."""
    torch.cuda.set_stream(stream)


def ignore_captures() -> None:
    """Let this thread ask for events and memory while another one captures a CUDA graph.

    Unless it says otherwise, CUDA takes that for a mistake of the thread that captures, and spoils its graph.
    """
    library, function = (
        ("libamdhip64.so", "hipThreadExchangeStreamCaptureMode")
        if platform() == "rocm"
        else ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode")
    )
    mode = ctypes.c_int(_THREAD_LOCAL)
    try:
        failed = getattr(ctypes.CDLL(library), function)(ctypes.byref(mode))
    except (OSError, AttributeError) as error:
        failed = first_line(error)
    if failed:
        logger.warning("CUDA graphs cannot be captured while a collective is under way: %s: %s", function, failed)


def record(device: torch.device) -> Event:
    """An event that happens when the GPU has done all that this thread's current stream there has been given."""
    return torch.cuda.current_stream(device).record_event()


def wait(event: Event, device: torch.device) -> None:
    """Make this thread's current stream on a GPU, and not this thread, wait for an event of any GPU."""
    torch.cuda.current_stream(device).wait_event(event)


def wait_for(stream: Stream, device: torch.device) -> None:
    """Make this thread's current stream on a GPU wait for all that another stream has been given so far."""
    here = torch.cuda.current_stream(device)
    if stream != here:
        here.wait_stream(stream)


def has_happened(event: Event) -> bool:
    """Return whether an event has happened. Raises RuntimeError if the GPU has failed."""
    return bool(event.query())


def settle(device: torch.device) -> None:
    """Block this thread until its current stream on a GPU has done all that it has been given."""
    torch.cuda.current_stream(device).synchronize()


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread's current stream on a GPU is being captured into a CUDA graph, and so runs nothing
    now."""
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


# Memory --------------------------------------------------------------------------------------------------------------


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory of a GPU, row-major; it belongs to this thread's current stream there."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def pinned(nbytes: int) -> torch.Tensor:
    """Uninitialised page-locked memory of the host, which GPUs read and write at full speed; bytes."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def used_here(tensor: torch.Tensor) -> None:
    """This thread's current stream uses memory that belongs to another stream: when it is freed, it is not used again
    before all that this stream has been given until then is done."""
    tensor.record_stream(torch.cuda.current_stream(tensor.device))


def view(owner: torch.Tensor, address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """A flat tensor of ``count`` elements over memory in a GPU tensor's storage, with a version counter of its own."""
    flat = torch.empty(0, dtype=dtype, device=owner.device)
    if count:
        storage = owner.untyped_storage()
        flat.set_(storage, (address - storage.data_ptr()) // dtype.itemsize, (count,), (1,))
    return flat


# Kernels and copies --------------------------------------------------------------------------------------------------


def on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor, or a copy of it on a GPU. A copy from page-locked memory is not waited for."""
    return tensor.to(device, non_blocking=True)


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between any two memories. The host does not wait for it where its memory is page-locked."""
    target.copy_(source, non_blocking=True)


def fuse(parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Copy flat tensors of one GPU and dtype one after another, in one kernel."""
    torch.cat(list(parts), out=target)


def scatter(targets: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Copy each part to its target, in one kernel where all are on one GPU."""
    torch._foreach_copy_(list(targets), list(parts))


def scale(tensor: torch.Tensor, factor: float) -> None:
    """``Backend.scale`` of any tensor."""
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        _scale_unsigned(tensor, factor)
    elif tensor.is_floating_point():
        divisor = kernels.float_divisor_of(factor)
        if divisor:
            tensor.div_(divisor)
        else:
            tensor.mul_(factor)
    elif divisor := kernels.divisor_of(factor):
        tensor.div_(divisor, rounding_mode="trunc")
    else:
        tensor.copy_(torch.trunc(tensor.double() * factor))


def _scale_unsigned(tensor: torch.Tensor, factor: float) -> None:
    """The same of types that torch does not compute with."""
    divisor = kernels.divisor_of(factor)
    if not divisor:
        tensor.copy_(torch.trunc(tensor.double() * factor))
    elif tensor.dtype is torch.uint64:
        # Half of it is a signed integer of the same value; what that quotient lacks is at most one.
        bits = tensor.view(torch.int64)
        quotient = 2 * ((bits >> 1) & torch.iinfo(torch.int64).max).div(divisor, rounding_mode="trunc")
        bits.copy_(quotient + (bits - quotient * divisor >= divisor))
    else:
        tensor.copy_(tensor.long().div_(divisor, rounding_mode="trunc"))


# NCCL ----------------------------------------------------------------------------------------------------------------


def before_threads() -> None:
    """Do what must not happen while other threads read the environment. Called before there are any of ours.

    NCCL sets what its configuration file says (/etc/nccl.conf, ~/.nccl.conf) when it is first called.
    """
    if nccl_version():
        _settings.make_room()


def nccl_group(store: Any, rank: int, size: int) -> Any:
    """A ``ProcessGroupNCCL``. It connects when it is first used, on the GPU of that tensor.

    Its collectives run on streams of NCCL's own, after what the calling thread's current stream has been given so far;
    the ``wait()`` of what they return makes that stream, and not the thread, wait for them.

    Args:
        store: a ``torch.distributed.Store``, through which the ranks meet; must live as long as the group.
        rank, size: of this process within the group.
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = _LONGEST_OPERATION  # the engine's deadlines rule
    # Of torch's pool of streams, the ones of normal priority may be the program's as well.
    options.is_high_priority_stream = True
    with contextlib.suppress(AttributeError):  # not every build of torch has it
        options.config.blocking = 1  # whatever TORCH_NCCL_USE_COMM_NONBLOCKING says
    levels: Any = dist  # which has them without saying so
    with _settings.set():
        level = levels.get_debug_level()
        # At level DETAIL (TORCH_DISTRIBUTED_DEBUG) torch turns on some of what is off here.
        levels.set_debug_level(levels.DebugLevel.OFF)
        try:
            return dist.ProcessGroupNCCL(store, rank, size, options)
        finally:
            levels.set_debug_level(level)


def outdated_torch() -> str:
    """The version of this torch if its NCCL groups cannot be ended (before 2.6); else empty."""
    group = dist.ProcessGroupNCCL
    return "" if hasattr(group, "abort") and hasattr(group, "shutdown") else str(torch.__version__)


def nccl_abort(group: Any) -> None:
    """Make NCCL give up what a group has under way. May block for as long as NCCL likes.

    A thread that waits in NCCL for a peer to connect stays there: torch does not know of its communicator yet.
    """
    group.abort()


def nccl_close(group: Any) -> None:
    """Release a group that has nothing under way. May block for as long as NCCL likes."""
    group.shutdown()


def nccl_failure(work: Any) -> str:
    """Return NCCL's report of a collective that it cannot go on with; empty if there is no such report. Does not block.

    Args:
        work: what the group's method has returned.
    """
    outcome = getattr(work, "get_future_result", None)  # since torch 2.7: without a warning, and without a look at NCCL
    result = None if outcome is None else outcome()
    if result is not None and not (result.done() and result.value()):
        return ""
    if not work.is_completed():
        return ""
    error = work.exception()
    if error is None:
        return "" if result is None else "NCCL has failed"
    return first_line(error)
