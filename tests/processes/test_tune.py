"""``hvdgloo-run tune`` on hosts, with a program whose gradients are recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdgloo._backends.select import gloo_provider
from tests.support import warm
from tests.support.hosts import Bed
from tests.support.launching import Launcher

PROGRAM = """
import sys
import numpy as np
import hvdgloo.numpy as hvd
from sizes import COUNTS  # beside this program

assert sys.argv[1:] == ["--lr", "0.1"]
hvd.init()
gradients = [np.ones(count, np.float32) for count in COUNTS]
while True:
    handles = [hvd.allreduce_async_(each, op=hvd.Sum, name=f"g{number}") for number, each in enumerate(gradients)]
    for handle in handles:
        hvd.synchronize(handle)
"""


# It takes ten seconds on a quiet machine, for five jobs one after another.
@pytest.mark.extended
@pytest.mark.timeout(200)
@pytest.mark.skipif(not gloo_provider("auto"), reason="hosts need Gloo, and that needs torch or pygloo")
def test_a_program_on_several_hosts_is_tuned_to_its_gradients(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text(PROGRAM)
    (tmp_path / "own" / "sizes.py").write_text("COUNTS = (300_000, 7, 20_000)")
    # From a third host, so that the ranks of both are warm; without hvdgloo.torch, for which other things are tuned.
    hosts = ["-H", "h1:2,h2:1", "--remote-python", warm.python("torch.distributed", "hvdgloo._backends.gloo")]
    arguments = [*hosts, "--seconds", "2", "--json", "--save", "tuned.yaml", "--plot", "tuned.svg"]
    run = [*warm.launcher(), "tune", *arguments, "--", "own/train.py", "--lr", "0.1"]
    done = bed["h3"].run(run, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["workload"] == "the gradients of own/train.py: 3 tensors, 1.2 MiB"
    own, flat = found["planes"]
    assert (own["plane"], own["ranks"], own["hosts"], flat["plane"]) == ("hierarchical", 3, 2, "gloo")
    (tried,) = own["found"]
    assert {each["hierarchical_threshold"] for each in tried["tried"]} >= {32 << 10, 512 << 10}
    assert {each["fusion_threshold"] for each in tried["tried"]} >= {1 << 20, 64 << 20}
    assert not tried["in_buckets"]
    assert list(found["wires"]) == ["full", "bf16", "int8", "int4"]
    assert all(seconds > 0 for seconds in found["wires"].values())
    assert "params.wire" not in found["settings"]
    assert (tmp_path / "tuned.yaml").read_text().startswith("# Measured by hvdgloo-run tune")
    assert (tmp_path / "tuned.svg").read_text().startswith("<svg")


def test_a_program_s_failure_is_the_command_s(launcher: Launcher) -> None:
    done = launcher.run("tune", "-np", "2", "--", launcher.script("raise SystemExit('no data')"), timeout=60)
    assert done.returncode == 1
    assert "no data" in done.stderr
    assert "Traceback" not in done.stderr.rpartition("no data")[2]
    launcher.assert_nothing_left()
