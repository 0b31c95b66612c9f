"""Tutorials are followed to the letter: what would be overlooked otherwise is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tutorials
from tests.support.pages import ROOT

PAGE = """
`one.py`:

```python
import sys
print("one", sys.argv[1])
print("time", 1.25)
```

Then

```
$ python one.py a
one a
time ...
$ python one.py "b c"
one b c
time 1...
```

and a block that is no terminal:

```
pip install something
```
"""


def follow(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "page.md").write_text(text)
    monkeypatch.setattr(tutorials, "ROOT", folder)
    tutorials.follow("page.md", folder)


def test_files_and_commands_are_found_in_order() -> None:
    program = 'import sys\nprint("one", sys.argv[1])\nprint("time", 1.25)\n'
    assert list(tutorials.steps(PAGE)) == [
        tutorials.File("one.py", program),
        tutorials.Command("python one.py a", "one a\ntime ...\n"),
        tutorials.Command('python one.py "b c"', "one b c\ntime 1...\n"),
    ]


def test_a_page_that_is_right_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follow(PAGE, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("one b c\n", "one b\n", "instead of"),
        ("time 1...", "time 2...", "instead of"),
        ('print("time", 1.25)', "sys.exit(3)", "python one.py a"),
        ("`one.py`:", "`two.py`:", "python one.py a"),
        ("`one.py`:", "A program:", "without the name of its file"),
        ("$ python one.py", "$ sh one.py", "only python, torchrun and hvdgloo-run"),
        ("$ ", "", "programs that no command runs"),
    ],
)
def test_a_page_that_is_wrong_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str, message: str
) -> None:
    assert right in PAGE
    with pytest.raises(AssertionError, match=message):
        follow(PAGE.replace(right, wrong), tmp_path, monkeypatch)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("tutorial-*.md")), ids=lambda page: page.stem)
def test_every_tutorial_is_followed_by_a_test(page: Path) -> None:
    """The frameworks' tutorials are tried in the frameworks' own environments."""
    followed = f'follow("docs/{page.name}"'
    tests = ("processes/test_tutorials.py", "tensorflow/test_docs.py", "mxnet/test_docs.py", "jax/test_programs.py")
    assert sum((ROOT / "tests" / test).read_text(encoding="utf-8").count(followed) for test in tests) == 1
