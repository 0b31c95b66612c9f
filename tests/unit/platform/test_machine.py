"""Cores and GPUs of a host, as far as this process may use them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hvdgloo._platform import machine


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
