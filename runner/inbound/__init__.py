"""Agents that come by themselves: brought by a Spark task, a Ray actor, or any process that another system has started.

Elsewhere the launcher starts a command on each host, whose standard streams lead to an agent. Here it listens, and the
agents connect. What follows is the same: frames, supervision, the end of everything when the stream ends.

- ``task``: what the other system's process calls. ``agent`` is the process that it starts.
- ``reception``: the launcher's listener. ``meeting`` is what both say until each knows that the other has the secret.
- ``sealed``: frames with a tag, from which the secret is left out.
- ``job``: a function on the agents that have come.
"""
