"""Discovery scripts that misbehave, under the real launcher: at its first question, and while the job runs."""

from __future__ import annotations

import time

import pytest

from tests.support.launching import Launcher, wait_for

WORKER = """
import os, time
print("start", flush=True)
while not os.path.exists("over"):
    time.sleep(0.01)
"""


pytestmark = pytest.mark.usefixtures("nothing_left")


def script(launcher: Launcher, text: str) -> list[str]:
    """Write a discovery script, in one go; returns its flags."""
    new = launcher.folder / "new"
    new.write_text(f"#!/bin/sh\n{text}\n")
    new.chmod(0o755)
    new.rename(launcher.folder / "hosts.sh")
    return ["--host-discovery-script", "./hosts.sh", "--discovery-interval", "0.1"]


@pytest.mark.parametrize(
    ("text", "limit", "said"),
    [
        ("echo localhost:1; echo no cluster >&2; exit 3", "20", ["it exited with status 3", "    no cluster"]),
        ("echo localhost:1; echo 'Error: forbidden'", "20", ["line 2: 'Error: forbidden' is not a host with a number"]),
        ("echo waiting >&2; exec sleep 60", "2", ["it did not end within 2 s", "    waiting"]),
        ("exec head -c 1000000000 /dev/zero", "20", ["it printed more than 1048576 bytes"]),
    ],
    ids=["fails", "prints an error", "hangs", "prints a gigabyte"],
)
def test_its_first_failure_ends_the_job_before_anything_is_started(
    launcher: Launcher, text: str, limit: str, said: list[str]
) -> None:
    done = launcher.run("-np", "1", *script(launcher, text), "--discovery-timeout", limit, "touch", "started")
    lines = [line.removeprefix("hvdgloo-run: ") for line in done.stderr.splitlines()]
    assert lines[0].startswith(f"host discovery script ./hosts.sh: {said[0]}")
    assert lines[1:] == said[1:]
    assert done.returncode == 1
    assert not (launcher.folder / "started").exists()


def test_later_the_job_goes_on_with_the_hosts_that_it_has(launcher: Launcher) -> None:
    with open(launcher.folder / "out", "wb") as out, open(launcher.folder / "err", "wb") as err:
        process = launcher.start(
            "-np", "2", *script(launcher, "echo localhost:2"), launcher.script(WORKER), stdout=out, stderr=err
        )
    output, errors = launcher.folder / "out", launcher.folder / "err"

    def say(text: str, count: int = 1) -> None:
        wait_for(lambda: errors.read_text().count(text) >= count, 30, f"{text!r}: {errors.read_text()}")

    wait_for(lambda: output.read_text().count("start") == 2, 30, "both workers")
    script(launcher, "echo 'unreachable' >&2; exit 3")
    say("it exited with status 3")
    script(launcher, "echo localhost:many")
    say("'localhost:many' is not a host")
    (launcher.folder / "hosts.sh").unlink()
    say("it cannot be executed: No such file or directory")
    script(launcher, "echo localhost:2")
    say("hosts can be discovered again")
    (launcher.folder / "over").touch()
    assert process.wait(30) == 0
    assert output.read_text().count("start") == 2, "no worker was started again"
    lines = errors.read_text().splitlines()
    assert [line for line in lines if not line.startswith("hvdgloo-run: ")] == []
    for once in ("it exited with status 3", "unreachable", "localhost:many", "No such file", "discovered again"):
        assert len([line for line in lines if once in line]) == 1, lines
    assert len([line for line in lines if "goes on with the hosts that were listed" in line]) == 3


def test_a_script_that_prints_nothing_is_waited_for(launcher: Launcher) -> None:
    done = launcher.run("-np", "1", *script(launcher, "exit 0"), "--elastic-timeout", "0.5", "touch", "started")
    assert done.returncode == 1
    assert "0 of 1 slots are available (no host is listed) after 0.5 s" in done.stderr
    assert not (launcher.folder / "started").exists()


@pytest.mark.extended
def test_ten_thousand_hosts_of_which_one_is_needed(launcher: Launcher) -> None:
    # Addresses, which no name server has to be asked for: many refuse to answer so often.
    others = [f"240.0.{number // 250}.{number % 250}:8\n" for number in range(10_000)]
    (launcher.folder / "hosts").write_text("localhost:1\n" + "".join(others))
    (launcher.folder / "over").touch()
    began = time.monotonic()
    flags = ["-np", "1", "--max-np", "1", *script(launcher, "cat hosts")]
    done = launcher.run(*flags, launcher.script(WORKER))
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:start\n"), done.stderr
    assert time.monotonic() - began < 15
