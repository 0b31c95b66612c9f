"""Machines that lack what nearly all have: IPv4, or /proc."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.launching import Launcher, in_namespace

WORKER = """
import numpy as np
import hvdgloo.numpy as hvd
hvd.init()
print("the sum is", hvd.allreduce(np.ones(1), op=hvd.Sum)[0])
"""

ONLY_IPV6 = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && ip addr add fd00::5/128 dev lo"


@pytest.mark.parametrize("flags", [(), ("--min-np", "1"), ("--page",)], ids=["fixed", "elastic", "page"])
def test_a_host_without_ipv4_reaches_itself_by_ipv6(launcher: Launcher, flags: Sequence[str]) -> None:
    script = launcher.script(WORKER)
    done = launcher.run("-np", "2", *flags, script, wrapper=in_namespace("--net", setup=ONLY_IPV6), timeout=50)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}]<stdout>:the sum is 2.0" for rank in range(2)]
    assert ("the job's page is at http://[::1]:" in done.stderr) == (flags == ("--page",))


@pytest.mark.parametrize("flags", [("-np", "1"), ("-np", "1", "--min-np", "1"), ("doctor",)], ids=" ".join)
def test_a_host_without_proc_is_refused_in_a_sentence(launcher: Launcher, flags: Sequence[str]) -> None:
    script = launcher.script(WORKER)
    done = launcher.run(*flags, script, wrapper=in_namespace("--mount", setup="mount -t tmpfs none /proc"))
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert "there is no /proc, without which what a job leaves behind cannot be found" in said
    assert "mount it (mount -t proc proc /proc)" in said
    assert "Traceback" not in said
