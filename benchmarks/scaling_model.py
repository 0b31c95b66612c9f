"""The arithmetic of ``scaling.py``: how long a training step of many ranks takes, from what its pieces cost.

A step is a queue: gradients become ready in buckets during the backward pass, each bucket is agreed upon, reduced
within its host, across hosts, and handed out within the host, one after the other.

Ranks that share processors do the same things at the same moments. What costs each of R ranks a second of a processor
takes R/C seconds on C of them, and what a rank only waits for, it waits for besides: that is all that ``stretch`` does,
and where every rank has a processor of its own it does nothing. Between hosts, bytes are on the wire while others are
worked on, within an exchange; the next exchange begins when its sums are there. Gloo's ring does both for the whole
tensor at once. With ``--wire``, fewer bytes are on the wire, and what encoding and decoding cost is work as well.

Pure: nothing is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hvdgloo._backends.base import FEW_RANKS
from hvdgloo._backends.butterfly import SMALL
from hvdgloo._backends.codec import encoded_size
from hvdgloo._backends.cube import Cube
from hvdgloo._backends.gloo import AT_ONCE_BYTES
from hvdgloo.config import Config
from hvdgloo.types import WireFormat

BUCKET = 25e6
BATCH = 64
FAN_IN, TREE_FROM_RANKS = Config().control_fanin, Config().control_tree_ranks
TREE_FROM_HOSTS = 3
IN_SLICES_FROM, ENCODED_FROM = Config().hierarchical_threshold, Config().wire_threshold


@dataclass(frozen=True)
class Network:
    """The assumptions about a network, on one GPU like a P100 with batches of 64.

    Attributes:
        parameters: how many, of 4 bytes each.
        images: per second, forward and backward, without communication.
        curve: points (share of the backward pass, share of the gradients' bytes that are ready by then).
        published: efficiency on 512 GPUs, if it has been published of Horovod.
    """

    parameters: float
    images: float
    curve: tuple[tuple[float, float], ...]
    published: float | None = None


NETWORKS = {
    "ResNet-50": Network(25.6e6, 219, ((0.15, 0.55), (0.5, 0.85), (1, 1))),
    "ResNet-101": Network(44.5e6, 130, ((0.12, 0.35), (0.75, 0.9), (1, 1)), 0.90),
    "Inception V3": Network(23.8e6, 142, ((0.3, 0.5), (0.7, 0.9), (1, 1)), 0.90),
    "VGG-16": Network(138.4e6, 154, ((0.03, 0.895), (0.3, 0.96), (1, 1)), 0.68),
}


@dataclass(frozen=True)
class Costs:
    """The measurements; seconds of one rank's processor time, unless it says otherwise.

    Attributes:
        agreement: an agreement of two ranks that have been idle, elapsed time.
        member: what it takes of a rank's processor.
        message: of rank 0, or another node of a tree, for each further rank that it serves.
        ring: one of the ring's 2(n - 1) steps.
        ring_byte: each byte that a rank sends round the ring, and receives another for it.
        exchange: one exchange with a neighbour in the cube.
        byte: each byte that a rank sends there, and receives another for it.
        peer: each other host that is told at once, where there are few, and has told this one.
        meeting: one of the steps among the ranks of a host.
        agent: an agent, for the launcher.
        worker: a worker, for the rendezvous server.
        codec: by the value of ``--wire``, each byte of float32 values that is encoded, and each that is decoded.
    """

    agreement: float
    member: float
    message: float
    ring: float
    ring_byte: float
    exchange: float
    byte: float
    peer: float
    meeting: float = 0.0
    agent: float = 0.0
    worker: float = 0.0
    codec: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass
class Wire:
    """A host's link, which lets pass what it has saved up while it was idle.

    Attributes:
        rate: bytes a second.
        burst: bytes that it saves up at most.
        saved: bytes by now.
    """

    rate: float
    burst: float
    saved: float

    def send(self, nbytes: float) -> float:
        """Seconds for so many bytes."""
        took = max(0.0, nbytes - self.saved) / self.rate
        self.saved -= min(self.saved, nbytes)
        return took

    def rest(self, seconds: float) -> None:
        """Send nothing for so long."""
        if self.burst:
            self.saved = min(self.burst, self.saved + seconds * self.rate)

    def beside(self, work: float, nbytes: float, waits: float = 0.0) -> float:
        """Seconds of so many bytes and of the processors' work on them, at the same time.

        Args:
            waits: seconds that the bytes take besides.
        """
        on_wire = self.send(nbytes) + waits
        self.rest(max(0.0, work - on_wire))
        return max(on_wire, work)


@dataclass(frozen=True)
class Cluster:
    """The place where a step is to run.

    Attributes:
        ranks, slots: in all, and on each host.
        rate: bytes of payload a second that a host sends, and receives at the same time.
        latency: seconds of a message between hosts, beyond the processors' time.
        jitter: standard deviation of a rank's time of computation, as a share of it.
        memory: bytes a second that one host's ranks reduce or copy together.
        processors: of all ranks together; infinite if each has at least one.
        burst: bytes that a host's link lets pass at once, after as long a pause as they would have taken.
        form: in which gradients cross between hosts: the value of ``--wire``.
    """

    ranks: int
    slots: int
    rate: float
    latency: float = 30e-6
    jitter: float = 0.02
    memory: float = 8e9
    processors: float = math.inf
    burst: float = 0.0
    form: str = "full"

    @property
    def hosts(self) -> int:
        return max(1, -(-self.ranks // self.slots))

    @property
    def local(self) -> int:
        """Ranks on a host."""
        return min(self.slots, self.ranks)

    def idle_wire(self) -> Wire:
        """A host's link that has been idle for long."""
        return Wire(self.rate, self.burst, self.burst)

    def stretch(self, working: int) -> float:
        """Return the factor by which work is slowed down if so many ranks do it at the same time."""
        return max(1.0, working / self.processors)


def ready(curve: Sequence[tuple[float, float]], share: float) -> float:
    """At what share of the backward pass so large a share of the gradients' bytes is ready."""
    before = (0.0, 0.0)
    for time_, bytes_ in curve:
        if share <= bytes_:
            return before[0] + (time_ - before[0]) * (share - before[1]) / (bytes_ - before[1])
        before = (time_, bytes_)
    return 1.0


def agreement(cluster: Cluster, costs: Costs) -> float:
    """Seconds from a bucket that is ready everywhere to the order to reduce it."""
    if cluster.ranks == 1:
        return 0.0
    alone = costs.agreement + (cluster.stretch(cluster.ranks) - 1) * costs.member
    if cluster.ranks < TREE_FROM_RANKS or cluster.hosts < TREE_FROM_HOSTS:
        return alone + (cluster.ranks - 2) * costs.message
    levels = math.ceil(math.log(cluster.hosts * (FAN_IN - 1) + 1, FAN_IN) - 1e-9) - 1
    children = cluster.local - 1 + min(FAN_IN, cluster.hosts - 1)
    return alone * levels + children * costs.message + 2 * levels * cluster.latency


def across(cluster: Cluster, costs: Costs, nbytes: float, wire: Wire | None = None) -> float:
    """Seconds of an allreduce between hosts, the way that the Gloo plane takes.

    What is large goes in slices, one for each rank of a host; what is small goes through the hosts' first ranks.

    Args:
        wire: each host's link; None for one that has been idle.
    """
    if cluster.hosts == 1:
        return 0.0
    at_once = cluster.local if nbytes >= IN_SLICES_FROM else 1
    each, working = nbytes / at_once, at_once * cluster.hosts
    stretch, hosts = cluster.stretch(working), cluster.hosts
    wire = wire or cluster.idle_wire()
    cube = Cube(0, hosts)
    if cluster.form != "full" and nbytes >= ENCODED_FROM:
        return _encoded(cluster, costs, each, at_once, wire)
    if hosts <= FEW_RANKS and each * hosts <= AT_ONCE_BYTES:
        return cluster.latency + wire.send((hosts - 1) * each * at_once) + stretch * (hosts - 1) * costs.peer
    if hosts <= FEW_RANKS or each > cube.most_bytes:
        steps, sent = 2 * (hosts - 1), 2 * (hosts - 1) / hosts * each
        return wire.beside(
            stretch * (steps * costs.ring + sent * costs.ring_byte), sent * at_once, steps * cluster.latency
        )
    took = 0.0
    for sent in exchanges(cube, each):
        alone = cluster.latency + stretch * costs.exchange
        wire.rest(alone)
        took += alone + wire.beside(stretch * sent * costs.byte, sent * at_once)
    return took


def share(form: str) -> float:
    """Return the size of encoded values, as a share of their size in float32."""
    return 1.0 if form == "full" else encoded_size(WireFormat(form), 1 << 20) / (4 << 20)


def _encoded(cluster: Cluster, costs: Costs, each: float, at_once: int, wire: Wire) -> float:
    """Return the seconds of an allreduce between hosts whose values are encoded.

    Args:
        each: bytes of a rank's slice.
        at_once: ranks of a host that do so at the same time.
    """
    encode, decode = costs.codec[cluster.form]
    hosts, stretch, size = cluster.hosts, cluster.stretch(at_once * cluster.hosts), share(cluster.form)

    def pass_on(sent: float, work: float) -> float:
        """Return the seconds of some bytes, before they are encoded, and of the work that is done meanwhile."""
        alone = cluster.latency + stretch * costs.exchange
        wire.rest(alone)
        return alone + wire.beside(stretch * (work + sent * size * costs.byte), sent * size * at_once)

    if hosts <= FEW_RANKS:
        # Slices to their owners, who add them up, and sums to all others; owners decode their own sums as well.
        others = (hosts - 1) / hosts * each
        own = each / hosts
        return pass_on(others, others * (encode + decode)) + pass_on(others, own * (encode + decode) + others * decode)
    cube = Cube(0, hosts)
    every = list(exchanges(cube, each))
    halving, doubling = every[: len(every) // 2], every[len(every) // 2 :]
    took = sum([pass_on(sent, sent * (encode + decode)) for sent in halving])
    took += stretch * each / cube.corners * encode
    took += sum([pass_on(sent, 0.0) for sent in doubling])
    return took + stretch * each * decode


def exchanges(cube: Cube, nbytes: float) -> Iterable[float]:
    """The bytes that a rank sends in each exchange of an allreduce, in turn."""
    dimensions = cube.corners.bit_length() - 1
    if nbytes <= SMALL:
        found = [nbytes] * dimensions
    else:
        halves = [nbytes / (2 << number) for number in range(dimensions)]
        found = halves + halves[::-1]
    # The rank that speaks for two receives and sends everything once more.
    return [nbytes, *found, nbytes] if cube.corners < cube.size else found


def within(cluster: Cluster, costs: Costs, nbytes: float) -> float:
    """Seconds of reducing a bucket in its host, and of handing it out again."""
    if cluster.local == 1:
        return 0.0
    stretch = cluster.stretch(cluster.ranks)
    moving = 2 * nbytes * (cluster.local - 1) / cluster.local / cluster.memory
    return stretch * (2 * costs.meeting + moving)


def queue(buckets: Sequence[tuple[float, float]], cluster: Cluster, costs: Costs) -> float:
    """Return the time at which the last of some buckets has been reduced.

    Args:
        buckets: seconds after which each is ready, and its bytes; in order.
    """
    free, wire = 0.0, cluster.idle_wire()
    for when, nbytes in buckets:
        if cluster.ranks > 1:
            # What has been agreed upon while others were under way has kept processors from these, if they are shared.
            meanwhile = (cluster.stretch(cluster.ranks) - 1) * costs.member if when < free else 0.0
            start = max(free + meanwhile, when + agreement(cluster, costs))
            here = within(cluster, costs, nbytes)
            wire.rest(start - free + here)
            free = start + here + across(cluster, costs, nbytes, wire)
    return free


def step(network: Network, cluster: Cluster, costs: Costs) -> float:
    """Seconds of a training step: the slowest rank's computation, and what of the communication comes after it."""
    alone = BATCH / network.images
    slowest = 1 + cluster.jitter * math.sqrt(2 * math.log(cluster.ranks)) if cluster.ranks > 1 else 1.0
    forward, backward = slowest * alone / 3, slowest * alone * 2 / 3
    total, buckets, done = 4 * network.parameters, [], 0.0
    while done < total:
        nbytes = min(BUCKET, total - done)
        done += nbytes
        buckets.append((forward + backward * ready(network.curve, done / total), nbytes))
    return max(slowest * alone, queue(buckets, cluster, costs))


def efficiency(network: Network, cluster: Cluster, costs: Costs) -> float:
    """Images per second of each rank, compared with a rank that is alone."""
    return BATCH / network.images / step(network, cluster, costs)


def start(cluster: Cluster, costs: Costs) -> dict[str, float]:
    """Processor time of a start, in seconds: the launcher's, and the rendezvous server's."""
    return {"launcher": costs.agent * cluster.hosts, "rendezvous server": costs.worker * cluster.ranks}
