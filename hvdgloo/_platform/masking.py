"""Command lines without what looks like a secret in them, for pages, reports and lists that others may see. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from hvdgloo._platform.spelling import encodable

MASK = "***"

# What a password or key is called. Such a word ends a name: ``--max-token-length 128`` is no secret, nor is a
# ``--token-file``. In ``--hfToken`` it begins with a capital letter.
_CALLED = re.compile(
    r"(?i:password|passwd|passphrase|apikey)$"
    r"|(?:^|[-_.+])(?i:pass|pwd|secret|token|credentials?|(?:api|access|account|private|secret|signing)[-_.]key)$"
    r"|[a-z\d](?:Secret|Token|(?:Api|Access|Secret|Private)Key)$"
)
_NAME = r"[\w.+][\w.+-]{0,79}"
_WHOLE = re.compile(rf"(-*(?P<name>{_NAME})=).+", re.DOTALL)
_FLAG = re.compile(rf"--?(?P<name>{_NAME})")
# ``password='x'`` and ``"token": "x"`` within a longer text, and ``--password x`` there.
_SETTING = re.compile(rf"(?<![\w.+-])(?P<dashes>-*)(?P<name>{_NAME})(?P<between>[\"']?\s*[=:]\s*|\s+)")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s\"'&,;)}\]]+")
_SECRETS = [
    re.compile(r"((?<![\w+.-])[\w+.-]{1,20}://[^\s/:@]{0,80}:)[^\s/@]+(?=@)"),  # scheme://user:password@host
    re.compile(r"([?&](?i:sig|signature|key|x-amz-signature|x-amz-security-token)=)[^&#\s]+"),
    re.compile(r"(\b(?i:bearer|authorization\s*:\s*basic)\s+)[^\s\"']+"),
    # Tokens of Hugging Face, GitHub, GitLab, OpenAI and Slack.
    re.compile(r"()\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-)[\w-]{16,}"),
]


def shown(words: Iterable[str]) -> str:
    """Return a command line as others may see it: without secrets, and in text that any encoder takes."""
    return encodable(shlex.join(masked(words)))


def masked(words: Iterable[str]) -> list[str]:
    """Return a command line's words with ``***`` in the place of values that look like secrets.

    These are recognized by the names that they are given to, in flags (``--password x``), settings (``db.token=x``) and
    text of any kind; by being the password in a URL; and by the form that well-known services give to theirs.
    """
    kept: list[str] = []
    follows = False
    for word in words:
        kept.append(MASK if follows and not word.startswith("--") else _masked(word))
        follows = _names_a_secret(_FLAG.fullmatch(word))
    return kept


def _masked(word: str) -> str:
    whole = _WHOLE.fullmatch(word)
    if whole is not None and _names_a_secret(whole):
        return whole[1] + MASK
    pieces, done = [], 0
    for found in _SETTING.finditer(word):
        if found.start() < done or not _names_a_secret(found):
            continue
        value = _VALUE.match(word, found.end())
        beside = found["between"].isspace()
        if value is None or (beside and (not found["dashes"] or value[0].startswith("-"))):
            continue
        pieces += [word[done : found.end()], MASK]
        done = value.end()
    word = "".join([*pieces, word[done:]])
    for pattern in _SECRETS:
        word = pattern.sub(rf"\g<1>{MASK}", word)
    return word


def _names_a_secret(found: re.Match[str] | None) -> bool:
    return found is not None and _CALLED.search(found["name"]) is not None
