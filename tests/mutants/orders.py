"""Faults that are made and not written down: each wait, each keep-alive on the way of a GPU's tensors, left out once.

What a stream waits for, and what is kept until an event has happened, is invisible in results on most machines, most of
the time. So every such call in the library is found by its name, and each is replaced by ``pass`` in turn;
``python -m tests.mutants gpu-order`` shows that a test on simulated GPUs fails of each.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.mutants.patches import ROOT, Hunk, Mutant

ORDERS = {
    "hvdgloo/_backends/cuda.py": {"gpu.settle", "self._settle"},
    "hvdgloo/_backends/nccl.py": {"gpu.wait", "work.wait"},
    "hvdgloo/_engine/executor.py": {"self._fence", "fence", "_kept.extend"},
    "hvdgloo/_engine/handle.py": {"self.follow"},
    "hvdgloo/_training/reducer.py": {"self._gathered"},
    "hvdgloo/torch/_adapter.py": {"gpu.wait", "gpu.used_here"},
    "hvdgloo/torch/_session.py": {"gpu.wait_for"},
    "hvdgloo/torch/elastic/_behind.py": {"gpu.wait", "gpu.settle"},
}
"""By module: calls, as the code writes them, whose only effect is an order or a longer life."""

CONDITIONS = {
    "hvdgloo/_backends/nccl.py": {"gpu.has_happened": "True"},
    "hvdgloo/_engine/executor.py": {"Several": "transfer.work", "plane.memory.mark": "Done()"},
}
"""Calls whose answer is an order, and the answer that forgets it."""

ASSIGNED = {"hvdgloo/_engine/executor.py": {"follow"}}
"""Attributes that are an order to come."""

CAUGHT_BY = (
    "tests/contract/test_gpus_simulated.py",
    "tests/contract/test_gpus_training.py",
    "tests/contract/test_gpus_schedules.py",
    "tests/contract/test_nccl.py",
    "tests/unit/torch/elastic/test_behind.py",
)


def everything() -> list[Mutant]:
    """One fault for each call, by its place."""
    return [mutant for path in sorted(ORDERS.keys() | CONDITIONS.keys()) for mutant in _of(path)]


def _of(path: str) -> Iterator[Mutant]:
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.split("\n")
    orders, conditions = ORDERS.get(path, set()), CONDITIONS.get(path, {})
    counts: dict[str, int] = {}
    for node in ast.walk(ast.parse(text)):
        call = node.value if isinstance(node, ast.Expr) else node
        if isinstance(node, ast.Assign) and _attribute(node) in ASSIGNED.get(path, set()):
            call, name = node, _attribute(node)
            new, what = [" " * node.col_offset + "pass"], f"{name} is not set"
        elif not isinstance(call, ast.Call):
            continue
        elif isinstance(node, ast.Expr) and (name := ast.unparse(call.func)) in orders:
            indent = " " * node.col_offset
            new, what = [f"{indent}pass"], f"{name}() is left out"
        elif not isinstance(node, ast.Expr) and (name := ast.unparse(call.func)) in conditions:
            assert call.lineno == call.end_lineno
            line = lines[call.lineno - 1]
            new = [line[: call.col_offset] + conditions[name] + line[call.end_col_offset :]]
            what = f"{name}() always says {conditions[name]}"
        else:
            continue
        label = name.rpartition(".")[2].strip("_").replace("_", "-").lower()
        counts[label] = counts.get(label, 0) + 1
        stem = path.rpartition("/")[2].removesuffix(".py").strip("_")
        yield Mutant(
            f"gpu-order-{stem}-{label}-{counts[label]}",
            f"{path}: {what}: something is read or written too early, or freed while it is in use.",
            "GPUs: order",
            CAUGHT_BY,
            "",
            {path: (_hunk(lines, call.lineno - 1, call.end_lineno or call.lineno, new),)},
        )


def _attribute(assignment: ast.Assign) -> str:
    """The attribute that is set; empty if it is none."""
    (target, *_) = assignment.targets
    return target.attr if isinstance(target, ast.Attribute) else ""


def _hunk(lines: Sequence[str], begin: int, end: int, new: Sequence[str]) -> Hunk:
    """The change with as much before it as makes its place the only one."""
    first = begin
    while first > 0 and _places(lines, lines[first:end]) > 1:
        first -= 1
    return Hunk(tuple(lines[first:end]), (*lines[first:begin], *new))


def _places(lines: Sequence[str], wanted: Sequence[str]) -> int:
    return sum(lines[at : at + len(wanted)] == list(wanted) for at in range(len(lines) - len(wanted) + 1))
