"""torchrun's flags: what they mean here, or what there is instead."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence

import pytest

from hvdgloo.errors import ConfigError
from hvdgloo.runner.cli import torchrun
from hvdgloo.runner.cli.flags import build_parser
from hvdgloo.runner.cli.main import command_line, split_all
from hvdgloo.runner.job.spec import HostEntry, LaunchSpec

TORCHRUN_FLAGS = """
--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --max-restarts
--monitor-interval --start-method --event-log-handler --role -m --module --no-python --run-path --log-dir -r --redirects
-t --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr
--master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout --virtual-local-rank
"""
SWITCHES = {"--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank"}


def spec_of(argv: Sequence[str]) -> LaunchSpec:
    parser = build_parser()
    flags, command, _ = split_all(argv, parser.values)
    return command_line(parser, parser.given(flags), command).spec


@pytest.mark.parametrize("flag", TORCHRUN_FLAGS.split())
def test_every_flag_of_torchrun_is_known_in_both_spellings(flag: str) -> None:
    """A refusal is about the flag, and not about a file that its value would be taken for."""
    for spelling in {flag, flag[:2] + flag[2:].replace("-", "_")} - {"-m"}:
        assert build_parser().values[spelling] == (0 if flag in SWITCHES else 1)


@pytest.mark.parametrize("flag", sorted({**torchrun._REFUSED, **torchrun._REFUSED_SWITCHES}))
def test_what_there_is_none_of_names_what_there_is_instead(flag: str) -> None:
    for spelling in (flag, flag[:2] + flag[2:].replace("-", "_")):
        value = [] if flag in SWITCHES else ["3"]
        with pytest.raises(ConfigError, match=rf"^{flag} is torchrun's: ") as caught:
            spec_of([spelling, *value, "python", "train.py"])
        # What it names exists.
        named = re.findall(r"(?<!\w)--?[a-zH][a-z-]*", str(caught.value).partition(": ")[2].partition("numactl")[0])
        assert set(named) <= set(build_parser().values)


@pytest.mark.parametrize(
    ("flags", "np"),
    [
        (["--nproc-per-node", "3"], 3),
        (["--nproc_per_node=3", "--nnodes=1", "--standalone"], 3),
        (["--nproc-per-node", "2", "--nnodes", "1:1"], 2),
        (["--nproc-per-node", "2", "-H", "h1,h2:7,h3"], 6),
        (["--nproc-per-node", "cpu"], len(os.sched_getaffinity(0))),
        (["--nproc-per-node", "auto"], len(os.sched_getaffinity(0))),
    ],
)
def test_the_number_on_each_host(flags: list[str], np: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    spec = spec_of([*flags, "echo"])
    assert spec.np == np == sum(host.slots or 0 for host in spec.hosts)
    if "-H" in flags:
        assert spec.hosts == tuple(HostEntry(name, 2) for name in ("h1", "h2", "h3"))


def test_auto_is_the_number_of_gpus_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "visible_gpus", lambda _: 5)
    for text in ("auto", "gpu"):
        assert torchrun.processes_here(argparse.Namespace(nproc_per_node=text), {}) == 5
    assert torchrun.processes_here(argparse.Namespace(nproc_per_node="cpu"), {}) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nproc-per-node", "gpu"], "--nproc-per-node gpu: there is no GPU"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0: give a number from 1, or auto, cpu or gpu"),
        (["--nproc-per-node", "all"], "--nproc-per-node all: give a number from 1"),
        (
            ["--nproc-per-node", "2", "-np", "2"],
            "-np is the number of all workers, and --nproc-per-node the number on each",
        ),
        (
            ["--nproc-per-node", "cpu", "-H", "h1,h2"],
            "--nproc-per-node cpu: the GPUs and cores of h1 are not known here",
        ),
        (["--nproc-per-node", "2", "--host-discovery-script", "true"], "--slots-per-host says how many workers"),
        (["--nnodes", "2"], "--nnodes 2: this launcher is started once and reaches all hosts itself"),
        (["--nnodes", "1:4"], "--nnodes 1:4: for an elastic job give --min-np and --max-np"),
        (["--module", "--no-python"], "--module and --no-python exclude each other"),
    ],
)
def test_what_cannot_be_used_says_what_can(flags: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=re.escape(said)):
        spec_of([*flags, "echo"])


def test_a_module_may_be_named_behind_other_flags() -> None:
    for flags in (["--module", "--nproc-per-node", "2"], ["--nproc-per-node", "2", "--module"]):
        assert spec_of([*flags, "json.tool", "-h"]).command[1:] == ("-m", "json.tool", "-h")


def test_a_program_is_a_program_whatever_its_name(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open("run.py", "w") as file:
        file.write("#!/bin/sh\n")
    with pytest.raises(ConfigError, match=r"run\.py is not executable"):
        spec_of(["--no-python", "./run.py"])
    os.chmod("run.py", 0o755)
    for spelling in ("--no-python", "--no_python"):
        spec = spec_of([spelling, "./run.py", "-x"])
        assert spec.command == spec.remote_command == ("./run.py", "-x")
