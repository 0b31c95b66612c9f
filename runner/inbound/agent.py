"""The process that a task starts: an agent (``hvdgloo.runner.agent``) whose stream is a connection to the launcher.

Its standard input is a pipe from the task. A line comes, which is a ``Bootstrap``, and nothing after it: the end of the
pipe is the end of the task, with which the agent ends. On Linux a signal tells it, too: a process that the task has
forked might keep the pipe open.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import NoReturn

from hvdgloo._net.frame_mac import FrameMac
from hvdgloo.errors import LaunchError
from hvdgloo.runner.agent.agent import TASK_ENDED, Agent, ended, watched
from hvdgloo.runner.agent.watchdog import Mark
from hvdgloo.runner.inbound.hello import Bootstrap, read_bootstrap
from hvdgloo.runner.inbound.sealed import SealedChannel
from hvdgloo.runner.processes import reaper

_LIFELINE = 0


def main() -> NoReturn:
    """Be the agent until the job is over, or the task is."""
    sys.stderr.flush()
    os._exit(_run())  # the forked agent shares this stack frame, and neither has anything to clean up


def _run() -> int:
    bootstrap = read_bootstrap(_read_line())
    reaper.die_with_parent(signal.SIGTERM)
    if os.getppid() != bootstrap.task:
        return 1  # the task has ended before that took effect
    os.dup2(2, 1)

    def serve(mark: Mark) -> None:
        _await_beginning(bootstrap)
        sock = bootstrap.socket
        sending, receiving = FrameMac(*bootstrap.sending), FrameMac(*bootstrap.receiving)
        channel = SealedChannel(sock, os.dup(sock), sending=sending, receiving=receiving, secret=bootstrap.secret)
        Agent(channel, mark, dict(bootstrap.environ), _LIFELINE).run()

    return watched(serve)


def _read_line() -> bytes:
    """Read the line, after which nothing comes."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(_LIFELINE, 64 * 1024)
        if not piece:
            raise LaunchError(TASK_ENDED)
        line += piece
    return line


def _await_beginning(bootstrap: Bootstrap) -> None:
    """Wait until the launcher has something to say: until then it may wait for other tasks, for any time.

    Raises:
        LaunchError: the task ends first.
    """
    poll = select.poll()
    poll.register(bootstrap.socket, select.POLLIN)
    poll.register(_LIFELINE, select.POLLIN)
    ready = dict(poll.poll())
    if bootstrap.socket not in ready and ended(_LIFELINE):
        raise LaunchError(TASK_ENDED)
