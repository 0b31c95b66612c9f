"""Run torch's own tests of torch.distributed: ``python -m tests.torch_suite [WAY ...]``.

``make test-torch-distributed`` does so with ``init_process_group("hvdgloo")``, and with ``"gloo"`` under
HVDGLOO_AS_GLOO=1; ``gloo`` is torch's own, for comparison. The exit status is 0 if the cases that ``expected.py`` lists
have failed, and no others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter

from tests.support.launching import clean_environment
from tests.support.pages import ROOT
from tests.torch_suite.expected import AS_GLOO, EXPECTED, GLOO, HVDGLOO, Expected
from tests.torch_suite.outcome import FAILED, PASSED, SKIPPED, Outcome

WAYS = {HVDGLOO: ("hvdgloo", {}), AS_GLOO: ("gloo", {"HVDGLOO_AS_GLOO": "1"}), GLOO: ("gloo", {})}
"""The backend's name for torch, and the variables, of each way."""

LIMIT_S = 60
"""Seconds after which torch says where a case's ranks are, and gives the case up."""


def run(way: str, names: list[str], jobs: int, verbose: bool) -> list[Outcome]:
    """Run cases in one way, and print those that do not end as expected.

    Raises:
        SystemExit: torch's cases could not be run.
    """
    backend, variables = WAYS[way]
    environment = {
        **clean_environment(),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT_S),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    command = [sys.executable, "-m", "tests.torch_suite.cases", "--jobs", str(jobs), backend, *names]
    outcomes = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            outcome = Outcome(**json.loads(line))
            outcomes.append(outcome)
            error = unexpected(way, outcome)
            if error or verbose:
                print(
                    f"{way}: {outcome.name}, {outcome.ranks} ranks: {outcome.result}, {outcome.seconds:.1f} s",
                    flush=True,
                )
            if error:
                print(error, flush=True)
    if process.returncode:
        raise SystemExit(f"{way}: {' '.join(command)} ended with status {process.returncode}")
    return outcomes


def expectation(way: str, name: str) -> Expected | None:
    """Return why a case fails; None if it should not."""
    found = [each for each in EXPECTED if way in each.ways and name in each.cases]
    assert len(found) < 2, f"{name} is expected to fail for two reasons"
    return found[0] if found else None


def unexpected(way: str, outcome: Outcome) -> str:
    """Return how an outcome differs from what is expected; nothing if it does not."""
    expected = expectation(way, outcome.name)
    if expected is None:
        return outcome.text if outcome.result == FAILED else ""
    if outcome.result != FAILED:
        return f"It is expected to fail ({expected.reason}). Remove it from tests/torch_suite/expected.py"
    if not re.search(expected.error, outcome.text):
        return f"It is expected to fail with {expected.error!r}, but failed with:\n{outcome.text}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"{', '.join(WAYS)}; without, {HVDGLOO} and {AS_GLOO}")
    parser.add_argument("--cases", nargs="+", default=[], metavar="CASE", help="without, all")
    parser.add_argument("--jobs", type=int, default=2 * (os.cpu_count() or 1), help="cases at a time")
    parser.add_argument("--verbose", action="store_true", help="print each case")
    arguments = parser.parse_args()
    ways = arguments.ways or [HVDGLOO, AS_GLOO]
    if not set(ways) <= set(WAYS):
        parser.error(f"a way is one of {', '.join(WAYS)}")
    errors = 0
    for way in ways:
        began = time.monotonic()
        outcomes = run(way, arguments.cases, arguments.jobs, arguments.verbose)
        counts = Counter(outcome.result for outcome in outcomes)
        wrong = sum(bool(unexpected(way, outcome)) for outcome in outcomes)
        if not arguments.cases:
            ran = {outcome.name for outcome in outcomes}
            for name in sorted({name for each in EXPECTED if way in each.ways for name in each.cases} - ran):
                print(f"{way}: torch has no {name}, which tests/torch_suite/expected.py expects to fail")
                wrong += 1
        errors += wrong
        print(
            f"{way}: {counts[PASSED]} passed, {counts[FAILED]} failed, {counts[SKIPPED]} skipped by torch; "
            f"{wrong} not as expected; {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
