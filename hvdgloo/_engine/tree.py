"""The control plane of many hosts: a tree in which the ranks of a host speak through its leader.

With one connection for each rank, rank 0 reads a message of every rank for every answer. In a large job only the first
rank of each host, its *leader*, has a connection with those above: rank 0 is the root, and the leader of host ``i``
reports to the leader of host ``(i - 1) // fanin``. A leader passes up what all ranks below it have submitted
(``tree_operations``), and passes down what the root has decided; everything else is decided by the root, as without a
tree.

A leader that is lost takes the ranks below it along, whether or not it has drained itself: no other rank
speaks for them. Pure: messages and times go in, messages come
out; the control thread does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdgloo._engine.conventions import ping_interval
from hvdgloo._engine.liveness import Liveness, RollCall
from hvdgloo._engine.messages import (
    Abort,
    AskAlive,
    AskStacks,
    Drained,
    End,
    Execute,
    Failed,
    Gathered,
    Leave,
    Lost,
    Message,
    Observe,
    Ping,
    Pong,
    Resend,
    Said,
    Silent,
    Stacks,
    Submit,
    To,
    Tune,
)
from hvdgloo._engine.run_lengths import mask_of_runs, runs_of_mask
from hvdgloo._engine.tree_operations import OperationsBelow, Upward
from hvdgloo._engine.tree_position import TreePosition

PATIENCE_SECONDS = 1.0
"""Seconds after which the root is told of an operation that some ranks below have submitted and others have not."""


class Aggregator:
    """The knowledge of a leader, or of the root, about the ranks below.

    Args:
        position: its place.
        members: the global ranks of each process set by id, at the beginning; 0 is all ranks.
        patience: seconds after which an operation that not all have submitted goes up.
        operation_timeout: seconds after which a silent child counts as lost.

    Attributes:
        up: messages for the parent.
        down: messages for children, and for the leader's own rank, in order.
        operations: what the ranks below have submitted.
        busy: the leader's own rank waits for something.
    """

    def __init__(
        self, position: TreePosition, members: Mapping[int, Sequence[int]], patience: float, operation_timeout: float
    ) -> None:
        self.up = Upward(batches=position.parent >= 0)
        self.down: list[tuple[int, Message]] = []
        self.operations = OperationsBelow(position, members, patience, self.up, self._deliver)
        self.busy = False
        self._position = position
        self._ending = False
        self._drained = 0
        self._roll_call: RollCall | None = None
        self._asked_from_above = self._asked_from_below = float("-inf")
        self._ping_seconds = 2 * ping_interval(operation_timeout)
        self._watch = Liveness(position.children, operation_timeout, at_once=True)

    # Messages from below.

    def receive(self, child: int, message: Message, now: float) -> None:
        """Handle a child's message, or one of the leader's own rank.

        Raises:
            ValueError: the child has no right to say this.
        """
        if child != self._position.rank:
            self._check(child, message)
        self._watch.heard(child, now)
        if self._roll_call is not None and child not in self._position.leaders:
            self._answered_the_roll(self._roll_call, child, 0)
        if isinstance(message, Submit):
            if not self._ending:
                self.operations.submitted(child, message, now)
        elif isinstance(message, Gathered):
            if not self._ending:
                self.operations.gathered(child, message, now)
        elif isinstance(message, Ping):
            self._asked_from_below = now
            self.down.append((child, Pong()))
        elif isinstance(message, Drained):
            self._drained |= mask_of_runs(message.ranks) if message.ranks else 1 << child
            if self._drained == self._position.everyone:
                self._report_drained()
        elif isinstance(message, (Leave, Failed, Stacks)):
            self.up.say(Said(child, message))
        elif isinstance(message, (Said, Lost, Observe, Tune, Abort)):
            self.up.say(message)
        elif isinstance(message, Silent):
            if self._position.parent < 0:
                self.up.say(message)
            elif self._roll_call is not None:
                self._answered_the_roll(self._roll_call, child, mask_of_runs(message.ranks))

    def _check(self, child: int, message: Message) -> None:
        """Members speak for themselves, leaders for the ranks below them.

        Raises:
            ValueError: this one does otherwise.
        """
        if isinstance(message, Submit):
            allowed = child not in self._position.leaders
        elif isinstance(message, (Gathered, Observe, Said, Lost, Silent)):
            allowed = child in self._position.leaders and self._speaks_for(child, message)
        else:
            allowed = self._speaks_for(child, message)
        if not allowed:
            raise ValueError(f"rank {child} has sent a {type(message).__name__} that is not for it to send")

    def _speaks_for(self, child: int, message: Message) -> bool:
        """Return whether the ranks that a message names are below a child. The ranks of a Gathered's parts are checked
        where they are read."""
        named = mask_of_runs(message.ranks) if isinstance(message, (Drained, Silent)) else 0
        if isinstance(message, (Said, Lost, Silent)):
            named |= mask_of_runs((message.rank, 1))
        elif isinstance(message, Gathered) and message.last >= 0:
            named |= mask_of_runs((message.last, 1))
        return not named & ~self._position.below[child]

    def lost(self, child: int, reason: str) -> None:
        """A child's connection has ended."""
        if self._drained:
            self._report_drained()
        self.up.say(Lost(child, reason))

    def _report_drained(self) -> None:
        self.up.say(Drained(runs_of_mask(self._drained)))
        self._drained = 0

    # Messages from above.

    def pass_down(self, message: Message, now: float) -> None:
        """Take note of a message for this leader, or for everyone, from its parent or the coordinator. Who passes on
        what is for everyone does so before: answers to what follows from it come after it."""
        if isinstance(message, Execute):
            self.up.answered()
            self.operations.ordered(message)
        elif isinstance(message, To):
            self.send(mask_of_runs(message.ranks), message.message)
        elif isinstance(message, (Resend, AskStacks)):
            self.send(1 << self._position.rank, message)
        elif isinstance(message, Ping):
            self._asked_from_above = now
            self.up.say(Pong())
        elif isinstance(message, AskAlive):
            self._call_the_roll(now)
        elif isinstance(message, Observe):
            self.operations.observe(message.on, now)
        elif isinstance(message, End):
            self._ending = True
            self.operations.end()

    def send(self, ranks: int, message: Resend | AskStacks) -> None:
        """Have a message delivered to some ranks below, given as a mask."""
        if isinstance(message, Resend):
            self.operations.ask_back(ranks, message.signatures, asked_here=False)
        else:
            self._deliver(ranks, message)

    def _deliver(self, ranks: int, message: Resend | AskStacks) -> None:
        for child, below in self._position.below.items():
            meant = ranks & below
            if meant:
                self.down.append((child, message if meant == 1 << child else To(runs_of_mask(meant), message)))

    def is_due(self, now: float) -> bool:
        """Return whether ``up`` or ``down`` has something to send."""
        return bool(self.down) or self.up.is_due(now)

    def asked_from_below(self, now: float) -> bool:
        """Return whether some rank below waits, and asked lately whether the ranks above are alive."""
        return now < self._asked_from_below + self._ping_seconds

    def tick(self, now: float) -> None:
        """Let time pass: what has waited for long, silent children."""
        if self.operations.next_look is not None and now >= self.operations.next_look:
            self.operations.look_at_what_waits(now)
        if self._roll_call is not None and now >= self._roll_call.deadline:
            self._close_the_roll(self._roll_call)
        if self._position.parent >= 0:
            self._watch_children(now)

    def deadline(self) -> float | None:
        """Return the next time at which ``tick`` or ``up`` has something to do; None if only a message can tell."""
        times = [self.operations.next_look, self.up.deadline, self._watch.deadline]
        if self._roll_call is not None:
            times.append(self._roll_call.deadline)
        return min([time for time in times if time is not None], default=None)

    def _watch_children(self, now: float) -> None:
        asked = now < self._asked_from_above + self._ping_seconds
        active = self.busy or self.operations.holds or self._ending or asked
        ping, lost = self._watch.tick(now, active=active)
        for child, reason in lost:
            self.lost(child, reason)
        if ping:
            self.down.extend((child, Ping()) for child in self._position.children)

    def _call_the_roll(self, now: float) -> None:
        self._roll_call = RollCall(self._position.children, now + self._position.attribution_seconds)
        for child in self._position.children:
            self.down.append((child, AskAlive() if child in self._position.leaders else Ping()))
        if not self._position.children:
            self._close_the_roll(self._roll_call)

    def _answered_the_roll(self, roll_call: RollCall, child: int, silent: int) -> None:
        if roll_call.answered(child, silent):
            self._close_the_roll(roll_call)

    def _close_the_roll(self, roll_call: RollCall) -> None:
        self._roll_call = None
        self.up.say(Silent(self._position.rank, runs_of_mask(roll_call.silent)))
