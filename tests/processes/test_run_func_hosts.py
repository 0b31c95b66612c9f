"""``hvdgloo.run.run`` on several hosts: functions, results and exceptions travel through their agents."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import need_installed
from tests.support.hosts import Bed, HostSpec
from tests.support.launching import wait_for


def call(bed: Bed, folder: Path, text: str, *, host: str = "h1", env: dict[str, str] | None = None) -> Any:
    """Run a program on a host; it prints one JSON value."""
    (folder / "program.py").write_text(textwrap.dedent(text))
    done = bed[host].run([sys.executable, "program.py"], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    for each in bed:
        wait_for(lambda each=each: not each.processes(), what=f"the end of everything on {each.name}")
    return json.loads(done.stdout)


def test_results_come_by_rank_from_all_hosts(bed: Bed, tmp_path: Path) -> None:
    found = call(
        bed,
        tmp_path,
        """
        import json, os, socket
        import hvdgloo.run

        def work(base, *, factor):
            rank = int(os.environ["RANK"])
            return rank, socket.gethostname(), os.environ["LOCAL_RANK"], base + factor * rank

        print(json.dumps(hvdgloo.run.run(work, (100,), {"factor": 10}, hosts="h1:1,h2:2,h3:1")))
        """,
    )
    assert found == [[0, "h1", "0", 100], [1, "h2", "0", 110], [2, "h2", "1", 120], [3, "h3", "0", 130]]


def test_they_can_work_together(bed: Bed, tmp_path: Path) -> None:
    need_installed("torch")
    found = call(
        bed,
        tmp_path,
        """
        import json
        import hvdgloo.run

        def work():
            import numpy as np
            import hvdgloo.numpy as hvd
            hvd.init()
            return hvd.allreduce(np.ones(3) * hvd.rank(), op=hvd.Sum).tolist()

        print(json.dumps(hvdgloo.run.run(work, num_proc=2, hosts="h2:1,h3:1")))
        """,
    )
    assert found == [[1.0] * 3] * 2


def test_a_hostfile_environment_working_directory_and_modules(bed: Bed, tmp_path: Path) -> None:
    """Pain 19: what is imported here is imported there, from the same places."""
    (tmp_path / "hosts").write_text("h1 slots=1\nh2 slots=4  # only one is needed\n")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helper.py").write_text("def double(x): return 2 * x\n")
    found = call(
        bed,
        tmp_path,
        """
        import json, os, sys
        sys.path.insert(0, "lib")
        import helper
        import hvdgloo.run
        sys.path[0] = os.path.abspath("lib")

        def work():
            return helper.double(int(os.environ["RANK"])), os.getcwd(), os.environ["EXTRA"], os.environ["SHIPPED"]

        print(json.dumps(hvdgloo.run.run(work, np=2, hostfile="hosts", env={"EXTRA": "more"})))
        """,
        env={"SHIPPED": "as it was"},
    )
    assert found == [[2 * rank, str(tmp_path), "more", "as it was"] for rank in range(2)]


def test_an_exception_comes_with_its_traceback_rank_and_host(bed: Bed, tmp_path: Path) -> None:
    found = call(
        bed,
        tmp_path,
        """
        import json, os, time
        import hvdgloo.run

        class Problem(Exception):
            pass

        def work():
            if os.environ["RANK"] == "2":
                raise Problem("as planned")
            time.sleep(60)

        try:
            hvdgloo.run.run(work, hosts="h1:1,h2:1,h3:1")
        except Problem as problem:
            cause = problem.__cause__
            print(json.dumps([str(problem), cause.rank, cause.host, cause.traceback]))
        """,
    )
    assert found[:3] == ["as planned", 2, "h3"]
    assert 'raise Problem("as planned")' in found[3]


@pytest.mark.extended
def test_results_of_50_megabytes(bed: Bed, tmp_path: Path) -> None:
    found = call(
        bed,
        tmp_path,
        """
        import json, os
        import hvdgloo.run

        results = hvdgloo.run.run(lambda: bytes([int(os.environ["RANK"])]) * 50_000_000, hosts="h1:1,h2:1,h3:1")
        print(json.dumps([[len(result), result[0], result[-1]] for result in results]))
        """,
    )
    assert found == [[50_000_000, rank, rank] for rank in range(3)]


def test_a_killed_worker_names_its_host(bed: Bed, tmp_path: Path) -> None:
    found = call(
        bed,
        tmp_path,
        """
        import json, os, signal, time
        import hvdgloo.run
        from hvdgloo.errors import JobFailedError

        def work():
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)

        try:
            hvdgloo.run.run(work, hosts="h1:1,h2:1")
        except JobFailedError as error:
            print(json.dumps([error.rank, error.host, error.exit_code, error.signal]))
        """,
    )
    assert found == [1, "h2", 137, 9]


def test_another_interpreter_there_keeps_its_own_packages(make_bed: Callable[..., Bed], tmp_path: Path) -> None:
    """Pain 19: the caller's folders of packages may be absent there, or hold what the interpreter cannot use."""
    bed = make_bed(["h1", HostSpec("h2")])
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "only_there.py").write_text("value = 42\n")
    python = tmp_path / "python"
    # A relocated interpreter: what it takes for its installation is another folder than the caller's.
    (tmp_path / "site" / "sitecustomize.py").write_text(
        f"import site\nsite.getsitepackages = lambda: [{str(tmp_path / 'site')!r}]\n"
    )
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = call(
        bed,
        tmp_path,
        f"""
        import json, os
        import hvdgloo.run

        def work():
            if os.environ["RANK"] == "0":
                return 0
            import only_there
            return only_there.value

        print(json.dumps(hvdgloo.run.run(work, hosts="h1:1,h2:1", remote_python={str(python)!r})))
        """,
    )
    assert found == [0, 42]


def test_hosts_that_cannot_be_used(bed: Bed, tmp_path: Path) -> None:
    found = call(
        bed,
        tmp_path,
        """
        import json
        import hvdgloo.run
        from hvdgloo.errors import UnusableHostsError

        try:
            hvdgloo.run.run(int, hosts="h2:1,nowhere.invalid:1", ssh_port=22)
        except UnusableHostsError as error:
            print(json.dumps(error.hosts))
        """,
    )
    assert list(found) == ["nowhere.invalid"]
    assert "its name cannot be looked up" in found["nowhere.invalid"]
