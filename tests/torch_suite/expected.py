"""The cases of torch's that are expected to fail, and why.

docs/torch-distributed.md has the same table. A failure for another reason, or a success, is an error of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

HVDGLOO, AS_GLOO, GLOO = "hvdgloo", "as-gloo", "gloo"
"""The ways: ``init_process_group("hvdgloo")``, ``"gloo"`` under HVDGLOO_AS_GLOO=1, and torch's own gloo."""


@dataclass(frozen=True)
class Expected:
    """Cases that fail for the same reason.

    Attributes:
        ways: those in which they fail.
        cases: their names.
        error: a regular expression that the failure's text must match.
        reason: plain Markdown, for the documentation.
    """

    ways: tuple[str, ...]
    cases: tuple[str, ...]
    error: str
    reason: str


EXPECTED: tuple[Expected, ...] = (
    Expected(
        (HVDGLOO,),
        (
            "test_monitored_barrier_failure_order",
            "test_monitored_barrier_gloo",
            "test_monitored_barrier_gloo_subgroup",
            "test_monitored_barrier_wait_all_ranks",
        ),
        r"monitored_barrier is only implemented for GLOO backend",
        "torch refuses `monitored_barrier` unless the group is called gloo",
    ),
    Expected(
        (AS_GLOO,),
        ("test_ddp_logging_data_cpu",),
        r"'hvdgloo' != 'gloo'",
        "DDP's log names the backend that carries out the operations",
    ),
    Expected(
        (HVDGLOO, AS_GLOO),
        ("test_sparse_all_reduce_sum",),
        r"takes no torch\.sparse_coo tensors",
        "hvdgloo takes dense tensors only, and says so",
    ),
    Expected(
        (GLOO,),
        ("test_all_to_all", "test_all_to_all_complex", "test_all_to_all_full_group", "test_all_to_all_group"),
        r"ProcessGroupGloo::alltoall: invalid tensor size",
        "gloo's `all_to_all` requires tensors of one size; torch runs these tests with MPI only, and here with hvdgloo",
    ),
)


def table() -> str:
    """Return the rows of the table in docs/torch-distributed.md."""
    names = {HVDGLOO: "hvdgloo", AS_GLOO: "HVDGLOO_AS_GLOO=1", GLOO: "gloo"}
    return "\n".join(
        f"| {', '.join(f'`{case}`' for case in each.cases)} | {', '.join(names[way] for way in each.ways)} "
        f"| {each.reason} |"
        for each in EXPECTED
    )
