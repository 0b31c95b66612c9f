"""An elastic job to watch: one of its two processes is killed while it trains, then two more may join.

    python examples/demo_elastic.py

It starts torch_digits_elastic.py, or another such program, with hvdgloo-run. A script lists the hosts: this machine, at
first with two slots, later with four.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

TRAINING = Path(__file__).with_name("torch_digits_elastic.py")


def say(text: str) -> None:
    print(f">>> {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a process of an elastic job, and let two more join.")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs the training")
    parser.add_argument("--training", type=Path, default=TRAINING, help="the training program")
    parser.add_argument("--epochs", default="60", help="number of epochs; enough for the others to join")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        listed, script = Path(folder, "hosts"), Path(folder, "discover")
        listed.write_text("localhost:2\n")
        script.write_text(f"#!/bin/sh\ncat {listed}\n")
        script.chmod(0o755)
        flags = ["-np", "2", "--min-np", "1", "--failures-per-host", "99", "--host-discovery-script", str(script)]
        command = [sys.executable, "-m", "hvdgloo.runner", *flags, "--", args.python, str(args.training)]
        say(f"hvdgloo-run {' '.join(flags)} {args.training.name}")
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        with subprocess.Popen(
            [*command, "--epochs", args.epochs],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        ) as job:
            assert job.stdout is not None
            killed, added = 0, False
            for line in job.stdout:
                print(line, end="", flush=True)
                found = re.search(r"epoch (\d+)/\d+ on \d+ ranks?, the first is process (\d+)", line)
                if found is None:
                    continue
                epoch, first = int(found[1]), int(found[2])
                if not killed and epoch >= 3:
                    killed = first
                    say(f"killing process {first}, which is rank 0")
                    os.kill(first, signal.SIGKILL)
                elif killed and not added and first != killed:
                    added = True
                    say("the list of hosts now says localhost:4")
                    replaced = listed.with_suffix(".new")
                    replaced.write_text("localhost:4\n")
                    replaced.replace(listed)
            return job.wait()


if __name__ == "__main__":
    sys.exit(main())
