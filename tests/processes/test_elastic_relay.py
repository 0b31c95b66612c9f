"""An elastic job whose workers cannot reach the launcher: each host's agent relays what they say to the rendezvous."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import warm
from tests.support.elastic_training import TRAIN, check_end, told
from tests.support.hosts import Bed
from tests.support.launching import launcher_in, wait_for


@pytest.mark.timeout(180)  # mostly a tenth of it
def test_any_host_may_die_where_workers_cannot_reach_the_launcher(bed: Bed, tmp_path: Path) -> None:
    """The launcher runs on the machine itself, which is in no network of the bed's."""
    with launcher_in(tmp_path) as launcher, (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        inits = [bed[name].init for name in ("h1", "h2", "h3")]
        template = f"nsenter --target {{host}} -n -u -p -m -i --wd={launcher.folder} --"
        process = launcher.start(
            *("-np", "3", "--min-np", "2", "-H", ",".join(f"{init}:1" for init in inits)),
            *("--agent-command", template, warm.python(), launcher.script(TRAIN)),
            env={"JOB_FOLDER": str(tmp_path)},
            stdout=out,
            stderr=err,
        )

        def size() -> int:
            assert process.poll() is None, (tmp_path / "err").read_text()
            lines = told((tmp_path / "out").read_text())
            return int(lines[-1]["size"]) if lines else 0

        wait_for(lambda: size() == 3, 40, "all three to train")
        for victim in bed["h1"].processes():
            if victim.pid != bed["h1"].init:
                bed["h1"].kill(victim)
        wait_for(lambda: size() == 2, 30, "two of them to go on")
        (tmp_path / "enough").touch()
        assert process.wait(30) == 0, (tmp_path / "err").read_text()
        ends = [line for line in told((tmp_path / "out").read_text()) if "end" in line]
        assert len(ends) == 2
        begins = [line for line in told((tmp_path / "out").read_text()) if "step" in line]
        assert all(line["rendezvous"].startswith("127.0.0.1:") for line in begins)
        for end in ends:
            assert 2 in check_end(end)
        launcher.assert_nothing_left()
