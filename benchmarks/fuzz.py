"""Malformed inputs for everything that reads what others have written, for as long as you like.

    python benchmarks/fuzz.py [--seconds 60] [--target NAME ...] [--seed N] [--only NUMBER]

Requests to the rendezvous service, frames between launcher and agents, control messages, probes, host files, YAML,
command lines and environments (``tests/support/fuzzing.py``). The time is divided among them. Prints how many inputs
each has read; at the first one that does harm, that input and the command by which it is read again, and ends with
status 1.
"""

from __future__ import annotations

import argparse
import itertools
import secrets
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.fuzzing import TARGETS, Harmful, fuzz


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Feed odd inputs to everything that reads.")
    parser.add_argument("--seconds", type=float, default=60.0, help="for all of them together (default: 60)")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, help="of an earlier run, whose inputs are to be read again")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="only this input")
    given = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    names = given.target or list(TARGETS)
    print(f"seed {seed}", flush=True)
    for name in names:
        until = time.monotonic() + given.seconds / len(names)
        try:
            if given.only is not None:
                read = fuzz(name, seed, [given.only])
            else:
                read = fuzz(name, seed, itertools.count(), until)
        except Harmful as found:
            traceback.print_exception(found.__cause__)
            print(found, flush=True)
            return 1
        print(f"{name:12} {read:,} inputs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
