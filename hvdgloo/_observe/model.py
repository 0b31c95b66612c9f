"""Model of the job, and of its changes since readers were last told. Not thread-safe: ``Observatory`` is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from hvdgloo._observe import curves as drawn
from hvdgloo._observe import stragglers, traffic, view
from hvdgloo._observe.marks import Marks
from hvdgloo._observe.members import Host, Rank, Waits, columns
from hvdgloo._observe.output import Output
from hvdgloo._observe.progress import Pace, done
from hvdgloo._observe.rates import HostWindow, Rates, Window
from hvdgloo._observe.samples import HostSample, Lateness, Missing, Note, Observation, Progress, Sample
from hvdgloo._observe.series import Recording, brief
from hvdgloo._observe.settings import changed, units
from hvdgloo._observe.words import progress

_POINTS = 512
_POINTS_OF_HEAT = 256
_EVENTS = 500
_MARKED = ("outer step", "commit", "checkpoint")
_LONGEST_TEXT = 2000
_LONGEST_MORE = 16 * 1024
_LONGEST_NAME = 100
_LOGGED = 64  # names of numbers that the program logs
_LEAVERS = 64  # hosts that left or were lost, and are still shown
_MOST_RANKS = 65536  # in a job without ``placed``: a forged sample could claim any number
_LEAST_ROUNDS = 50  # before a straggler makes an event: the first steps are unlike the others
_FORGOTTEN = 60.0  # seconds without straggling after which a straggler makes another event


class Model:
    """The job.

    Args:
        job: its id, command and so on; changed in place.
    """

    def __init__(self, job: view.Job) -> None:
        self.output = Output()
        self._job = job
        self._placed = False  # True if ``placed`` was called, which knows the ranks' hosts
        self._hosts: dict[str, Host] = {}
        self._ranks: dict[int, Rank] = {}
        self._lateness: Lateness | None = None
        self._lateness_of = 0  # id of the process whose totals these are
        self._missing: Sequence[Missing] = ()
        self._missing_at = 0.0
        self._stacks: Sequence[tuple[int, str]] = ()
        self._settings: dict[str, Any] = {}
        self._events: deque[view.Event] = deque(maxlen=_EVENTS)
        self._number = 0
        self._early = view.Early()
        self._early_of = 0  # id of the process that logged these
        self._marks = {kind: Marks(kind) for kind in _MARKED}
        self._stragglers_known: dict[int, float] = {}
        self._pace = Pace()
        self._progress: Progress | None = None
        self._series: Recording[str] = Recording(job.started, _POINTS, curves=2 * traffic.MOST_PLANES + _LOGGED)
        self._heat: Recording[int] = Recording(job.started, _POINTS_OF_HEAT, total=True, curves=_MOST_RANKS)
        self._hot: dict[int, float] = {}  # seconds by rank since the last tick
        self._changed = True
        self._still = False  # nothing happens in the job: time alone changes nothing
        self._ticked = job.started
        # What readers have been told.
        self._told = view.Snapshot(job=msgspec.structs.replace(job))
        self._rows: dict[int, tuple[Any, ...]] = {}

    # What comes in.

    @property
    def still(self) -> bool:
        """True if there is nothing to tell until something comes in."""
        return self._still and not self._changed and (self._over or not self._missing)

    @property
    def _over(self) -> bool:
        return self._job.exit_code is not None

    @property
    def _finishing(self) -> bool:
        """True if a rank has left, so that the others make no more steps; an elastic job survives losses."""
        return any(rank.ended or (rank.fate and self._job.least is None) for rank in self._ranks.values())

    def observe(self, host: str, observation: Observation, now: float) -> None:
        if not math.isfinite(observation.at):
            return
        if isinstance(observation, Sample):
            self._sample(host, observation, now)
        elif isinstance(observation, HostSample):
            if self._placed and host not in self._hosts:
                return
            known = self._host(host)
            known.window = known.window or HostWindow()
            known.window.put(observation)
        else:
            self._note(host, observation, now)
        self._changed = True

    def placed(self, epoch: int, seats: Iterable[tuple[int, str, int, int]]) -> None:
        places = {rank: (host, local_rank, pid) for rank, host, local_rank, pid in seats}
        self._placed = True
        if epoch != self._job.epoch:
            self._begin(epoch)
        for rank in set(self._ranks) - set(places):
            del self._ranks[rank]
        for rank, (host, local_rank, pid) in sorted(places.items()):
            self._host(host).state = "up"
            known = self._ranks.get(rank)
            if known is None:
                self._ranks[rank] = Rank(rank, host, local_rank, pid, self._job.started)
            elif (host, local_rank, pid) != (known.host, known.local_rank, known.pid):
                known.move(host, local_rank, pid)
        self._job.size = len(places)
        self._changed = True

    def worker(self, rank: int, state: str, reason: str, now: float) -> None:
        known = self._ranks.get(rank)
        if known is None:
            return
        if state in ("lost", "failed", "ended"):
            if known.fate != state and state != "ended":
                what = reason or ("is lost" if state == "lost" else "has failed")
                self.event("failure", f"rank {rank} ({known.host}) {what}", rank, "", now)
            known.fate, known.reason = state, reason[:_LONGEST_TEXT]
            self.output.finish(rank, now)
        else:
            known.fate = known.reason = ""
            if state == "running":
                self._runs()
        self._changed = True

    def host(self, name: str, state: str, now: float) -> None:
        host = self._host(name)
        if state == "left out":
            host.state = state if host.state == "up" else host.state  # that it is lost says more
        elif host.state != state:
            host.state = state
            text = {"up": "is back", "lost": "is lost", "left": "has left the job"}.get(state, f"is {state}")
            self.event("host", f"host {name} {text}", -1, "", now)
        if state == "lost":
            for rank in self._ranks.values():
                if rank.host == name and not rank.fate:
                    rank.fate, rank.reason = "lost", f"host {name} is lost"
        self._changed = True

    def event(self, kind: str, text: str, rank: int, more: str, now: float) -> None:
        self._number += 1
        self._events.append(view.Event(self._number, now, kind, rank, text[:_LONGEST_TEXT], more[:_LONGEST_MORE]))
        self._changed = True

    def write(self, rank: int, stream: int, data: bytes, now: float) -> None:
        self.output.write(rank, stream, data, now)
        self._changed = True

    def starting(self, text: str) -> None:
        if self._job.state == "starting":
            self._job.message = text[:_LONGEST_TEXT]
            self._changed = True

    def ended(self, exit_code: int, message: str, now: float, *, stopped: bool, causes: Collection[int] | None) -> None:
        self._job.state = "stopped" if stopped else "failed" if exit_code else "ended"
        self._job.exit_code = exit_code
        self._job.message = message[:_LONGEST_TEXT]
        self.output.finish_all(now)
        for number, rank in self._ranks.items():
            if causes is not None and number in causes and rank.fate != "lost":
                rank.fate, rank.reason = "failed", rank.reason or self._job.message
            elif causes is not None and rank.fate == "failed":
                rank.fate, rank.reason = "ended", "was stopped" if stopped else f"ended with the job: {rank.reason}"
            rank.fate = rank.fate or "ended"
        text = "the job has ended" if not exit_code else message or f"the job has failed with exit status {exit_code}"
        self.event("state", text, -1, "", now)

    # What goes out.

    def samples(self) -> list[tuple[str, Sample]]:
        """Return the latest sample of each rank, with its host, in the order of ranks."""
        return [(known.host, known.window.last) for _, known in sorted(self._ranks.items()) if known.window.last]

    def waiting(self, least: float, now: float) -> dict[int, str]:
        """Return the operation that each rank with samples waits for; see ``Observatory.waiting``."""
        found = {}
        for number, rank in sorted(self._ranks.items()):
            if not rank.fate and not rank.ended and rank.window.last is not None:
                found[number] = rank.waits_for(least, now)
        return found if any(found.values()) else {}

    def host_samples(self) -> dict[str, HostSample]:
        """Return the latest sample of each host."""
        return {host.name: host.window.last for host in self._hosts.values() if host.window}

    def lateness(self) -> Lateness | None:
        """Return the lateness of ranks, as rank 0 last reported it."""
        return self._lateness

    def series_of(self, rank: int) -> view.Series:
        return drawn.series(self._ranks[rank].recording)

    def snapshot(self, now: float, *, curves: bool = True) -> view.Snapshot:
        """Return everything that readers were told, with or without the curves."""
        told = msgspec.structs.replace(self._told, job=msgspec.structs.replace(self._told.job, now=now))
        if curves:
            told.series, told.heat = drawn.series(self._series), drawn.heat(self._heat)
        if self._rows:
            told.ranks = columns(self._rows)
        return told

    def tick(self, now: float) -> view.Update | None:
        """Bring everything up to ``now``; return what is new, or None."""
        if self.still:
            return None
        begun = self._job.started
        if int(now - begun) > int(self._ticked - begun) + 1 and not self._finishing:  # a second has no tick in it
            self._series.hold(now - 1)
            for rank in self._ranks.values():
                rank.recording.hold(now - 1)
        self._ticked = now
        for rank in self._ranks.values():
            rank.rates = self._rates(rank, now)
        planes = traffic.planes(self._ranks.values())
        late = self._late(now)
        self._sum_up(now)
        self._job.outer = traffic.outer_steps(self._ranks.values(), None if self._over else now)
        if self._over:
            self._series.end(drawn.of_logged(self._job.logged))
        else:
            self._record(now, planes)
        self._heat.add(now, self._hot)
        self._hot = {}
        self._still = self._over or (self._job.steps_per_second == 0 and self._job.bytes_per_second == 0)
        self._changed = False
        return self._tell(now, planes, late)

    # How samples are taken in.

    def _runs(self) -> None:
        if self._job.state == "starting":
            self._job.state, self._job.message = "running", ""

    def _host(self, name: str) -> Host:
        if name not in self._hosts:
            self._hosts[name] = Host(name)
            leavers = [host.name for host in self._hosts.values() if host.state != "up"]
            used = {rank.host for rank in self._ranks.values()}
            for leaver in leavers[: max(0, len(leavers) - _LEAVERS)]:
                if leaver not in used:
                    del self._hosts[leaver]
        return self._hosts[name]

    def _begin(self, epoch: int) -> None:
        """Begin a new epoch of an elastic job."""
        self._job.epoch = epoch
        self._lateness = None
        self._missing = ()
        self._stragglers_known.clear()
        for rank in self._ranks.values():
            rank.fate = rank.reason = ""

    def _sample(self, host: str, sample: Sample, now: float) -> None:
        if not sample.rank < sample.size <= _MOST_RANKS or sample.epoch < self._job.epoch:
            return
        if self._placed:
            known = self._ranks.get(sample.rank)
            if known is None or known.host != host or sample.epoch > self._job.epoch:
                return  # not its place, or not its place yet
        else:
            if sample.epoch > self._job.epoch or sample.size != self._job.size:
                self._begin(sample.epoch)
                self._job.size = sample.size
                for gone in [rank for rank in self._ranks if rank >= sample.size]:
                    del self._ranks[gone]
            known = self._ranks.get(sample.rank)
            self._host(host)
            if known is None or known.host != host:
                local_rank = sum(1 for rank in self._ranks.values() if rank.host == host and rank.rank < sample.rank)
                known = self._ranks[sample.rank] = Rank(sample.rank, host, local_rank, sample.pid, self._job.started)
        self._runs()
        if not known.window.goes_on(sample):
            known.window = Window()
        known.window.put(sample, now)
        if sample.rank == 0:
            self._of_rank_0(sample, now)

    def _of_rank_0(self, sample: Sample, now: float) -> None:
        self._missing, self._missing_at = sample.missing, now
        if sample.settings is not None:
            self._settings = sample.settings
        self._log(sample, now)
        for kind, count, ended in (
            ("outer step", sample.outer.count, sample.outer.ended),
            *((each.kind, each.count, each.ended) for each in sample.saves),
        ):
            if ended > 0 and kind in self._marks:  # by its host's clock, which may not agree with this one
                self._marks[kind].count(sample.pid, count, round(now - max(0.0, sample.at - ended), 2))
        if sample.lateness is not None:
            before: dict[int, float] = {}
            if self._lateness and self._lateness_of == sample.pid and self._lateness.rounds <= sample.lateness.rounds:
                before = {late.rank: late.seconds for late in self._lateness.ranks}
            for late in sample.lateness.ranks:
                seconds = late.seconds - before.get(late.rank, 0.0)
                if seconds > 0 and late.rank in self._ranks:
                    self._hot[late.rank] = self._hot.get(late.rank, 0.0) + seconds
            self._lateness, self._lateness_of = sample.lateness, sample.pid
        if sample.stacks and sample.stacks != self._stacks:
            for rank, text in sample.stacks:
                if rank in self._ranks and not self._told_stack(text):
                    where = f"rank {rank} ({self._ranks[rank].host})"
                    self.event("stall", f"what {where} is doing: its Python stacks", rank, text, now)
        self._stacks = sample.stacks

    def _log(self, sample: Sample, now: float) -> None:
        """Take the numbers and the progress that the program logged on rank 0."""
        job = self._job
        logged = dict(job.logged)
        for text, value in sample.logged:
            name = text[:_LONGEST_NAME]
            if name not in logged and len(logged) == _LOGGED:
                continue
            finite = math.isfinite(value)
            if not finite and logged.get(name, 0.0) is not None:
                what = "is not a number (NaN)" if math.isnan(value) else "is infinite"
                at = sample.progress or view.Progress()
                place = ", ".join(progress(at.step, None, at.epoch, None, None))
                self.event("warning", f"{name} {what}{' in ' * bool(place)}{place}", -1, "", now)
            logged[name] = value if finite else None
        job.logged = logged
        if sample.early is not None and self._early_of in (0, sample.pid):
            self._early_of = sample.pid
            self._early = drawn.early(sample.early, now - sample.at, logged)
        self._progress = sample.progress or self._progress

    def _told_stack(self, text: str) -> bool:
        """Return whether the last stall's report contains a stack, which is indented there."""
        more = next((event.more for event in reversed(self._events) if event.kind == "stall"), "")
        return all(line.strip() in more for line in text.splitlines())

    def _note(self, host: str, note: Note, now: float) -> None:
        known = self._ranks.get(note.rank)
        if self._placed and (known is None or known.host != host):
            return
        kind = note.kind if note.kind in ("warning", "stall", "stall ended", "tuning", "trace", "note") else "warning"
        text, _, more = note.text.partition("\n")
        about = note.rank
        if kind in ("stall", "stall ended"):  # rank 0 reports it, but other ranks cause it
            missing = {rank for one in self._missing for rank in one.ranks}
            about = missing.pop() if kind == "stall" and len(missing) == 1 else -1
        self.event(kind, text, about, more, now)

    # How a tick comes to its values.

    def _late(self, now: float) -> list[view.Straggler]:
        if any(rank.fate in ("failed", "lost") for rank in self._ranks.values()):
            # All ranks wait for these: the stragglers from before tell more.
            return [straggler for straggler in self._told.stragglers if straggler.rank in self._ranks]
        candidates = {
            rank.rank: stragglers.Candidate(rank.rank, rank.host, sample.gpu, rank.rates, steps=sample.steps.count > 0)
            for rank in self._ranks.values()
            if (sample := rank.window.last)
        }
        hosts = {host.name: host.window.mean() for host in self._hosts.values() if host.window and host.state == "up"}
        found = stragglers.find(self._lateness, candidates, hosts)
        for straggler in found:
            if straggler.of < _LEAST_ROUNDS:
                continue
            if straggler.rank not in self._stragglers_known:
                self.event("straggler", straggler.text, straggler.rank, "", now)
            self._stragglers_known[straggler.rank] = now
        for rank in [rank for rank, seen in self._stragglers_known.items() if now - seen > _FORGOTTEN]:
            del self._stragglers_known[rank]
        return found

    def _rates(self, rank: Rank, now: float) -> Rates:
        if self._over:
            return rank.window.whole()
        return rank.rates.ended() if rank.fate else rank.window.rates(now)

    def _sum_up(self, now: float) -> None:
        job = self._job
        active = [rank for rank in self._ranks.values() if self._over or not rank.fate] or list(self._ranks.values())
        stepping = [rank.rates for rank in active if rank.rates.step_seconds > 0]
        job.steps = max(
            [job.steps, *(rank.window.last.steps.count for rank in self._ranks.values() if rank.window.last)]
        )
        job.steps_per_second = brief(min((rates.steps_per_second for rates in stepping), default=0.0))
        job.bytes_per_second = brief(sum(rank.rates.bytes_per_second for rank in active))
        total = sum(rates.step_seconds for rates in stepping)
        job.step_seconds = brief(total / len(stepping)) if stepping else 0.0
        job.computing = brief(sum(rates.computing for rates in stepping) / total) if total else 0.0
        job.waiting = brief(sum(rates.waiting for rates in stepping) / total) if total else 0.0
        job.communicating = brief(sum(rates.communicating for rates in stepping) / total) if total else 0.0
        if self._progress is not None:
            part = done(self._progress)
            remaining = None if self._over else self._pace.remaining(part, now)
            job.progress = view.Progress(
                self._progress.step,
                self._progress.steps,
                self._progress.epoch,
                self._progress.epochs,
                None if part is None else brief(part),
                None if remaining is None else brief(remaining),
            )

    def _record(self, now: float, planes: Sequence[view.PlaneUse]) -> None:
        if self._finishing:
            return  # curves end where the job ends, and do not fall to nothing in its last second
        job = self._job
        heard = [(rank, sample) for rank in self._ranks.values() if not rank.fate and (sample := rank.window.last)]
        for rank, sample in heard:
            flows = ((plane, rate) for (plane, _), rate in rank.rates.flows.items())
            cpu = rank.rates.cpu if rank.window.has_rates else None
            rank.recording.add(now, drawn.point(rank.rates, cpu, sample.memory, flows))
        if heard:
            overall = Rates(
                steps_per_second=job.steps_per_second,
                step_seconds=job.step_seconds,
                waiting=job.waiting * job.step_seconds,
                communicating=job.communicating * job.step_seconds,
            )
            known = all(rank.window.has_rates for rank, _ in heard)
            cpu = sum(rank.rates.cpu for rank, _ in heard) if known else None
            memory = sum(sample.memory for _, sample in heard)
            uses = ((use.name, use.bytes_per_second) for use in planes) if known else ()
            self._series.add(now, drawn.point(overall, cpu, memory, uses, self._job.logged))

    # How it is told.

    def _tell(self, now: float, planes: list[view.PlaneUse], late: list[view.Straggler]) -> view.Update:
        job = self._job
        job.now = now
        told = self._told
        names = {name: index for index, name in enumerate(self._hosts)}
        waits_for = Waits(self._missing, max(0.0, now - self._missing_at), self._ranks)
        rows = {number: rank.row(names, waits_for) for number, rank in sorted(self._ranks.items())}
        new_rows = {number: row for number, row in rows.items() if self._rows.get(number) != row}
        gone = sorted(set(self._rows) - set(rows))
        hosts = [host.show() for host in self._hosts.values()]
        waits = list(self._lateness.waits) if self._lateness else []
        changed_settings = changed(self._settings)
        marks = [mark for kind in self._marks.values() for mark in kind.all()]
        first_new = told.events[-1].number if told.events else 0
        update = view.Update(
            job=msgspec.structs.replace(job),
            hosts=hosts if hosts != told.hosts else None,
            ranks=columns(new_rows) if new_rows else None,
            gone=gone or None,
            planes=planes if planes != told.planes else None,
            stragglers=late if late != told.stragglers else None,
            waits=waits if waits != told.waits else None,
            events=[event for event in self._events if event.number > first_new] or None,
            early=self._early if self._early != told.early else None,
            marks=marks if marks != told.marks else None,
            series=drawn.series(self._series, self._series.unread()),
            heat=drawn.heat(self._heat, self._heat.unread()),
            settings=self._settings if self._settings != told.settings else None,
            changed=changed_settings if changed_settings != told.changed else None,
            units=units() if self._settings and not told.units else None,
            output=self.output.number if self.output.number != told.output else None,
        )
        self._rows = rows
        self._told = view.Snapshot(
            job=update.job,
            hosts=hosts,
            planes=planes,
            stragglers=late,
            waits=waits,
            events=list(self._events),
            early=self._early,
            marks=marks,
            settings=self._settings,
            changed=changed_settings,
            units=units() if self._settings else {},
            output=self.output.number,
        )
        return update
