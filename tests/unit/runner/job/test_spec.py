"""Hosts, slots, commands and environments: values in, values out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo._platform import machine
from hvdgloo.config import Config
from hvdgloo.runner.job.command import thread_defaults, worker_environment
from hvdgloo.runner.job.outcome import Failure, JobOutcome, as_shown, blame, describe_loss, describe_status
from hvdgloo.runner.job.spec import HostEntry, Premises, assign


class TestSlots:
    def test_ranks_fill_hosts_in_order(self) -> None:
        slots = assign([HostEntry("a", 2), HostEntry("b", 3), HostEntry("c", 1)], 5)
        rows = [(s.rank, s.hostname, s.local_rank, s.local_size, s.cross_rank, s.cross_size) for s in slots]
        assert rows == [
            (0, "a", 0, 2, 0, 2),
            (1, "a", 1, 2, 0, 2),
            (2, "b", 0, 3, 1, 2),
            (3, "b", 1, 3, 1, 2),
            (4, "b", 2, 3, 0, 1),
        ]

    @given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
    def test_places_agree_with_each_other(self, sizes: list[int], data: st.DataObject) -> None:
        np = data.draw(st.integers(1, sum(sizes)))
        slots = assign([HostEntry(f"h{i}", n) for i, n in enumerate(sizes)], np)
        assert [slot.rank for slot in slots] == list(range(np))
        for slot in slots:
            local = [other for other in slots if other.host == slot.host]
            cross = [other for other in slots if other.local_rank == slot.local_rank]
            assert (slot.local_rank, slot.local_size) == (local.index(slot), len(local))
            assert (slot.cross_rank, slot.cross_size) == (cross.index(slot), len(cross))
        assert sorted({slot.host for slot in slots}) == list(range(slots[-1].host + 1))


class TestEnvironment:
    def test_config_understands_what_a_worker_is_given(self) -> None:
        slot = assign([HostEntry("a", 1), HostEntry("b", 2)], 3)[2]
        environ = worker_environment(
            slot,
            job_id="job",
            epoch=4,
            rendezvous=("fd00::1", 4711),
            secret=b"s" * 32,
            address="10.0.0.2",
            master=("10.0.0.1", 20001),
        )
        config = Config.from_env(environ)
        assert (config.rank, config.hostname, config.address, config.epoch) == (2, "b", "10.0.0.2", 4)
        assert (config.rendezvous, config.secret, config.job_id) == ("[fd00::1]:4711", b"s" * 32, "job")
        assert (environ["GROUP_RANK"], environ["NODE_RANK"], environ["GROUP_WORLD_SIZE"]) == ("1", "1", "2")
        assert environ["HVDGLOO_CROSS_RANK"] == "0", "the only one with this local rank; torchrun counts hosts"
        horovod = {key: value for key, value in environ.items() if key.startswith("HOROVOD_")}
        assert Config.from_env(horovod).rank == 2

    def test_agents_of_one_machine_are_one_node_for_torch(self) -> None:
        def premises(machine: str) -> Premises:
            return Premises(machine, machine, "/", ())

        hosts = [HostEntry(f"task {i}", 1, premises=premises(machine)) for i, machine in enumerate(("a", "a", "b"))]
        slots = assign(hosts, 3)
        assert [(slot.host, slot.node, slot.nodes) for slot in slots] == [(0, 0, 2), (1, 0, 2), (2, 1, 2)]

    @pytest.mark.parametrize(("limit", "told"), [(None, 2**31 - 1), (0, 0), (3, 3)])
    def test_no_limit_of_restarts_is_a_number_like_any_other(self, limit: int | None, told: int) -> None:
        slot = assign([HostEntry("a", 1)], 1)[0]
        environ = worker_environment(
            slot, job_id="job", epoch=0, rendezvous=("h", 1), secret=b"", address="h", master=None, max_restarts=limit
        )
        assert int(environ["TORCHELASTIC_MAX_RESTARTS"]) == told

    @pytest.mark.parametrize(
        ("cores", "local", "environ", "expected"),
        [
            (16, 4, {}, "4"),
            (2, 4, {}, "1"),
            (7, 2, {}, "3"),
            (16, 1, {}, None),
            (8, 1, {}, "8"),
            (16, 4, {"OMP_NUM_THREADS": "2"}, None),
        ],
    )
    def test_pain_28_threads(self, cores: int, local: int, environ: dict[str, str], expected: str | None) -> None:
        added = thread_defaults(cores, local, environ, machine_cores=16)
        assert added.get("OMP_NUM_THREADS") == expected
        assert not set(added) & set(environ)

    def test_pain_28_one_library_s_choice_leaves_the_others_their_default(self) -> None:
        added = thread_defaults(16, 4, {"MKL_NUM_THREADS": "9"}, machine_cores=16)
        assert added["OMP_NUM_THREADS"] == "4"
        assert "MKL_NUM_THREADS" not in added


class TestMachine:
    def test_cores_respect_affinity(self) -> None:
        assert 1 <= machine.usable_cores() <= len(os.sched_getaffinity(0))

    @pytest.mark.parametrize(
        ("visible", "expected"),
        [(None, 4), ("", 0), ("0", 1), ("0,1", 2), ("0,-1,1", 1), ("0,7,1", 1), ("GPU-abc,GPU-def", 2), (" 1 , 2 ", 2)],
    )
    def test_gpus_as_cuda_sees_them(self, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int) -> None:
        monkeypatch.setattr(machine, "_nvidia_gpus", lambda: 4)
        monkeypatch.setattr(machine, "amd_gpus", lambda: 8)
        assert machine.visible_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == expected

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({}, 4),
            ({"HIP_VISIBLE_DEVICES": "0,2"}, 2),
            ({"CUDA_VISIBLE_DEVICES": "1"}, 1),  # HIP knows it, too
            ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0,1,2"}, 3),
            ({"ROCR_VISIBLE_DEVICES": "1,3"}, 2),
            ({"ROCR_VISIBLE_DEVICES": "1,3", "HIP_VISIBLE_DEVICES": "1,2"}, 1),  # of the two that are left
            ({"ROCR_VISIBLE_DEVICES": "GPU-abc", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ],
        ids=str,
    )
    def test_gpus_as_rocm_sees_them(
        self, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], expected: int
    ) -> None:
        monkeypatch.setattr(machine, "_nvidia_gpus", lambda: 0)
        monkeypatch.setattr(machine, "amd_gpus", lambda: 4)
        assert machine.visible_gpus(environ) == expected

    def test_amd_gpus_as_the_kernel_lists_them(self, tmp_path: Path) -> None:
        for name, units in (("0", 0), ("1", 304), ("2", 304)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "properties").write_text(f"cpu_cores_count 0\nsimd_count {units}\nmem_banks_count 1\n")
        (tmp_path / "3").mkdir()  # one of another container, whose properties may not be read
        assert machine.amd_gpus(str(tmp_path)) == 2
        assert machine.amd_gpus(str(tmp_path / "none")) == 0

    def test_gpus_are_not_looked_for_by_a_program_that_is_not_there(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        if os.path.exists("/proc/driver/nvidia/gpus"):
            pytest.skip("this machine's driver says how many there are")
        monkeypatch.setattr(machine, "amd_gpus", lambda: 0)
        monkeypatch.setenv("PATH", str(tmp_path))
        with monkeypatch.context() as without:
            without.setattr("subprocess.Popen", None)
            assert machine.visible_gpus({}) == 0
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\necho 'GPU 0: one'\necho 'GPU 1: other'\n")
        program.chmod(0o755)
        assert machine.visible_gpus({}) == 2

    def test_quotas_of_both_versions_of_control_groups(self, tmp_path: Path) -> None:
        (tmp_path / "cpu.max").write_text("150000 100000\n")
        assert machine._quota(str(tmp_path)) == 1.5
        (tmp_path / "cpu.max").write_text("max 100000\n")
        assert machine._quota(str(tmp_path)) == 0
        (tmp_path / "cpu.max").unlink()
        (tmp_path / "cpu.cfs_quota_us").write_text("200000\n")
        (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
        assert machine._quota(str(tmp_path)) == 2
        (tmp_path / "cpu.cfs_quota_us").write_text("-1\n")
        assert machine._quota(str(tmp_path)) <= 0


class TestOutcome:
    def test_status_in_words(self) -> None:
        assert describe_status(3) == "exited with status 3"
        assert describe_status(-9) == "was killed by signal 9 (SIGKILL)"
        assert describe_status(-64) == "was killed by signal 64 (SIGRTMAX)"
        assert describe_status(-99) == "was killed by signal 99"

    @pytest.mark.parametrize(
        ("status", "said_why", "text"),
        [
            (None, False, "closed its stream"),
            (0, False, "exited with status 0"),
            (3, True, "exited with status 3"),
            (137, False, "was killed by signal 9 (SIGKILL)"),
            (-9, True, "or the command that leads to it was killed by signal 9 (SIGKILL)"),
            (255, True, "lost its connection"),
            (255, False, "was killed, or lost its connection"),
            (254, False, "exited with status 254"),
        ],
    )
    def test_how_agents_are_lost(self, status: int | None, said_why: bool, text: str) -> None:
        assert describe_loss(status, said_why) == text

    @pytest.mark.parametrize(
        ("status", "reason"), [(4, "exited with status 4"), (-11, "was killed by signal 11 (SIGSEGV)"), (-15, "failed")]
    )
    def test_pain_22_the_culprit_is_named_and_not_who_merely_noticed(self, status: int, reason: str) -> None:
        noticed = "hvdgloo.errors.JobShutdownError: rank 2 (host b, pid 7) called hvd.shutdown() or exited, which ends"
        causes = {0: noticed, 2: "ValueError: culprit"}
        outcome = JobOutcome(first=Failure(0, "a", 1, "exited with status 1"), statuses={0: 1, 1: -15, 2: status})
        found = blame(outcome, {0: "a", 1: "a", 2: "b"}, causes.__getitem__)
        assert found == Failure(2, "b", 1 if status == -15 else status, reason)

    def test_a_rank_that_was_stopped_is_reported_as_the_others_found_it(self) -> None:
        silence = "was lost: it has not answered for 7 s (stopped, swapping, or cut off from the network); X sets"
        noticed = f"hvdgloo.errors.PeerLostError: rank 1 (host b, pid 7) {silence}"
        outcome = JobOutcome(first=Failure(0, "a", 1, "exited with status 1"), statuses={0: 1, 1: -15})
        assert blame(outcome, {0: "a", 1: "b"}, lambda rank: "" if rank else noticed) == Failure(1, "b", 1, silence)

    def test_a_rank_that_left_while_the_others_went_on_is_named(self) -> None:
        """It exited with 0, so the job's status is that of the first one that failed because of it."""
        noticed = "hvdgloo.errors.JobShutdownError: rank 1 (host b, pid 7) called hvd.shutdown() or exited, which"
        outcome = JobOutcome(first=Failure(0, "a", 1, "exited with status 1"), statuses={0: 1, 1: 0})
        blamed = blame(outcome, {0: "a", 1: "b"}, lambda rank: "" if rank else noticed)
        assert blamed is not None
        assert (blamed.rank, blamed.host, blamed.exit_code) == (1, "b", 1)
        assert "ended with status 0 while others were still in collective operations" in blamed.reason
        assert "hvd.join()" in blamed.reason

    def test_what_the_others_were_in_is_named_and_who_called_it(self) -> None:
        noticed = (
            "hvdgloo.errors.JobShutdownError: rank 1 (host b, pid 7) called hvd.shutdown() or exited, which ends "
            "collective operations on all ranks; this rank was in allreduce.noname.1, called at /a b/t.py:4 in evaluate"
        )
        outcome = JobOutcome(first=Failure(0, "a", 1, "exited with status 1"), statuses={0: 1, 1: 0})
        blamed = blame(outcome, {0: "a", 1: "b"}, lambda rank: "" if rank else noticed)
        assert blamed is not None
        assert "(rank 0 in allreduce.noname.1, called at /a b/t.py:4 in evaluate), which" in blamed.reason

    def test_nobody_else_is_blamed_without_a_reason(self) -> None:
        noticed = "hvdgloo.errors.PeerLostError: rank 1 (host b, pid 7) is gone"
        first = Failure(0, "a", 1, "exited with status 1")
        assert blame(JobOutcome(first=first, statuses={0: 1}), {0: "a"}, lambda _: "") == first
        both = JobOutcome(first=first, statuses={0: 1, 1: 1})
        circle = {0: noticed, 1: noticed.replace("rank 1", "rank 0")}
        assert blame(both, {0: "a", 1: "b"}, circle.__getitem__) is not None
        lost = Failure(None, "b", 1, "the agent on host b ended")
        assert blame(JobOutcome(first=lost), {}, lambda _: "") == lost

    @pytest.mark.parametrize(
        ("statuses", "rank"),
        [({0: 1, 1: 1}, 1), ({0: 1, 1: -15}, 0), ({0: 1, 1: None}, 0), ({0: 1}, 0)],
        ids=["alike", "stopped", "lost", "unknown"],
    )
    def test_of_ranks_that_failed_alike_the_one_that_was_shown_is_named(
        self, statuses: dict[int, int | None], rank: int
    ) -> None:
        first = Failure(0, "a", 1, "exited with status 1")
        outcome = JobOutcome(first=first, statuses=statuses)
        assert as_shown(first, outcome, {0: "a", 1: "b"}, {0: 1}.__getitem__) == Failure(
            rank, "ab"[rank], 1, first.reason
        )
        host = Failure(None, "b", 1, "the agent on host b ended")
        assert as_shown(host, outcome, {0: "a", 1: "b"}, {}.__getitem__) == host

    def test_exit_codes(self) -> None:
        assert JobOutcome().exit_code == 0
        assert JobOutcome(first=Failure(0, "h", 3, "")).exit_code == 3
        assert JobOutcome(first=Failure(0, "h", -11, "")).exit_code == 139
        assert JobOutcome(interrupted=2).exit_code == 130
