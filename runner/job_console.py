"""The console of a job: opened with its options, and prepared for its workers' output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvdgloo._net.descriptors import reserve_descriptors
from hvdgloo.runner.console.console import Console
from hvdgloo.runner.job.spec import LaunchSpec
from hvdgloo.runner.surroundings import Surroundings

_LAST_WORDS = 0.5  # seconds that a blocked terminal may delay the end


@contextmanager
def open_console(
    spec: LaunchSpec, around: Surroundings, rank_of: Callable[[int], int] = lambda number: number
) -> Iterator[Console]:
    """Open the console of a job for a while; ``rank_of`` is as for ``Console``."""
    console = Console(
        stdout=around.stdout,
        stderr=around.stderr,
        options=spec.output,
        interactive=spec.stdin_rank,
        quiet=around.quiet,
        news=around.news,
        rank_of=rank_of,
    )
    try:
        yield console
    finally:
        # Also if an error ends the job: first the start-up view is removed, and notices are shown.
        console.wait_until_written(_LAST_WORDS)
        console.close()


def expect(console: Console, spec: LaunchSpec, np: int, *, again: bool = False) -> None:
    """Prepare for the output of ``np`` workers; ``again`` if they were started before."""
    if spec.output.directory is not None:
        reserve_descriptors(2 * np, "this launcher", f"the output files of {np} workers")
    console.expect(np, again=again)
