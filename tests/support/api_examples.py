"""The examples of the API pages as programs: two ranks run them one after another, and rank 0 compares what each prints
with its comments. docs/generate_api.py tells how they are written.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
from collections.abc import Mapping
from pathlib import Path

from tests.support.launching import launcher_in
from tests.support.pages import ROOT, generator

ALONE = frozenset({"run"})
"""Front-ends whose examples start workers themselves."""


def run(front_end: str, folder: Path, python: str, env: Mapping[str, str] | None = None, timeout: float = 90.0) -> None:
    """Run a front-end's examples.

    Args:
        front_end: the name of their file.
        folder: an empty one, in which they may write.
        python: the interpreter for them.
        env: variables to add to the environment.

    Raises:
        AssertionError: an example fails, or rank 0 prints something else than its comments say.
    """
    lines = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nfrom tests.support.api_examples import follow\n"
    with launcher_in(folder) as launcher:
        program = launcher.script(f"{lines}follow({front_end!r})\n")
        arguments = ("-np", "1" if front_end in ALONE else "2", python, program)
        done = launcher.run(*arguments, env={"OMP_NUM_THREADS": "1", **(env or {})}, timeout=timeout)
    assert done.returncode == 0, done.stderr


def follow(front_end: str) -> None:
    """Run the examples in this process, which is a rank."""
    examples = generator("api").Examples(front_end)
    for program in dict.fromkeys(examples.by_name.values()):
        name = next(name for name, each in examples.by_name.items() if each == program)
        _follow(f"<{name}>", f"{examples.preamble}\n{program}\n")


def _follow(name: str, program: str) -> None:
    linecache.cache[name] = (len(program), None, program.splitlines(keepends=True), name)  # for TensorFlow's AutoGraph
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(program, name, "exec"), {"__name__": "__main__"})
    except Exception as error:
        raise AssertionError(f"the example of {name} fails: {error!r}") from error
    told = [line.partition(")  # ")[2] for line in re.findall(r"^ *print\(.*", program, re.MULTILINE)]
    if os.environ["HVDGLOO_RANK"] == "0" and said.getvalue().splitlines() != told:
        raise AssertionError(f"the example of {name} prints\n{said.getvalue()}instead of {told}")
