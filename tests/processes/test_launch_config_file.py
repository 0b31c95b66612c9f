"""``--config-file`` and Horovod's other flags, as a user meets them: with hosts, over ssh."""

from __future__ import annotations

from pathlib import Path

from tests.support import warm
from tests.support.hosts import Bed
from tests.support.launching import Launcher

SHOW = "import os, socket; print(socket.gethostname(), os.environ.get('GIVEN'), os.environ['HVDGLOO_FUSION_THRESHOLD'])"

FILE = """
hosts: [h1:1, h2:1]
ssh: {port: 22, args: -o Compression=yes}
environment: {variables: [GIVEN=by the file]}
network: {nics: eth0}
timeouts: {grace_seconds: 1}
params: {fusion_threshold_mb: 3, hierarchical_allreduce: true}
output: {filename: logs}
"""


def test_a_job_described_by_a_file(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FILE)
    done = bed["h1"].run([*warm.launcher(), "--config-file", "job.yaml", "python", "-c", SHOW], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0]<stdout>:h1 by the file 3145728",
        "[1]<stdout>:h2 by the file 3145728",
    ]
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "h2 by the file 3145728\n"
    assert "job.yaml: params.hierarchical_allreduce has no effect here" in done.stderr


def test_flags_win_over_it(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(FILE)
    (tmp_path / "hosts").write_text("h3 slots=2\n")
    flags = ["--hostfile", "hosts", "-np", "1", "-x", "GIVEN=by a flag", "--fusion-threshold-mb", "1"]
    done = bed["h1"].run([*warm.launcher(), "--config-file", "job.yaml", *flags, "python", "-c", SHOW], cwd=tmp_path)
    assert done.stdout == "[0]<stdout>:h3 by a flag 1048576\n", done.stderr


def test_horovod_s_flags_without_a_meaning_here_are_named_in_a_line_each(launcher: Launcher) -> None:
    done = launcher.run("--gloo", "--tcp", "--mpi-args", "-x", "--no-torus-allreduce", "-np", "1", "true")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "hvdgloo-run: --no-torus-allreduce: it has no effect here",
        "hvdgloo-run: --mpi-args: there is no MPI here, so it has no effect",
        "hvdgloo-run: --tcp: there is no MPI here, so it has no effect",
    ]
    launcher.assert_nothing_left()
