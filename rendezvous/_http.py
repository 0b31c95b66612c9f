"""What both readers of HTTP, the server's of requests and the client's of answers, hold to be one clear message."""

from __future__ import annotations

import re

from hvdgloo.rendezvous._auth import ANSWER_HEADER

ONCE = frozenset({"authorization", "content-length", "host", "transfer-encoding", ANSWER_HEADER.lower()})
"""Headers, in lower case, that must not have a second value. They say who speaks and where a message ends, and another
reader on the way might choose the other value."""

LENGTH = re.compile(r"0|[1-9][0-9]{0,17}")
"""A Content-Length: Python's own integers have more spellings than HTTP."""

NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A header's name, with nothing between it and its colon: who ignores a space there reads another message than who
does not."""
