"""Tutorials as their readers follow them: programs are saved as they are shown, commands are run, outputs compared.

In a page a program comes after its file's name, as in "`train.py`:". Blocks without a language that begin with ``$``
are a terminal's: commands, each with what it prints below it, where ``...`` stands for the rest of a line.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.launching import clean_environment, run_command
from tests.support.pages import ROOT


def sections(page: str) -> dict[str, frozenset[str]]:
    """Return the titles of a page's sections with programs, each with the packages that these import."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = {}
    for section in text.split("\n## ")[1:]:
        programs = "".join(re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
        if programs:
            imports = re.findall(r"^\s*(?:import|from) (\w+)", programs, re.MULTILINE)
            found[section.partition("\n")[0]] = frozenset(imports)
    return found


@dataclass(frozen=True)
class File:
    """A program to be saved."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command, and what it prints on stdout."""

    line: str
    prints: str


def steps(text: str) -> Iterator[File | Command]:
    """Return the steps that a page tells its readers to take, in order."""
    for block in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        language, shown = block.groups()
        if language == "python":
            named = re.search(r"`([\w.]+)`:\n\n$", text[: block.start()])
            assert named, f"a program without the name of its file, so it cannot be run:\n{shown}"
            yield File(named[1], shown)
        elif shown.startswith("$ "):
            for command in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE):
                yield Command(*command.groups())


def follow(
    page: str,
    folder: Path,
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
    elsewhere: frozenset[str] = frozenset(),
    section: str = "",
) -> None:
    """Do all that a page says, in a folder.

    Args:
        page: its path from the repository's root.
        folder: an empty one.
        python: the interpreter for the page's programs.
        env: variables to add to the environment.
        elsewhere: programs that no command of the page runs, but another test does.
        section: title of the only section to follow; empty for the whole page.

    Raises:
        AssertionError: a command fails, prints something else than the page says, or there is a program that no command
            runs.
    """
    unused = set()
    text = (ROOT / page).read_text(encoding="utf-8")
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        assert text, f"{page} has no section {section}"
    for step in steps(text):
        if isinstance(step, File):
            (folder / step.name).write_text(step.text)
            unused.add(step.name)
        else:
            _run(step, folder, python, env or {})
            unused -= set(shlex.split(step.line))
    assert unused == elsewhere, f"programs that no command runs: {unused}"


def _run(step: Command, folder: Path, python: str, env: Mapping[str, str]) -> None:
    program, *arguments = shlex.split(step.line)
    if program == "hvdgloo-run":
        first = next(number for number, argument in enumerate(arguments) if argument.endswith(".py"))
        if "--as-gloo" in arguments:  # takes effect as torch is imported, which a warm interpreter has done already
            python = sys.executable
        command = [sys.executable, "-m", "hvdgloo.runner", *arguments[:first], python, *arguments[first:]]
    elif program == "torchrun":
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    else:
        assert program == "python", f"only python, torchrun and hvdgloo-run are run here: {step.line}"
        command = [python, *arguments]
    environment = {**clean_environment(), "OMP_NUM_THREADS": "1", "PYTHON_EXEC": python, **env}  # torchrun's
    done = run_command(command, cwd=folder, env=environment, timeout=100)
    assert done.returncode == 0, f"{step.line}\n{done.stdout}{done.stderr}"
    pattern = re.escape(step.prints).replace(re.escape("..."), r"[^\n]*")
    assert re.fullmatch(pattern, done.stdout), f"$ {step.line}\n{done.stdout}instead of\n{step.prints}{done.stderr}"
