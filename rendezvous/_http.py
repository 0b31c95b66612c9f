"""Rules for unambiguous HTTP messages, shared by the server's reader of requests and the client's of answers."""

from __future__ import annotations

import re

from hvdgloo.rendezvous._auth import ANSWER_HEADER

ONCE = frozenset({"authorization", "content-length", "host", "transfer-encoding", ANSWER_HEADER.lower()})
"""Headers, in lower case, that must not have a second value. They tell who sends a message and where it ends, and
another reader on the way might choose the other value."""

LENGTH = re.compile(r"0|[1-9][0-9]{0,17}")
"""A Content-Length: Python's own integers have more spellings than HTTP."""

NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header's name, with nothing between it and its colon: a reader that ignored a space there would read a different
message than one that does not."""
