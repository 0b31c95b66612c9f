"""The workers' environment."""

from __future__ import annotations

import pytest

from hvdgloo.config import Config
from hvdgloo.runner.job.command import thread_defaults, worker_environment
from hvdgloo.runner.job.spec import HostEntry, HostProfile, assign


class TestEnvironment:
    def test_config_understands_what_a_worker_is_given(self) -> None:
        slot = assign([HostEntry("a", 1), HostEntry("b", 2)], 3)[2]
        environ = worker_environment(
            slot,
            job_id="job",
            epoch=4,
            rendezvous=("fd00::1", 4711),
            secret=b"s" * 32,
            address="10.0.0.2",
            master=("10.0.0.1", 20001),
        )
        config = Config.from_env(environ)
        assert (config.rank, config.hostname, config.address, config.epoch) == (2, "b", "10.0.0.2", 4)
        assert (config.rendezvous, config.secret, config.job_id) == ("[fd00::1]:4711", b"s" * 32, "job")
        assert (environ["GROUP_RANK"], environ["NODE_RANK"], environ["GROUP_WORLD_SIZE"]) == ("1", "1", "2")
        assert environ["HVDGLOO_CROSS_RANK"] == "0", "the only one with this local rank; torchrun counts hosts"
        horovod = {key: value for key, value in environ.items() if key.startswith("HOROVOD_")}
        assert Config.from_env(horovod).rank == 2

    def test_agents_of_one_machine_are_one_node_for_torch(self) -> None:
        def profile(machine: str) -> HostProfile:
            return HostProfile(machine, machine, "/", ())

        hosts = [HostEntry(f"task {i}", 1, profile=profile(machine)) for i, machine in enumerate(("a", "a", "b"))]
        slots = assign(hosts, 3)
        assert [(slot.host, slot.node, slot.nodes) for slot in slots] == [(0, 0, 2), (1, 0, 2), (2, 1, 2)]

    @pytest.mark.parametrize(("limit", "told"), [(None, 2**31 - 1), (0, 0), (3, 3)])
    def test_no_limit_of_restarts_is_a_number_like_any_other(self, limit: int | None, told: int) -> None:
        slot = assign([HostEntry("a", 1)], 1)[0]
        environ = worker_environment(
            slot, job_id="job", epoch=0, rendezvous=("h", 1), secret=b"", address="h", master=None, max_restarts=limit
        )
        assert int(environ["TORCHELASTIC_MAX_RESTARTS"]) == told

    @pytest.mark.parametrize(
        ("cores", "local", "environ", "expected"),
        [
            (16, 4, {}, "4"),
            (2, 4, {}, "1"),
            (7, 2, {}, "3"),
            (16, 1, {}, None),
            (8, 1, {}, "8"),
            (16, 4, {"OMP_NUM_THREADS": "2"}, None),
        ],
    )
    def test_pain_28_threads(self, cores: int, local: int, environ: dict[str, str], expected: str | None) -> None:
        added = thread_defaults(cores, local, environ, machine_cores=16)
        assert added.get("OMP_NUM_THREADS") == expected
        assert not set(added) & set(environ)

    def test_pain_28_one_library_s_choice_leaves_the_others_their_default(self) -> None:
        added = thread_defaults(16, 4, {"MKL_NUM_THREADS": "9"}, machine_cores=16)
        assert added["OMP_NUM_THREADS"] == "4"
        assert "MKL_NUM_THREADS" not in added
