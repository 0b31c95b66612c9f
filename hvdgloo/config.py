"""Every setting of a worker, declared once.

``Config`` is a frozen dataclass and the only reader of environment variables. Each field declares its variable, the
Horovod variable that serves as a fallback, its command-line flag, its unit and its meaning. The launcher's flags, the
YAML file and docs/configuration.md are generated from these declarations, so a new setting is one new field here.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from hvdgloo._platform.spelling import slips, suggestions
from hvdgloo.errors import ConfigError

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off", ""})
GLOO_PROVIDERS = ("torch", "pygloo")
"""The packages that provide Gloo, the preferred one first."""
_TOLD = frozenset(
    f"HVDGLOO_{name}"
    for name in ("SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "RESTART", "SPARK_DEVICES")
)
"""Variables in which a launcher gives the user's program its place in the job; no setting reads them."""
VARIABLES_CHECKED = "HVDGLOO_VARIABLES_CHECKED"
"""Variable by which ``hvdgloo-run`` tells workers that it has warned of mistyped variables."""
_MOST_SLIPS = 2
"""Typing slips by which a variable of Horovod's may differ from one that is read, to be taken for a mistyped one.
Horovod and programs for it have others, which are no mistakes."""
_TORCHRUN_S_OWN = frozenset({"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"})
"""Variables that refer to torchrun's agent. The first would make torch.distributed wait for a store at
``MASTER_ADDR`` that only that agent serves."""
_OF_A_SERVICE = re.compile(
    r"\w+_(SERVICE_(HOST|PORT(_\w+)?)=.*|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?=.*|PORT=[a-z]+://.*)",
    re.DOTALL,
)
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class Setting:
    """Declaration of one field: its names, parser and explanation.

    Attributes:
        env: the variable that sets it.
        fallback: variables read if ``env`` is absent, in this order: Horovod's names, or a scheduler's.
        flag: the launcher's option; None where no user would set it by hand. A boolean one has a ``--no-`` twin.
        yaml: ``section.key`` in a configuration file.
        unit: unit of the number, in words; empty if it has none.
        help: explanation for ``--help`` and the documentation.
        parse: converts text to the value; raises ValueError with the expected form.
        scale: factor from the flag's number to the value (``--fusion-threshold-mb 64``).
        secret: True if it must never be printed.
        place: True if it identifies a worker's job or its place in it, and so must not be passed on to other workers.
    """

    env: str
    help: str
    parse: Callable[[str], Any]
    fallback: tuple[str, ...] = ()
    flag: str | None = None
    yaml: str | None = None
    unit: str = ""
    scale: float = 1
    secret: bool = False
    place: bool = False


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError("expected 1 or 0 (true/false, yes/no, on/off)")


def _integer(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    limits = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"expected a whole number, {limits}") from None
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(f"expected a whole number, {limits}")
        return value

    return parse


_LARGEST = 1e6
"""The largest time in seconds, over eleven days; system calls refuse times that are much longer."""


def _number(*, positive: bool) -> Callable[[str], float]:
    expected = f"expected a number {'greater than 0' if positive else 'from 0'}, up to {_LARGEST:.0f}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError(expected) from None
        if not 0 <= value <= _LARGEST or (positive and value == 0):
            raise ValueError(expected)
        return value

    return parse


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ValueError("expected a number from 0 to 1")
    return value


def _text(text: str) -> str:
    return text


def _one_of(*values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in values:
            raise ValueError(f"expected one of {', '.join(values)}")
        return value

    return parse


def _log_level(text: str) -> str:
    level = text.strip().upper()
    if level not in LOG_LEVELS:
        raise ValueError(f"expected one of {', '.join(LOG_LEVELS)}")
    return level


def parse_endpoint(text: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``.

    Raises:
        ValueError: the text is not an endpoint; the message gives the expected form.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("expected host:port, or [address]:port for IPv6")
    return host, int(port)


def parse_listener(text: str) -> tuple[str, int]:
    """Parse an address to listen on, with or without a port: ``ADDR``, ``ADDR:PORT``, ``[ADDR]:PORT``.

    Returns:
        the address, or a name of this host, and the port; 0 stands for any port.

    Raises:
        ValueError: the text has none of these forms; the message gives them.
    """
    import ipaddress

    address, port = text.strip(), "0"
    try:
        ipaddress.ip_address(address)
    except ValueError:  # there is a port, brackets, or a name
        if not address.endswith("]") and ":" in address:
            address, _, port = address.rpartition(":")
        address = address.removeprefix("[").removesuffix("]")
    if not address or not port.isdigit() or int(port) > 65535:
        raise ValueError("expected ADDR, ADDR:PORT or [ADDR]:PORT, with a port up to 65535")
    return address, int(port)


def format_endpoint(host: str, port: int) -> str:
    """Join host and port; the inverse of ``parse_endpoint``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _endpoint(text: str) -> str:
    return format_endpoint(*parse_endpoint(text))


def _secret(text: str) -> bytes:
    try:
        value = bytes.fromhex(text.strip())
    except ValueError:
        raise ValueError("expected the job secret in hexadecimal digits") from None
    if len(value) < 16:
        raise ValueError("expected at least 32 hexadecimal digits (16 bytes)")
    return value


def _ip_address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text.strip()))
    except ValueError:
        raise ValueError("expected an IP address, such as 10.0.0.5") from None


def _port_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    try:
        low, high = int(first), int(last or first)
    except ValueError:
        low = high = 0
    if not 0 < low <= high < 65536:
        raise ValueError("expected FIRST-LAST with ports from 1 to 65535, the lower one first")
    return low, high


def _cores(text: str) -> str:
    cores = [part.strip() for part in text.split(",")]
    if not all(core.isascii() and core.isdigit() for core in cores):
        raise ValueError("expected the number of a core, or one for each local rank: 0,1,2")
    return ",".join(cores)


def _setting(default: T, **declaration: Any) -> T:
    value: T = field(
        default=default,
        repr=not declaration.get("secret", False),
        metadata={"setting": Setting(**declaration)},
    )
    return value


class TlsFiles(NamedTuple):
    """Paths of PEM files, empty where there is none; see ``Config`` and ``hvdgloo._net.tls``."""

    certificate: str = ""
    key: str = ""
    authority: str = ""


@dataclass(frozen=True)
class Config:
    """The settings of one worker, usually made by ``Config.from_env()``.

    Times are in seconds and sizes in bytes unless a field's unit says otherwise.
    """

    # The job, and the worker's place in it. A launcher sets these; users do not.
    rendezvous: str | None = _setting(
        None,
        env="HVDGLOO_RENDEZVOUS",
        place=True,
        parse=_endpoint,
        help="host:port of the rendezvous server; absent in a job of a single process",
    )
    secret: bytes | None = _setting(
        None, env="HVDGLOO_SECRET", place=True, parse=_secret, secret=True, help="the job secret, in hexadecimal digits"
    )
    secret_file: str | None = _setting(
        None,
        env="HVDGLOO_SECRET_FILE",
        place=True,
        parse=_text,
        help="a file that holds the job secret, unless HVDGLOO_SECRET does",
    )
    job_id: str = _setting(
        "",
        env="HVDGLOO_JOB_ID",
        place=True,
        parse=_text,
        help="distinguishes this job from all others; the same on all its hosts",
    )
    agent_id: str = _setting(
        "",
        env="HVDGLOO_AGENT_ID",
        place=True,
        parse=_text,
        help="marks every process of the job on one host, so that the agent there leaves none behind",
    )
    epoch: int = _setting(
        0, env="HVDGLOO_EPOCH", place=True, parse=_integer(0), help="the generation of the membership to join"
    )
    rank: int | None = _setting(
        None,
        env="HVDGLOO_RANK",
        place=True,
        fallback=("HOROVOD_RANK",),
        parse=_integer(0),
        help="this worker's rank, given by a launcher; otherwise the rendezvous server assigns one",
    )
    index: int | None = _setting(
        None,
        env="HVDGLOO_INDEX",
        place=True,
        fallback=("JOB_COMPLETION_INDEX",),
        parse=_integer(0),
        help="without a launcher: workers with a lower index come first",
    )
    elastic: bool = _setting(
        False,
        env="HVDGLOO_ELASTIC",
        place=True,
        fallback=("HOROVOD_ELASTIC",),
        parse=_boolean,
        help="the job is elastic: its workers may come and go",
    )
    worker: str | None = _setting(
        None,
        env="HVDGLOO_WORKER",
        place=True,
        parse=_text,
        help="this process's id in an elastic job, never reused; given by a launcher, otherwise generated",
    )
    hostname: str | None = _setting(
        None,
        env="HVDGLOO_HOSTNAME",
        place=True,
        fallback=("HOROVOD_HOSTNAME",),
        parse=_text,
        help="the host's name in messages, as the user gave it",
    )
    address: str | None = _setting(
        None,
        env="HVDGLOO_ADDRESS",
        place=True,
        parse=_ip_address,
        help="the IP address at which other workers reach this one; by default the local address of the connection to "
        "the rendezvous server",
    )
    port_range: tuple[int, int] | None = _setting(
        None,
        env="HVDGLOO_PORT_RANGE",
        flag="--port-range",
        yaml="network.port_range",
        parse=_port_range,
        help="FIRST-LAST: the ports that hvdgloo's own listeners may use, for firewalls; by default any free port",
    )

    tls: str = _setting(
        "auto",
        env="HVDGLOO_TLS",
        flag="--tls",
        yaml="network.tls",
        parse=_one_of("auto", "off", "required"),
        help="required: the rendezvous and the control plane are encrypted (docs/security.md), also for workers "
        "started by other launchers; the same for all processes of a job. auto: only where certificates are given. "
        "Tensors are not encrypted",
    )
    tls_cert: str = _setting(
        "",
        env="HVDGLOO_TLS_CERT",
        flag="--tls-cert",
        yaml="network.tls_cert",
        parse=_text,
        help="a PEM file, present on every host, with the certificate that listening processes present; by default "
        "each process generates its own, which needs the package cryptography",
    )
    tls_key: str = _setting(
        "",
        env="HVDGLOO_TLS_KEY",
        flag="--tls-key",
        yaml="network.tls_key",
        parse=_text,
        help="a file with the certificate's private key, unless the certificate file contains it",
    )
    tls_ca: str = _setting(
        "",
        env="HVDGLOO_TLS_CA",
        flag="--tls-ca",
        yaml="network.tls_ca",
        parse=_text,
        help="a file with the authorities trusted to sign listeners' certificates; by default any certificate is "
        "accepted, since it is verified with the job's secret",
    )

    as_horovod: bool = _setting(
        False,
        env="HVDGLOO_AS_HOROVOD",
        flag="--as-horovod",
        yaml="as_horovod",
        parse=_boolean,
        help="have `import horovod.torch`, and Horovod's other modules, import hvdgloo's, so that a program written "
        "for Horovod runs unchanged; in programs that hvdgloo-run or hvdgloo.spark.run starts "
        "(docs/migrating.md explains how to start Spark drivers)",
    )

    as_gloo: bool = _setting(
        False,
        env="HVDGLOO_AS_GLOO",
        flag="--as-gloo",
        yaml="as_gloo",
        parse=_boolean,
        help="have torch.distributed's groups whose only backend is gloo use hvdgloo's shared memory and hierarchy, so "
        "that a program written for gloo gains without an edit; it still sees the name gloo",
    )

    # Timeouts: connecting, starting and operating are three different questions.
    connect_timeout: float = _setting(
        30.0,
        env="HVDGLOO_CONNECT_TIMEOUT",
        flag="--connect-timeout-seconds",
        yaml="timeouts.connect_seconds",
        unit="seconds",
        parse=_number(positive=True),
        help="how long connecting two processes may take once both are running",
    )
    start_timeout: float = _setting(
        120.0,
        env="HVDGLOO_START_TIMEOUT",
        fallback=("HOROVOD_START_TIMEOUT",),
        flag="--start-timeout",
        yaml="timeouts.start_seconds",
        unit="seconds",
        parse=_number(positive=True),
        help="how long hvd.init() waits for the next worker; the others may still be importing their frameworks, "
        "which takes longer where there are more workers than cores",
    )
    spark_start_timeout: float = _setting(
        600.0,
        env="HVDGLOO_SPARK_START_TIMEOUT",
        fallback=("HOROVOD_SPARK_START_TIMEOUT",),
        unit="seconds",
        parse=_number(positive=True),
        help="how long hvdgloo.spark.run waits for its tasks to start, since a busy cluster may provide executors "
        "late. start_timeout= overrides it",
    )
    operation_timeout: float = _setting(
        30.0,
        env="HVDGLOO_OPERATION_TIMEOUT",
        fallback=("HOROVOD_GLOO_TIMEOUT_SECONDS",),
        flag="--gloo-timeout-seconds",
        yaml="library_options.gloo_timeout_seconds",
        unit="seconds",
        parse=_number(positive=True),
        help="how long a rank may be silent while others wait for it, and how long one collective may take "
        "beyond its transfer time; a rank that is merely late is waited for. Rank 0's value applies to all",
    )

    # Elastic jobs.
    elastic_timeout: float = _setting(
        600.0,
        env="HVDGLOO_ELASTIC_TIMEOUT",
        fallback=("HOROVOD_ELASTIC_TIMEOUT",),
        flag="--elastic-timeout",
        yaml="elastic.timeout_seconds",
        unit="seconds",
        parse=_number(positive=True),
        help="how long an elastic job waits for slots, at its start and when it has fewer than --min-np workers, and "
        "for workers that do not return after a failure",
    )
    elastic_join: str = _setting(
        "ready",
        env="HVDGLOO_ELASTIC_JOIN",
        flag="--join",
        yaml="elastic.join",
        parse=_one_of("ready", "now"),
        help="when the workers of an elastic job stop to admit new ones. ready: once these have reached elastic.run, "
        "so that starting them costs nothing; now: as soon as there is a slot for them, as in Horovod",
    )
    elastic_overlap: bool = _setting(
        False,
        env="HVDGLOO_ELASTIC_OVERLAP",
        parse=_boolean,
        help="commits of a TorchState copy parameters and optimizers' state while the next forward and backward pass "
        "run. Meanwhile nothing but optimizers' steps may write to them",
    )

    # Engine.
    fusion_threshold: int = _setting(
        32 * 1024 * 1024,
        env="HVDGLOO_FUSION_THRESHOLD",
        fallback=("HOROVOD_FUSION_THRESHOLD",),
        flag="--fusion-threshold-mb",
        yaml="params.fusion_threshold_mb",
        unit="bytes",
        scale=1024 * 1024,
        parse=_integer(0),
        help="the largest buffer into which small tensors are fused; 0 sends each tensor alone",
    )
    inline_threshold: int = _setting(
        1024,
        env="HVDGLOO_INLINE_THRESHOLD",
        flag="--inline-threshold",
        yaml="params.inline_threshold",
        unit="bytes",
        parse=_integer(0, 1 << 16),
        help="a single allreduce of at most this many bytes is sent along with its negotiation, through rank 0, at the "
        "lowest latency; 0 leaves all of them to the data plane",
    )
    cycle_time: float = _setting(
        0.0,
        env="HVDGLOO_CYCLE_TIME",
        fallback=("HOROVOD_CYCLE_TIME",),
        flag="--cycle-time-ms",
        yaml="params.cycle_time_ms",
        unit="milliseconds",
        parse=_number(positive=False),
        help="the minimum delay between two batches, for better fusion at the price of latency; by default none",
    )
    cache_capacity: int = _setting(
        1024,
        env="HVDGLOO_CACHE_CAPACITY",
        fallback=("HOROVOD_CACHE_CAPACITY",),
        flag="--cache-capacity",
        yaml="params.cache_capacity",
        unit="tensors",
        parse=_integer(0),
        help="how many negotiated tensors are cached, so that their names are not sent again; 0 caches none",
    )
    control_fanin: int = _setting(
        16,
        env="HVDGLOO_CONTROL_FANIN",
        flag="--control-fanin",
        yaml="params.control_fanin",
        unit="hosts",
        parse=_integer(0, 2**31 - 1),
        help="in a large job, one rank of each host represents the host's others, and this many such ranks report to "
        "one of them, in a tree under rank 0; 0 on any host: every rank connects to rank 0. Otherwise rank 0's value "
        "applies to all",
    )
    control_tree_ranks: int = _setting(
        33,
        env="HVDGLOO_CONTROL_TREE_RANKS",
        flag="--control-tree-ranks",
        yaml="params.control_tree_ranks",
        unit="ranks",
        parse=_integer(2, 2**31 - 1),
        help="the fewest ranks, on at least three hosts, for which there is such a tree; with fewer, every rank "
        "connects to rank 0. Rank 0's value applies to all",
    )
    thread_affinity: str = _setting(
        "",
        env="HVDGLOO_THREAD_AFFINITY",
        fallback=("HOROVOD_THREAD_AFFINITY",),
        flag="--thread-affinity",
        yaml="library_options.thread_affinity",
        parse=_cores,
        help="the core that a worker's communication threads run on; for several workers of a host a comma-separated "
        "list, in the order of local ranks; by default any",
    )
    hierarchical_threshold: int = _setting(
        128 * 1024,
        env="HVDGLOO_HIERARCHICAL_THRESHOLD",
        flag="--hierarchical-threshold",
        yaml="params.hierarchical_threshold",
        unit="bytes",
        parse=_integer(0),
        help="where hosts have several ranks, tensors are reduced within each host before they go to the others, so "
        "that each byte crosses the network once; from this size on, every rank of a host sends a slice across the "
        "network, and its first rank sends smaller tensors whole; 0 has all ranks use Gloo alone, for the other "
        "collectives too",
    )
    hierarchical_distribution_threshold: int = _setting(
        1024 * 1024,
        env="HVDGLOO_HIERARCHICAL_DISTRIBUTION_THRESHOLD",
        flag="--hierarchical-distribution-threshold",
        yaml="params.hierarchical_distribution_threshold",
        unit="bytes",
        parse=_integer(1),
        help="the size from which all ranks of a host send slices across the network in a broadcast, allgather or "
        "reducescatter",
    )
    wire: str = _setting(
        "full",
        env="HVDGLOO_WIRE",
        flag="--wire",
        yaml="params.wire",
        parse=_one_of("full", "bf16", "int8", "int4", "int4-feedback"),
        help="the form in which gradients cross from host to host: full is as they are; bf16, int8 and int4 send a "
        "half, a quarter and a seventh of the bytes, which changes results a little (docs/slow-networks.md). With "
        "int4-feedback, what int4 leaves out of a gradient is added to the next one. Rank 0's value applies to all",
    )
    wire_threshold: int = _setting(
        256 * 1024,
        env="HVDGLOO_WIRE_THRESHOLD",
        flag="--wire-threshold",
        yaml="params.wire_threshold",
        unit="bytes",
        parse=_integer(0),
        help="smaller gradients cross as they are, whatever --wire asks for. Rank 0's value applies to all",
    )
    gpu_operations: str = _setting(
        "auto",
        env="HVDGLOO_GPU_OPERATIONS",
        flag="--gpu-operations",
        yaml="params.gpu_operations",
        parse=_one_of("auto", "nccl", "gloo"),
        help="how CUDA tensors travel: nccl, or gloo, which takes them through host memory; auto is nccl where every "
        "rank has a GPU of its own, otherwise gloo",
    )
    gpu_completion: str = _setting(
        "host",
        env="HVDGLOO_GPU_COMPLETION",
        flag="--gpu-completion",
        yaml="params.gpu_completion",
        parse=_one_of("host", "stream"),
        help="when an operation on CUDA tensors that travel over NCCL counts as done. host: when the GPU has finished "
        "it; stream: as soon as it is queued on the GPU. What the program does next with the results is queued behind "
        "it, so that the GPU never idles between backward pass and optimizer, but a lost peer is noticed a step later "
        "(docs/gpus.md)",
    )
    cpu_operations: str = _setting(
        "auto",
        env="HVDGLOO_CPU_OPERATIONS",
        flag="--cpu-operations",
        yaml="params.cpu_operations",
        parse=_one_of("auto", "shm", "gloo"),
        help="how tensors in main memory travel: auto uses shared memory between ranks of one host, where that is "
        "possible, and Gloo otherwise; gloo always uses Gloo; shm uses nothing but shared memory. Rank 0's choice "
        "applies to all",
    )
    gloo_provider: str = _setting(
        "auto",
        env="HVDGLOO_GLOO_PROVIDER",
        flag="--gloo-provider",
        yaml="params.gloo_provider",
        parse=_one_of("auto", *GLOO_PROVIDERS),
        help="which installed package provides Gloo: auto is torch if rank 0 has it, otherwise pygloo, which exists "
        "only for Python 3.10 and older. Rank 0's choice applies to all",
    )
    shm_segment: int = _setting(
        4 * 1024 * 1024,
        env="HVDGLOO_SHM_SEGMENT",
        flag="--shm-segment-mb",
        yaml="params.shm_segment_mb",
        unit="bytes",
        scale=1024 * 1024,
        parse=_integer(1 << 16),
        help="the most shared memory that each rank takes for each process set; larger payloads pass through it piece "
        "by piece",
    )
    gradient_bucket: int = _setting(
        25 * 1024 * 1024,
        env="HVDGLOO_GRADIENT_BUCKET",
        flag="--gradient-bucket-mb",
        yaml="params.gradient_bucket_mb",
        unit="bytes",
        scale=1024 * 1024,
        parse=_integer(0),
        help="from the second step on, PyTorch's DistributedOptimizer keeps gradients in buckets of about this size, "
        "so that nothing is packed for a transfer (only dense gradients that are in no group; the first bucket is "
        "small); 0 leaves each gradient where it is. Rank 0's choice applies to all",
    )
    deterministic: bool = _setting(
        False,
        env="HVDGLOO_DETERMINISTIC",
        flag="--deterministic",
        yaml="params.deterministic",
        parse=_boolean,
        help="the same ranks on the same hosts compute the same bits in every run: tensors that are summed between "
        "hosts, or on GPUs, are not fused with others that happen to be ready at the same time. Within a host this "
        "costs nothing. Rank 0's choice applies to all",
    )
    disable_group_fusion: bool = _setting(
        False,
        env="HVDGLOO_DISABLE_GROUP_FUSION",
        fallback=("HOROVOD_DISABLE_GROUP_FUSION",),
        parse=_boolean,
        help="1: tensors of an explicit group are fused with each other only",
    )

    # Autotuning.
    autotune: bool = _setting(
        False,
        env="HVDGLOO_AUTOTUNE",
        fallback=("HOROVOD_AUTOTUNE",),
        flag="--autotune",
        yaml="autotune.enabled",
        parse=_boolean,
        help="during the first steps, try other fusion thresholds, cycle times, hierarchical and inline thresholds, "
        "and keep those with which the job is clearly faster, if there are any. Values that you set yourself stay. "
        "Rank 0's choice applies to all (docs/tuning.md)",
    )
    autotune_log: str = _setting(
        "",
        env="HVDGLOO_AUTOTUNE_LOG",
        fallback=("HOROVOD_AUTOTUNE_LOG",),
        flag="--autotune-log-file",
        yaml="autotune.log_file",
        parse=_text,
        help="a CSV file on rank 0's host, with a line for every sample and one for the choice",
    )
    autotune_warmup_samples: int = _setting(
        3,
        env="HVDGLOO_AUTOTUNE_WARMUP_SAMPLES",
        fallback=("HOROVOD_AUTOTUNE_WARMUP_SAMPLES",),
        flag="--autotune-warmup-samples",
        yaml="autotune.warmup_samples",
        unit="samples",
        parse=_integer(0),
        help="how many samples are discarded at the beginning",
    )
    autotune_steps_per_sample: int = _setting(
        10,
        env="HVDGLOO_AUTOTUNE_STEPS_PER_SAMPLE",
        fallback=("HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",),
        flag="--autotune-steps-per-sample",
        yaml="autotune.steps_per_sample",
        unit="steps",
        parse=_integer(1),
        help="how many steps are measured with the same settings; a sample is their median",
    )
    autotune_max_samples: int = _setting(
        20,
        env="HVDGLOO_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        fallback=("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",),
        flag="--autotune-bayes-opt-max-samples",
        yaml="autotune.bayes_opt_max_samples",
        unit="settings",
        parse=_integer(1),
        help="the most settings that are tried; the better ones are measured several times",
    )
    autotune_noise: float = _setting(
        0.8,
        env="HVDGLOO_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
        fallback=("HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",),
        flag="--autotune-gaussian-process-noise",
        yaml="autotune.gaussian_process_noise",
        unit="share",
        parse=_share,
        help="from 0 to 1, how much the times of steps vary: the more they do, the more often the seemingly best "
        "settings are compared with the initial ones before they are kept",
    )

    check_weights: bool = _setting(
        True,
        env="HVDGLOO_CHECK_WEIGHTS",
        flag="--check-weights",
        yaml="params.check_weights",
        parse=_boolean,
        help="warn if ranks train from different weights; checksums of a sample are compared once, in the first step "
        "of PyTorch's DistributedOptimizer and in the second step elsewhere, since Keras and TensorFlow programs may "
        "broadcast after the first",
    )

    # Stalls.
    stall_check_disable: bool = _setting(
        False,
        env="HVDGLOO_STALL_CHECK_DISABLE",
        fallback=("HOROVOD_STALL_CHECK_DISABLE",),
        flag="--no-stall-check",
        yaml="stall_check.enabled",
        parse=_boolean,
        help="do not warn about tensors that wait for ranks that have not submitted them",
    )
    stall_warning_time: float = _setting(
        60.0,
        env="HVDGLOO_STALL_CHECK_TIME_SECONDS",
        fallback=("HOROVOD_STALL_CHECK_TIME_SECONDS",),
        flag="--stall-check-warning-time-seconds",
        yaml="stall_check.warning_time_seconds",
        unit="seconds",
        parse=_number(positive=True),
        help="after this time a waiting tensor is reported, with the ranks that have not submitted it and what they "
        "are doing",
    )
    stall_shutdown_time: float = _setting(
        0.0,
        env="HVDGLOO_STALL_SHUTDOWN_TIME_SECONDS",
        fallback=("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",),
        flag="--stall-check-shutdown-time-seconds",
        yaml="stall_check.shutdown_time_seconds",
        unit="seconds",
        parse=_number(positive=False),
        help="after this time a waiting tensor ends the job with an error; 0: never",
    )

    # Timeline.
    timeline: str | None = _setting(
        None,
        env="HVDGLOO_TIMELINE",
        fallback=("HOROVOD_TIMELINE",),
        flag="--timeline-filename",
        yaml="timeline.filename",
        parse=_text,
        help="write a trace of where collectives spend their time to this file, on rank 0; with {rank} in the name, "
        "on every rank; DYNAMIC waits for hvd.start_timeline()",
    )
    timeline_mark_cycles: bool = _setting(
        False,
        env="HVDGLOO_TIMELINE_MARK_CYCLES",
        fallback=("HOROVOD_TIMELINE_MARK_CYCLES",),
        flag="--timeline-mark-cycles",
        yaml="timeline.mark_cycles",
        parse=_boolean,
        help="also trace when rank 0 orders operations",
    )

    # Observing the job.
    observe: bool = _setting(
        True,
        env="HVDGLOO_OBSERVE",
        flag="--observe",
        yaml="observe.enabled",
        parse=_boolean,
        help="count operations, bytes, steps and what they wait for, as shown by hvd.metrics(), the job's page, its "
        "report and hvdgloo-run top; 0 counts nothing",
    )
    observe_interval: float = _setting(
        1.0,
        env="HVDGLOO_OBSERVE_INTERVAL",
        flag="--observe-interval",
        yaml="observe.interval_seconds",
        unit="seconds",
        parse=_number(positive=True),
        help="how often each rank reports its counters while the job is being observed and they change",
    )
    observer: str = _setting(
        "",
        env="HVDGLOO_OBSERVER",
        place=True,
        parse=_text,
        help="the socket at which this host's agent receives its workers' counters while the job is being observed",
    )

    # Messages.
    log_level: str = _setting(
        "WARNING",
        env="HVDGLOO_LOG_LEVEL",
        fallback=("HOROVOD_LOG_LEVEL",),
        flag="--log-level",
        yaml="logging.level",
        parse=_log_level,
        help="the lowest level of messages that are shown: "
        + ", ".join(LOG_LEVELS)
        + "; where the program's root logger "
        "writes to the terminal (logging.basicConfig), it shows them in its own format",
    )
    log_hide_time: bool = _setting(
        False,
        env="HVDGLOO_LOG_HIDE_TIME",
        fallback=("HOROVOD_LOG_HIDE_TIME",),
        flag="--log-without-timestamp",
        yaml="logging.hide_timestamp",
        parse=_boolean,
        help="leave the time out of log lines",
    )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, *, only: Collection[str] | None = None) -> Config:
        """Read the variables of all fields.

        Args:
            environ: the variables to read; by default the process's environment.
            only: the fields to read, if not all; the others keep their defaults.

        Raises:
            ConfigError: a value cannot be used; the text names the variable, its value and the expected form.
        """
        environ = _environ() if environ is None else environ
        values: dict[str, Any] = {}
        for name, setting in settings().items():
            if only is not None and name not in only:
                continue
            variable = next((v for v in (setting.env, *setting.fallback) if environ.get(v, "") != ""), None)
            if variable is not None:
                values[name] = parse_value(setting, environ[variable], variable)
        if values.get("secret") is not None:
            values.pop("secret_file", None)
        elif values.get("secret_file") is not None:
            values["secret"] = read_secret_file(values["secret_file"])
        return cls(**values)

    @property
    def tls_files(self) -> TlsFiles | None:
        """Files for TLS; None if it is not used."""
        files = TlsFiles(self.tls_cert, self.tls_key, self.tls_ca)
        if self.tls == "off" or (self.tls == "auto" and not any(files)):
            return None
        return files

    @property
    def first_timeline(self) -> str:
        """Path of the timeline that begins with the job; empty if none does."""
        return "" if not self.timeline or self.timeline.upper() == "DYNAMIC" else self.timeline

    @property
    def secret_source(self) -> str:
        """Source of the secret, for messages: the setting to correct if the secret is wrong."""
        return f"HVDGLOO_SECRET_FILE={self.secret_file}" if self.secret_file else "HVDGLOO_SECRET"

    def to_env(self) -> dict[str, str]:
        """Return the variables from which ``from_env`` makes this Config, for fields that differ from their default."""
        environ = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if value != f.default and not (f.name == "secret" and self.secret_file):
                environ[f.metadata["setting"].env] = format_value(value)
        return environ


def settings() -> dict[str, Setting]:
    """Return each field's declaration by its name, in the order of declaration."""
    return {f.name: f.metadata["setting"] for f in dataclasses.fields(Config)}


def parse_value(setting: Setting, text: str, source: str) -> Any:
    """Parse a setting's text; ``source`` is the variable, flag or file key that the error names."""
    try:
        return setting.parse(text)
    except ValueError as error:
        shown = "its value" if setting.secret else repr(text)
        raise ConfigError(f"{source}: {shown} cannot be used: {error}") from None


def format_value(value: Any) -> str:
    """Format a field's value as its variable holds it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return "-".join(str(part) for part in value)
    return str(value)


def read_secret_file(path: str) -> bytes:
    """Read the job secret from a file.

    Raises:
        ConfigError: the file cannot be read or does not hold a secret.
    """
    shown = path if path.isprintable() else ascii(path)
    try:
        with open(path, encoding="ascii") as file:
            return _secret(file.read())
    except OSError as error:
        raise ConfigError(
            f"HVDGLOO_SECRET_FILE={shown}: {error.strerror}; hvdgloo-rendezvous prints where its secret file is"
        ) from None
    except ValueError as error:
        raise ConfigError(f"HVDGLOO_SECRET_FILE={shown}: {error}") from None


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that identify a worker's job and its place in it.

    A launcher that was started by a worker of another job, or in a shell where such a variable is left over, thus
    gives its workers places of their own.
    """
    places = [setting for setting in settings().values() if setting.place]
    ours = {setting.env for setting in places}
    ours |= {name for setting in places for name in setting.fallback if name.startswith("HOROVOD_")}
    return {name: value for name, value in environ.items() if name not in ours | _TORCHRUN_S_OWN}


def place_variables(
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    cross_rank: int,
    cross_size: int,
    node: int,
    nodes: int,
) -> dict[str, str]:
    """Return the variables that give a worker its place, under hvdgloo's, Horovod's and torchrun's names.

    Args:
        node, nodes: the index of the worker's host and the number of hosts. Cross ranks do not give these where hosts
            have different numbers of workers.
    """
    ours = {
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": local_size,
        "CROSS_RANK": cross_rank,
        "CROSS_SIZE": cross_size,
    }
    torchrun_s = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": node,
        "GROUP_WORLD_SIZE": nodes,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "NODE_RANK": node,  # torchrun sets it in jobs of several nodes only; Lightning and others read it
    }
    return {
        **{f"{family}_{name}": str(value) for name, value in ours.items() for family in ("HVDGLOO", "HOROVOD")},
        **{name: str(value) for name, value in torchrun_s.items()},
    }


def _environ() -> Mapping[str, str]:
    import os

    return os.environ


def describes_service(name: str, value: str) -> bool:
    """Return whether Kubernetes set a variable, as it does in every container for every Service of the namespace.

    A Service named ``hvdgloo`` brings HVDGLOO_SERVICE_HOST, HVDGLOO_PORT and six more, which are not settings.
    """
    return _OF_A_SERVICE.fullmatch(f"{name}={value}") is not None


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a line for each variable that looks like a setting but is not one, and is probably mistyped.

    All variables that begin with ``HVDGLOO_`` are hvdgloo's. One of Horovod's is mistyped only if a name that is read
    is very similar.

    Args:
        environ: the variables to check; by default the process's environment, unless a launcher has checked it.
    """
    environ = _environ() if environ is None else environ
    if VARIABLES_CHECKED in environ:
        return []
    known = {setting.env for setting in settings().values()}
    horovod_s = {name for name in environment_names() if name.startswith("HOROVOD_")}
    lines = []
    for name in sorted(environ):
        if name.startswith("HOROVOD_") and name not in horovod_s and not describes_service(name, environ[name]):
            meant = _nearest(name, horovod_s)
            if meant:
                lines.append(f"{name} is not read, so it has no effect; did you mean {meant}?")
        if not name.startswith("HVDGLOO_") or name.startswith("HVDGLOO_TEST_") or name in known | _TOLD:
            continue
        if describes_service(name, environ[name]):
            continue
        close = suggestions(name.removeprefix("HVDGLOO_"), [own.removeprefix("HVDGLOO_") for own in known], limit=1)
        hint = f"did you mean HVDGLOO_{close[0]}?" if close else "docs/configuration.md lists them all"
        lines.append(f"there is no setting {name}, so it has no effect; {hint}")
    return lines


def _nearest(name: str, horovod_s: Iterable[str]) -> str:
    """Return the variable of Horovod's that a name is most similar to; empty if none is similar enough."""
    word = name.removeprefix("HOROVOD_")
    alike = [known for known in horovod_s if abs(len(known) - len(name)) <= _MOST_SLIPS]  # others need more slips
    found = [(slips(word, known.removeprefix("HOROVOD_"), _MOST_SLIPS), known) for known in alike]
    distance, best = min(found, default=(_MOST_SLIPS + 1, ""))
    return best if distance <= _MOST_SLIPS else ""


def environment_names() -> Iterable[str]:
    """Yield every variable that a field reads."""
    for setting in settings().values():
        yield setting.env
        yield from setting.fallback
