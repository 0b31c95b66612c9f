"""Autotune: what is tried, when it is believed, and where in the order of operations it applies."""

from __future__ import annotations

import csv
import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from hvdgloo._engine.conventions import EVERYONE
from hvdgloo._engine.coordinator import Coordinator, CoordinatorSettings
from hvdgloo._engine.messages import Execute, Message, Request, Response, Submit, Tune
from hvdgloo._engine.settings import Choice
from hvdgloo._engine.tuning import LEAST_GAIN, LOOKS, AutotuneSettings, Search, Tuner, axes_for, chance, search
from hvdgloo._job.settings import engine_settings
from hvdgloo.config import Config
from hvdgloo.errors import ConfigError
from hvdgloo.types import Collective, DType, ReduceOp, TensorSpec

MIB = 1 << 20
START = Choice(32 * MIB, 0.0, 128 << 10, 1024)
AXES = [("fusion_threshold", [MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB]), ("cycle_time", [0.0, 0.001, 0.005])]
RULES = AutotuneSettings(warmup_samples=1, steps_per_sample=4, noise=0.5)


def allreduce(name: str, nbytes: int, *, op: ReduceOp = ReduceOp.SUM) -> Response:
    return Response(Request(name, Collective.ALLREDUCE, (TensorSpec(DType.FLOAT32, (nbytes // 4,)),), op=op))


def drive(running: Search[Choice], score: Callable[[Choice], float]) -> tuple[Choice, float, list[Choice]]:
    """Answer a search; returns its choice, the gain, and what was measured."""
    asked = [next(running)]
    while True:
        try:
            asked.append(running.send(score(asked[-1])))
        except StopIteration as end:
            choice, gain = end.value
            return choice, gain, asked


class TestSearch:
    def test_the_best_of_the_grid_is_found_in_spite_of_noise(self) -> None:
        """Steps vary by 4 %, and the best settings are 30 % faster than the first ones."""
        best = Choice(4 * MIB, 0.001, 128 << 10, 1024)
        for seed in range(20):
            noise = random.Random(seed)

            def score(choice: Choice, noise: random.Random = noise) -> float:
                speed = 1.0
                speed += 0.2 * (choice.fusion_threshold == best.fusion_threshold)
                speed += 0.1 * (choice.cycle_time == best.cycle_time)
                return speed * noise.gauss(1, 0.04)

            found, gain, _ = drive(search(START, AXES, most=20, pairs=8, looks=LOOKS), score)
            assert found.fusion_threshold == best.fusion_threshold, seed
            assert 1.1 < gain < 1.5

    def test_where_nothing_makes_a_difference_the_start_is_kept(self) -> None:
        """Never slower than the default: noise alone changes settings in fewer than one of ten jobs."""
        taken = 0
        for seed in range(200):
            noise = random.Random(seed)
            found, _, _ = drive(
                search(START, AXES, most=20, pairs=8, looks=LOOKS), lambda _, noise=noise: noise.gauss(1, 0.03)
            )
            taken += found != START
        assert taken < 20

    def test_what_is_slower_is_never_taken(self) -> None:
        for seed in range(200):
            noise = random.Random(seed)

            def score(choice: Choice, noise: random.Random = noise) -> float:
                return (1.0 if choice == START else 0.97) * noise.gauss(1, 0.02)

            found, gain, _ = drive(search(START, AXES, most=20, pairs=8, looks=LOOKS), score)
            assert (found, gain) == (START, 1.0)

    def test_what_is_clearly_faster_is_taken_where_steps_vary_much(self) -> None:
        """By 15 % from sample to sample, as on hosts that others use too."""
        taken = 0
        for seed in range(100):
            noise = random.Random(seed)

            def score(choice: Choice, noise: random.Random = noise) -> float:
                return (1.3 if choice.fusion_threshold == 4 * MIB else 1.0) * noise.lognormvariate(0, 0.15)

            found, _, _ = drive(search(START, AXES[:1], most=20, pairs=8, looks=LOOKS), score)
            taken += found.fusion_threshold == 4 * MIB
        assert taken > 75

    @pytest.mark.parametrize(
        ("ratios", "expected"),
        [
            ([1.1] * 5, 1 / 32),
            ([1.1, 1.2, 1.3, 1.4, 0.99], 2 / 32),  # the one below is the smallest difference
            ([1.1, 1.2, 1.3, 1.4, 0.5], 10 / 32),
            ([1.1, 1 / 1.2], 3 / 4),
        ],
    )
    def test_the_chance_of_a_result_follows_from_signed_ranks(self, ratios: list[float], expected: float) -> None:
        assert chance(ratios) == expected

    def test_a_gain_that_does_not_matter_is_left_alone(self) -> None:
        """Without any noise a gain counts from ``LEAST_GAIN`` on."""
        for gain in (LEAST_GAIN - 0.005, LEAST_GAIN + 0.005):
            found, _, _ = drive(
                search(START, AXES, most=20, pairs=5, looks=LOOKS),
                lambda choice, gain=gain: gain if choice.fusion_threshold == MIB else 1.0,
            )
            assert (found != START) is (gain > LEAST_GAIN)

    @pytest.mark.parametrize("most", [1, 3, 20])
    def test_no_more_candidates_are_measured_than_allowed(self, most: int) -> None:
        _, _, asked = drive(
            search(START, AXES, most=most, pairs=3, looks=LOOKS), lambda choice: 1 / choice.fusion_threshold
        )
        assert len(set(asked) - {START}) == min(most, 6)

    def test_the_choice_is_compared_with_the_start_in_turns(self) -> None:
        _, _, asked = drive(
            search(START, AXES[:1], most=20, pairs=6, looks=LOOKS), lambda choice: 1 / choice.fusion_threshold
        )
        best = Choice(MIB, 0.0, 128 << 10, 1024)
        assert asked[-12:] == [best, START, START, best] * 3
        assert asked[-13] != START

    def test_candidates_are_compared_in_turns(self) -> None:
        """A job that becomes faster while it runs makes none of them look better."""
        for faster in (1.02, 0.98):
            trend = itertools.count()

            def score(choice: Choice, trend: itertools.count[int] = trend, faster: float = faster) -> float:
                speed = 1.1 if choice.fusion_threshold == 16 * MIB else 1.0
                return float(speed * faster ** next(trend))

            found, gain, _ = drive(search(START, AXES[:1], most=20, pairs=8, looks=LOOKS), score)
            assert found.fusion_threshold == 16 * MIB
            assert gain == pytest.approx(1.1, rel=0.06)

    def test_the_comparison_goes_on_until_it_is_clear(self) -> None:
        """No more than that: what is much faster needs few samples, what is alike needs no more to be left alone."""
        axes = [("fusion_threshold", [MIB, 32 * MIB])]
        lengths = {}
        for gain in (0.9, 1.02, 1.3):
            asked = []
            for seed in range(20):
                noise = random.Random(seed)

                def score(choice: Choice, gain: float = gain, noise: random.Random = noise) -> float:
                    return (gain if choice.fusion_threshold == MIB else 1.0) * noise.gauss(1, 0.03)

                asked.append(len(drive(search(START, axes, most=20, pairs=6, looks=LOOKS), score)[2]))
            lengths[gain] = statistics.fmean(asked)
        screened = 2
        assert lengths[0.9] == screened  # and no comparison
        assert lengths[1.3] == screened + 12
        assert screened + 16 < lengths[1.02] <= screened + 48

    def test_what_suits_one_setting_is_tried_again_when_others_have_changed(self) -> None:
        """The cycle time is varied last, and makes another fusion threshold the best."""

        def score(choice: Choice) -> float:
            if choice.cycle_time:
                return {MIB: 1.2, 4 * MIB: 1.5}.get(choice.fusion_threshold, 1.0)
            return {MIB: 1.1}.get(choice.fusion_threshold, 1.0)

        found, gain, _ = drive(search(START, AXES, most=20, pairs=6, looks=LOOKS), score)
        assert (found.fusion_threshold, found.cycle_time > 0, gain) == (4 * MIB, True, 1.5)


GRID = {
    "fusion_threshold": [number * MIB for number in (1, 2, 4, 8, 16, 32, 64)],
    "hierarchical_threshold": [number << 10 for number in (32, 128, 512, 2048, 8192)],
    "cycle_time": [0.0, 0.0005, 0.001, 0.0025, 0.005],
}


class Training:
    """A job on busy hosts: a step takes 5 % more or less (standard deviation), in 3 of 100 steps twice as long, and all
    steps become slower and faster by 2 % in the course of some fifty. A sample is the median of ten steps.

    Args:
        random: for noise.
        speed: of a choice, without noise.
    """

    def __init__(self, random: random.Random, speed: Callable[[Choice], float]) -> None:
        self._random, self.speed = random, speed
        self._drift = 0.0

    def sample(self, choice: Choice) -> float:
        rates = [self._step() for _ in range(11)]
        return self.speed(choice) * statistics.median(rates[1:])

    def _step(self) -> float:
        self._drift = 0.98 * self._drift + self._random.gauss(0, 0.02 * (1 - 0.98**2) ** 0.5)
        pause = 2.0 if self._random.random() < 0.03 else 1.0
        return math.exp(self._random.gauss(0, 0.05) + self._drift) / pause


def hills(random: random.Random) -> Callable[[Choice], float]:
    """The speed of a made-up job: each setting has a best value, about which it falls, steeply or not at all, and the
    best fusion threshold depends on the hierarchical one."""
    best = {name: random.uniform(0, len(values) - 1) for name, values in GRID.items()}
    steep = {name: random.choice([0.0, 0.003, 0.01, 0.02]) for name in GRID}
    together = random.uniform(-0.005, 0.005)

    def speed(choice: Choice) -> float:
        away = {name: values.index(getattr(choice, name)) - best[name] for name, values in GRID.items()}
        exponent = -sum(steep[name] * away[name] ** 2 for name in GRID)
        return math.exp(exponent + together * away["fusion_threshold"] * away["hierarchical_threshold"])

    return speed


class TestTargets:
    """The promises to users, with settings in the order of ``axes_for`` and the flags' defaults."""

    AXES = tuple(GRID.items())

    def tuned(self, training: Training) -> float:
        """The speed of what is chosen, without noise."""
        found, _, _ = drive(search(START, self.AXES, most=20, pairs=8, looks=LOOKS), training.sample)
        return training.speed(found)

    def test_the_choice_is_within_3_percent_of_the_best_of_the_grid_and_never_slower_than_the_start(self) -> None:
        shares = []
        for seed in range(100):
            noise = random.Random(seed)
            training = Training(noise, hills(noise))
            own = self.tuned(training)
            grid = [replace(START, **dict(zip(GRID, values, strict=True))) for values in product(*GRID.values())]
            shares.append(own / max(map(training.speed, grid)))
            assert own / training.speed(START) > 0.98, seed
        assert sum(share >= 0.97 for share in shares) >= 94
        assert min(shares) > 0.93

    def test_where_all_others_are_slower_none_is_chosen(self) -> None:
        for seed in range(100):
            training = Training(random.Random(seed), lambda choice: 1.0 if choice == START else 0.975)
            assert self.tuned(training) == 1.0


class TestAxes:
    def test_of_thresholds_that_fuse_alike_one_is_tried(self) -> None:
        """Ten tensors of 300 KiB make a bucket for every threshold from 4 MiB on."""
        step = [allreduce(f"x{i}", 300 << 10) for i in range(10)]
        ((name, values),) = axes_for(START, step, 1, (), deterministic=False)[:1]
        assert (name, values) == ("fusion_threshold", [32 * MIB, MIB, 2 * MIB])

    def test_a_single_batch_cannot_be_delayed_for_better_fusion(self) -> None:
        step = [allreduce(f"x{i}", 300 << 10) for i in range(10)]
        assert "cycle_time" not in dict(axes_for(START, step, 1, (), deterministic=False))
        assert "cycle_time" in dict(axes_for(START, step, 2, (), deterministic=False))

    def test_hierarchical_thresholds_are_those_that_divide_the_buckets(self) -> None:
        step = [allreduce("large", 5 * MIB), allreduce("small", 300 << 10)]
        values = dict(axes_for(START, step, 1, (), deterministic=False))["hierarchical_threshold"]
        assert values == [128 << 10, 512 << 10, 8 * MIB]  # both are cut, one is, none is
        many = [allreduce(f"x{i}", 100 << 10) for i in range(30)]  # in buckets of any size up to 3 MiB
        values = dict(axes_for(START, many, 1, (), deterministic=False))["hierarchical_threshold"]
        assert values == [128 << 10, 32 << 10, 2048 << 10, 8192 << 10]
        flat = Choice(32 * MIB, 0.0, 0, 1024)
        assert "hierarchical_threshold" not in dict(axes_for(flat, step, 1, (), deterministic=False))

    def test_inline_thresholds_are_those_that_divide_lone_small_tensors(self) -> None:
        step = [allreduce("a", 1024), allreduce("b", 2048)]
        values = dict(axes_for(START, step, 1, (), deterministic=False))["inline_threshold"]
        assert values == [1024, 0, 4096]

    def test_what_the_user_has_set_stays(self) -> None:
        step = [allreduce(f"x{i}", 300 << 10) for i in range(10)]
        names = set(dict(axes_for(START, step, 2, (), deterministic=False)))
        assert names == {"fusion_threshold", "hierarchical_threshold", "cycle_time"}
        for name in names:
            assert set(dict(axes_for(START, step, 2, {name}, deterministic=False))) == names - {name}

    def test_deterministic_results_depend_on_nothing_that_is_tried(self) -> None:
        step = [allreduce("large", 5 * MIB), *(allreduce(f"x{i}", 300 << 10) for i in range(10)), allreduce("t", 1024)]
        assert dict(axes_for(START, step, 2, (), deterministic=False)).keys() == {
            "fusion_threshold", "hierarchical_threshold", "cycle_time", "inline_threshold",
        }  # fmt: skip
        assert dict(axes_for(START, step, 2, (), deterministic=True)).keys() == {"fusion_threshold", "cycle_time"}


class Job:
    """A coordinator of two ranks with a tuner, and a clock that shows how fast steps are with which settings.

    Args:
        seconds: of a step, from the settings in use.
    """

    def __init__(self, seconds: Callable[[Choice], float], rules: AutotuneSettings = RULES) -> None:
        self.choice = self.start = Choice(32 * MIB, 0.0, 0, 0)
        self.seconds = seconds
        self.tuner = Tuner(self.start, rules, deterministic=False)
        settings = CoordinatorSettings(60.0, 1024, 0.0, False, 60.0, 0.0)
        self.coordinator = Coordinator(2, {0: (0, 1)}, settings, str, tuner=self.tuner)
        self.now = 1.0
        self.sent: list[Message] = []
        self.requests = [allreduce(f"x{i}", MIB).request for i in range(12)]

    def step(self) -> None:
        """One step, ordered in two batches."""
        for names in (self.requests[:6], self.requests[6:]):
            for rank in range(2):
                self.coordinator.receive(rank, Submit((), tuple(names)), self.now)
            assert self.coordinator.may_release(self.now)
            self.coordinator.release(self.now)
            for destination, message in self.coordinator.outbox:
                if isinstance(message, Tune):
                    assert destination == EVERYONE
                    self.choice = Choice(
                        message.fusion_threshold,
                        message.cycle_time,
                        message.hierarchical_threshold,
                        message.inline_threshold,
                    )
                self.sent.append(message)
            self.coordinator.outbox.clear()
            self.now += self.seconds(self.choice) / 2

    def run(self) -> int:
        """Train until the search is over; returns the number of steps."""
        for number in itertools.count(1):
            self.step()
            if self.coordinator.notes:
                return number
            assert number < 1000
        raise AssertionError


def _faster_with_4_mib(choice: Choice) -> float:
    return 0.08 if choice.fusion_threshold == 4 * MIB else 0.1


class TestTuner:
    def test_the_job_goes_on_with_what_is_faster_and_says_so_once(self) -> None:
        job = Job(_faster_with_4_mib)
        steps = job.run()
        assert job.choice == Choice(4 * MIB, 0.0, 0, 0)
        ((_, news),) = job.coordinator.notes
        assert "autotune: --fusion-threshold-mb 4 from now on: 25 % faster" in news
        before = len(job.sent)
        job.step()
        assert steps < 200
        assert not any(isinstance(message, Tune) for message in job.sent[before:])
        assert job.coordinator.notes == [("tuning", news)]

    def test_a_job_that_cannot_be_sped_up_ends_with_the_settings_of_its_start(self) -> None:
        job = Job(lambda choice: 0.1)
        job.run()
        assert job.choice == job.start
        assert job.coordinator.notes[0][1].startswith(
            "autotune: settings stay as they were: no others were clearly faster"
        )

    def test_the_settings_change_before_the_batch_that_begins_a_step(self) -> None:
        """All ranks read them at the same place in the order, and what was agreed upon before is not touched."""
        job = Job(_faster_with_4_mib)
        job.run()
        places = [place for place, message in enumerate(job.sent) if isinstance(message, Tune)]
        assert len(places) > 5
        for place in places:
            following = job.sent[place + 1]
            assert isinstance(following, Execute)
            item = following.items[0]
            name = item.request.name if isinstance(item, Response) else f"x{item}"
            assert name == "x0"

    def test_warm_up_samples_do_not_count(self) -> None:
        """The first steps of a job are slow, whatever its settings."""
        job = Job(lambda choice: 0.1, AutotuneSettings(warmup_samples=5, steps_per_sample=7))
        for _ in range(5 * 7 + 1):
            job.step()
        assert not any(isinstance(message, Tune) for message in job.sent)
        for _ in range(3 * 8):
            job.step()
        assert any(isinstance(message, Tune) for message in job.sent)

    def test_a_hopeless_candidate_is_given_up_after_three_steps(self) -> None:
        slow = Job(lambda choice: 0.1 if choice == Choice(32 * MIB, 0.0, 0, 0) else 1.0, AutotuneSettings())
        even = Job(lambda choice: 0.1, AutotuneSettings())
        assert slow.run() < even.run() / 1.5

    def test_a_pause_within_a_sample_changes_nothing(self) -> None:
        """An evaluation or a checkpoint takes longer than many steps; the median knows nothing of it."""
        steps = itertools.count(1)

        def seconds(choice: Choice) -> float:
            return _faster_with_4_mib(choice) + (5.0 if next(steps) % 40 == 0 else 0.0)

        job = Job(seconds, AutotuneSettings(warmup_samples=1, steps_per_sample=10))
        job.run()
        assert job.choice == Choice(4 * MIB, 0.0, 0, 0)

    def test_a_program_without_steps_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hvdgloo._engine.tuning._MOST_NAMES", 100)
        tuner = Tuner(START, RULES, deterministic=False)
        for number in range(200):
            assert tuner.ordered([allreduce(f"x{number}", MIB)], float(number)) is None
        assert "the program's operations do not come again" in tuner.conclusion

    def test_operations_without_names_of_their_own_end_no_steps(self) -> None:
        tuner = Tuner(START, AutotuneSettings(warmup_samples=0, steps_per_sample=1), deterministic=False)
        for _ in range(100):
            assert tuner.ordered([allreduce("allreduce.noname.1", MIB)], 1.0) is None
        assert not tuner.conclusion

    def test_a_program_whose_operations_have_no_names_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """And does not fill the memory with them."""
        monkeypatch.setattr("hvdgloo._engine.tuning._MOST_NAMES", 100)
        tuner = Tuner(START, RULES, deterministic=False)
        for number in range(200):
            tuner.ordered([allreduce(f"allreduce.noname.{number}", MIB)], float(number))
        assert "the program's operations do not come again" in tuner.conclusion

    def test_steps_without_any_data_are_not_compared(self) -> None:
        """Such as a barrier again and again, while rank 0 saves something."""
        tuner = Tuner(START, AutotuneSettings(warmup_samples=0, steps_per_sample=1, noise=0.0), deterministic=False)
        now = itertools.count(1.0)
        for _ in range(3):
            tuner.ordered([allreduce("large", 8 * MIB), allreduce("small", MIB)], next(now))
        barrier = Response(Request("barrier", Collective.BARRIER, ()))
        for _ in range(500):
            tuner.ordered([barrier], next(now))
        assert not tuner.conclusion

    def test_where_there_is_nothing_to_choose_this_is_said_at_once(self) -> None:
        tuner = Tuner(Choice(32 * MIB, 0.0, 0, 0), RULES, deterministic=False)
        for number in range(6):
            assert tuner.ordered([allreduce("large", 8 * MIB)], float(number)) is None
        assert tuner.conclusion == (
            "autotune: settings stay as they were: there is nothing that would make a difference"
        )


class TestLog:
    def test_the_log_has_horovod_s_columns_and_ends_with_the_choice(self, tmp_path: Path) -> None:
        path = tmp_path / "autotune.csv"
        job = Job(_faster_with_4_mib, AutotuneSettings(str(path), warmup_samples=1, steps_per_sample=4, noise=0.3))
        job.run()
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        assert header[:7] == [
            "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "cache_enabled", "cycle_time_ms",
            "tensor_fusion_threshold", "score",
        ]  # fmt: skip
        assert header[7:] == ["hierarchical_threshold", "inline_threshold"]
        assert all(len(row) == len(header) for row in rows)
        by_name = [dict(zip(header, row, strict=True)) for row in rows]
        # Bytes per microsecond: 12 MiB in 0.1 s, and in 0.08 s.
        assert float(by_name[0]["score"]) == pytest.approx(12 * MIB / 0.1 / 1e6, rel=1e-3)
        assert by_name[-1]["tensor_fusion_threshold"] == str(4 * MIB)
        assert float(by_name[-1]["score"]) == pytest.approx(12 * MIB / 0.08 / 1e6, rel=1e-3)
        assert {row["tensor_fusion_threshold"] for row in by_name} >= {str(32 * MIB), str(4 * MIB), str(MIB)}

    def test_a_log_file_that_cannot_be_written_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match=r"--autotune-log-file .*/file/log.csv: (File exists|Not a directory)"):
            Tuner(START, AutotuneSettings(str(tmp_path / "file" / "log.csv")), deterministic=False)


class TestSettings:
    def test_without_the_flag_nothing_is_tried(self) -> None:
        assert engine_settings(Config()).autotune is None

    def test_the_flags_of_horovod_reach_the_tuner(self) -> None:
        variables = {
            "HOROVOD_AUTOTUNE": "1",
            "HOROVOD_AUTOTUNE_LOG": "/tmp/log.csv",
            "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "2",
            "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "6",
            "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "9",
            "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.25",
            "HOROVOD_CYCLE_TIME": "3.5",
        }
        assert engine_settings(Config.from_env(variables)).autotune == AutotuneSettings(
            "/tmp/log.csv", 2, 6, 9, 0.25, frozenset({"cycle_time"})
        )

    def test_the_noisier_the_steps_the_more_often_is_the_choice_compared(self) -> None:
        lengths: list[int] = []
        for noise in (0.0, 0.8, 1.0):
            lengths.append(Job(_faster_with_4_mib, AutotuneSettings("", 1, 4, 20, noise)).run())
        assert lengths[0] < lengths[1] < lengths[2]
