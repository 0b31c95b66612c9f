"""Agents that come by themselves: brought by a Spark task, a Ray actor, or any process that another system has started.

Elsewhere the launcher starts a command on each host, whose standard streams lead to an agent. Here the launcher listens
and the agents connect. What follows is the same: frames, supervision, the end of everything when the stream ends.

- ``task``: called in the other system's process. ``agent`` is the process that it starts.
- ``listener``: the launcher's listener. ``hello`` has the first messages, after the handshake.
- ``sealed``: frames with a tag, from which the secret is left out.
- ``job``: calls a function on the agents that have connected.
"""
