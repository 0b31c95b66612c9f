"""English that is read once: how docstrings begin, and words that docstrings, comments and messages avoid.

The rules hold for every Python file of the project but for this one, which must name the words.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.architecture.source import ROOT, Module, everything, nodes, parse

_RELATIVE = re.compile(r"\s*(What|Where|Who|Why|How|Whether|Which|When)\b")
_REMEDY = "begin a function's docstring with a verb, any other with a noun ('Return whether ...', 'True if ...')"

WORDS = {
    r"nobody|somebody|anybody|everybody": "name the subject: 'no rank', 'another process', 'every caller'",
    r"whoever": "'the rank that', 'a caller that'",
    r"that of|those of": "repeat the noun, or put it in the genitive: 'rank 3's shape'",
    r"(?:has|have) come": "the simple past of what happened: 'arrived', 'connected', 'received'",
    r"anew": "'again'",
    r"in vain": "'without success', or what failed",
    r"bury|buries|buried": "'record the end of', 'remove'",
    r"crew|roster|inquest|premises": "'pool', 'assignment', 'failure attribution', 'host profile'",
}
"""Words that only a translator needs here, as regular expressions, each with what to write instead."""

_WORDS = {re.compile(rf"\b(?:{words})\b".replace(" ", r"\s+"), re.IGNORECASE): rest for words, rest in WORDS.items()}
_IN_SOURCE = {  # where quotes, prefixes and comment signs can stand between two words
    words: re.compile(words.pattern.replace(r"\s+", r"[\Wf]+"), re.IGNORECASE) for words in _WORDS
}


_NOT_CHECKED = {
    "CHANGELOG.md",
    "changelog.md",
    "configuration.md",
}
"""Pages of the past, and pages that are generated from docstrings and declarations."""


def faults(module: Module) -> list[str]:
    """List the places in a module that break a rule, each with what to write instead."""
    found = [
        f"{module.place}:{line}: a docstring begins with {match[1]!r}: {_REMEDY}"
        for line, text in _docstrings(module)
        if (match := _RELATIVE.match(text))
    ]
    wanted = {words: remedy for words, remedy in _WORDS.items() if _IN_SOURCE[words].search(module.text)}
    if wanted:  # seldom: comments take long to find
        for line, text in (*_strings(module), *_comments(module)):
            for words, remedy in wanted.items():
                found += [
                    f"{module.place}:{line + text.count(chr(10), 0, match.start())}: {match[0]!r}: write {remedy}"
                    for match in words.finditer(text)
                ]
    return found


def _docstrings(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the strings that stand as statements: docstrings, including the attributes'."""
    for node in nodes(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def _strings(module: Module) -> Iterator[tuple[int, str]]:
    for node in nodes(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def _comments(module: Module) -> Iterator[tuple[int, str]]:
    """Yield each comment; consecutive lines are one text."""
    first, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] != first + len(lines):
                yield first, "\n".join(lines)
                lines = []
            first = first if lines else token.start[0]
            lines.append(token.string.lstrip("#"))
    if lines:
        yield first, "\n".join(lines)


def faults_of_page(place: str, text: str) -> list[str]:
    """List the words in a page that are to be avoided, each with what to write instead; wrapped lines count as one."""
    return [
        f"{place}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}: write {remedy}"
        for words, remedy in _WORDS.items()
        for match in words.finditer(text)
    ]


def test_source_avoids_the_words() -> None:
    found = [fault for module in everything() if module.name != __name__ for fault in faults(module)]
    assert found == [], "\n" + "\n".join(found)


def test_pages_avoid_the_words_too() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tests/README.md"]
    written = [page for page in pages if page.name not in _NOT_CHECKED and not page.name.startswith("api")]
    assert len(written) > 20
    found = [fault for page in written for fault in faults_of_page(page.name, page.read_text(encoding="utf-8"))]
    assert found == [], "\n" + "\n".join(found)


def test_a_word_in_a_page_is_refused() -> None:
    [fault] = faults_of_page("page.md", "# Title\n\nNames are those\nof Horovod.\n")
    assert fault.startswith("page.md:3: ")


@pytest.mark.parametrize("word", ["What", "Where", "Who", "Why", "How", "Whether", "Which", "When"])
@pytest.mark.parametrize(
    "text",
    [
        '"""{} it is."""',
        'class A:\n    """\n    {} it is."""',
        'async def f(self):\n    """{}."""',
        'x = 3\n"""{} x is."""',
        'class A:\n    x: int\n    """{}, in bytes."""',
    ],
)
def test_a_docstring_that_begins_with_a_relative_word_is_refused(text: str, word: str) -> None:
    [fault] = faults(parse("hvdgloo.x", text.format(word)))
    assert f"begins with '{word}'" in fault


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 3  # Nobody knows", 1),
        ("x = 3\n# as those\n# of others are\n", 2),
        ('def f():\n    """Return it.\n\n    It has come\n    back."""\n', 4),
        ("raise ValueError(f'rank {rank} asked in vain')", 1),
        ("raise ValueError('a rank that'\n    ' of')", 1),
    ],
)
def test_a_word_that_is_avoided_is_refused(text: str, line: int) -> None:
    [fault] = faults(parse("hvdgloo.x", text))
    assert fault.startswith(f"example.py:{line}: ")


@pytest.mark.parametrize(
    "text",
    [
        '"""Whatever it is, whereof it is."""',
        'def f():\n    """Return whether it is."""\n    return "What is it"',
        "# 1. that\n\n# 2. of",
        "nobody = somebody",
    ],
)
def test_other_text_is_allowed(text: str) -> None:
    assert faults(parse("hvdgloo.x", text)) == []
