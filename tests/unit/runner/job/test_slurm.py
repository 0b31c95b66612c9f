"""Slurm's variables, and srun's command line and last words. Pain 18."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.host_sources import take_inventory
from hvdgloo.runner.job.slurm import expand, find_allocation
from hvdgloo.runner.job.spec import HostEntry, Reach
from hvdgloo.runner.transport import srun
from hvdgloo.runner.transport.failures import Cause, Ending, Retry
from hvdgloo.runner.transport.select import choose_spawner

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-2]"}


class TestNodeLists:
    @pytest.mark.parametrize(
        ("text", "nodes"),
        [
            ("node1", "node1"),
            ("node1,node2", "node1 node2"),
            ("a[001-003,7],b1", "a001 a002 a003 a7 b1"),
            ("rack[1-2]node[01-03]", "rack1node01 rack1node02 rack1node03 rack2node01 rack2node02 rack2node03"),
            ("n[1-3]-ib", "n1-ib n2-ib n3-ib"),
            ("n[1-2].cluster.example", "n1.cluster.example n2.cluster.example"),
            ("n[9-11]", "n9 n10 n11"),
            ("n[09-11]", "n09 n10 n11"),
            ("n[008-010]", "n008 n009 n010"),
            ("n[99-101]", "n99 n100 n101"),
            ("n[5]", "n5"),
            ("n[0-0]", "n0"),
            ("gpu-a100-[01-02],cpu[3,5-6],login", "gpu-a100-01 gpu-a100-02 cpu3 cpu5 cpu6 login"),
            ("r[1,3]c[1-2]n[5-6]x", "r1c1n5x r1c1n6x r1c2n5x r1c2n6x r3c1n5x r3c1n6x r3c2n5x r3c2n6x"),
            ("n2,n1,n[1-3]", "n2 n1 n3"),
            (" n[1-2]\n", "n1 n2"),
            ("nid[000012-000013]", "nid000012 nid000013"),
            ("ip-10-0-1-[5,17]", "ip-10-0-1-5 ip-10-0-1-17"),
        ],
    )
    def test_real_forms(self, text: str, nodes: str) -> None:
        assert expand(text) == tuple(nodes.split())

    @pytest.mark.parametrize(
        "text",
        [
            "", ",", "n1,", "n[", "n]", "n[1", "n1]", "n[]", "n[1,]", "n[,1]", "n[a-b]", "n[2-1]", "n[1-2-3]", "n[-1]",
            "n[1--2]", "n[[1-2]]", "n[1-[2-3]]", "n[1 2]", "n 1", "n[1-2]]", "(null)", "n;rm", "n[1-99999999]",
            "n[1-1000]m[1-1000]", "-n1", "n[²]",
        ],
    )  # fmt: skip
    def test_what_cannot_be_understood_is_quoted_with_its_variable(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"SLURM_JOB_NODELIST=.* cannot be understood: .*-H"):
            expand(text, "SLURM_JOB_NODELIST")

    @given(st.integers(0, 1200), st.integers(0, 30), st.integers(0, 5), st.sampled_from(["", "-ib", ".x"]))
    def test_ranges_are_as_wide_as_their_lower_bound(self, low: int, more: int, width: int, suffix: str) -> None:
        nodes = expand(f"n[{low:0{width}d}-{low + more}]{suffix}")
        assert [int(node[1 : len(node) - len(suffix)]) for node in nodes] == list(range(low, low + more + 1))
        assert all(len(node) - 1 - len(suffix) >= width for node in nodes)

    @given(st.text(alphabet="an01-[],.x", max_size=14))
    def test_any_text_is_nodes_or_a_mistake(self, text: str) -> None:
        try:
            nodes = expand(text)
        except ConfigError:
            return
        assert nodes
        assert all(node and not set(node) & set("[],") for node in nodes)


class TestAllocation:
    def slots(self, **more: str) -> list[int | None]:
        found = find_allocation({**JOB, **more})
        assert found is not None
        return [host.slots for host in found.hosts]

    def test_nothing_outside_of_one(self) -> None:
        assert find_allocation({}) is None
        assert find_allocation({"SLURM_JOB_NODELIST": "n1"}) is None
        assert find_allocation({"SLURM_JOB_ID": "1"}) is None

    def test_old_names(self) -> None:
        found = find_allocation({"SLURM_JOBID": "4711", "SLURM_NODELIST": "n[1-2]"})
        assert found is not None
        assert (found.job_id, [host.name for host in found.hosts]) == ("4711", ["n1", "n2"])

    @pytest.mark.parametrize(
        ("variables", "slots"),
        [
            ({}, [None, None]),
            ({"SLURM_NTASKS": "3", "SLURM_TASKS_PER_NODE": "2,1"}, [2, 1]),
            ({"SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}, [4, 4]),
            ({"SLURM_NTASKS_PER_NODE": "4", "SLURM_TASKS_PER_NODE": "1(x2)"}, [4, 4]),
            ({"SLURM_TASKS_PER_NODE": "64(x2)"}, [64, 64]),
            # Not asked for as tasks: GPUs say more than the number of cores.
            ({"SLURM_TASKS_PER_NODE": "64(x2)", "SLURM_GPUS_PER_NODE": "4"}, [4, 4]),
            ({"SLURM_GPUS_PER_NODE": "a100:4"}, [4, 4]),
            ({"SLURM_GPUS_PER_NODE": "gpu:a100:2,gpu:v100:1"}, [3, 3]),
            ({"SLURM_GPUS_ON_NODE": "8"}, [8, 8]),
            ({"SLURM_GPUS": "5"}, [3, 2]),
            ({"SLURM_GPUS": "h100:16"}, [8, 8]),
            ({"SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_PER_NODE": "4"}, [1, 1]),
        ],
    )
    def test_slots(self, variables: dict[str, str], slots: list[int | None]) -> None:
        assert self.slots(**variables) == slots

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "2(x"}, r"SLURM_TASKS_PER_NODE=2\(x cannot"),
            ({"SLURM_TASKS_PER_NODE": "2(x3)"}, "describes 3 nodes, but the job has 2"),
            ({"SLURM_TASKS_PER_NODE": "2(x999999999999)"}, "cannot be understood"),
            ({"SLURM_NTASKS_PER_NODE": "many"}, "SLURM_NTASKS_PER_NODE=many is not a number"),
            ({"SLURM_GPUS_PER_NODE": "a100"}, "SLURM_GPUS_PER_NODE=a100 cannot"),
        ],
    )
    def test_mistakes_name_the_variable(self, variables: dict[str, str], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            self.slots(**variables)


class TestWhatIsMadeOfIt:
    def test_pain_18_inside_an_allocation_hosts_come_from_slurm_and_srun_leads_there(self) -> None:
        found = take_inventory({**JOB, "SLURM_NTASKS_PER_NODE": "2"})
        assert found.hosts == (HostEntry("n1", 2), HostEntry("n2", 2))
        assert found.notices == ("hosts of Slurm job 4711: n1:2, n2:2, slots by SLURM_NTASKS_PER_NODE",)
        spawner = choose_spawner(found.hosts, found.completed(Reach()))
        assert not spawner.is_local(found.hosts[0])
        assert spawner.diagnose(found.hosts[0], Ending(1, ("x",))).text.startswith("srun ended")

    def test_a_smaller_np_takes_some_of_them(self) -> None:
        assert take_inventory({**JOB, "SLURM_NTASKS_PER_NODE": "2"}, np=3).np == 3

    def test_hosts_that_are_given_win(self) -> None:
        assert take_inventory(JOB, hosts="h7:2").allocation is None
        assert take_inventory(JOB, hosts="localhost:2").allocation is None

    def test_given_nodes_of_the_allocation_are_still_reached_by_srun(self) -> None:
        found = take_inventory(JOB, hosts="n2:1,h7:1")
        assert found.notices == ("h7 is not part of Slurm job 4711: srun cannot reach it",)
        reach = found.completed(Reach())
        assert (reach.slurm_job, "n2" in reach.slurm_nodes, "h7" in reach.slurm_nodes) == ("4711", True, False)
        spawner = choose_spawner(found.hosts, reach)
        assert spawner.diagnose(HostEntry("n2"), Ending(1)).text.startswith("srun")
        assert spawner.diagnose(HostEntry("h7"), Ending(255)).text.startswith("ssh")

    def test_who_wants_none_of_it(self) -> None:
        assert take_inventory(JOB, np=2, slurm=False).hosts == (HostEntry("localhost", 2),)

    def test_a_template_wins_over_srun(self) -> None:
        reach = take_inventory(JOB).completed(Reach(agent_command=("kubectl", "exec")))
        assert choose_spawner([HostEntry("n1")], reach).diagnose(HostEntry("n1"), Ending(1)).text.startswith("kubectl")

    def test_variables_that_cannot_be_understood_do_not_keep_users_from_naming_hosts(self) -> None:
        broken = {**JOB, "SLURM_JOB_NODELIST": "n["}
        assert take_inventory(broken, hosts="n1:1").hosts == (HostEntry("n1", 1),)
        with pytest.raises(ConfigError, match="name the hosts with -H"):
            take_inventory(broken)

    def test_many_launchers_are_one_too_many(self) -> None:
        with pytest.raises(ConfigError, match="started 4 times, by srun"):
            take_inventory({**JOB, "SLURM_STEP_NUM_TASKS": "4"})
        assert take_inventory({**JOB, "SLURM_STEP_NUM_TASKS": "1"}).allocation is not None


class TestSrun:
    def test_one_step_for_each_node_in_this_job(self) -> None:
        argv = srun.srun_argv(HostEntry("n2", 4), Reach(), "4711")
        assert {"--jobid=4711", "--nodelist=n2", "--nodes=1", "--ntasks=1", "--mem=0"} <= set(argv)
        assert argv[argv.index("--chdir=/") + 1] == sys.executable

    def test_the_job_s_wishes_for_its_tasks_do_not_shape_the_agents(self) -> None:
        environ = srun.step_environment(
            {
                "SLURM_JOB_ID": "1", "SLURM_CONF": "/etc/slurm.conf", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4",
                "SLURM_GPUS_PER_TASK": "1", "SLURM_CPUS_PER_TASK": "2", "SLURM_MEM_PER_CPU": "100", "PATH": "/bin",
                "SLURM_CPU_BIND": "x", "SLURM_STEP_ID": "0", "SLURM_LABELIO": "1", "SLURM_TASKS_PER_NODE": "4(x2)",
            }
        )  # fmt: skip
        assert environ == {
            "SLURM_JOB_ID": "1",
            "SLURM_CONF": "/etc/slurm.conf",
            "PATH": "/bin",
            "SLURM_OVERLAP": "1",
        }

    @pytest.mark.parametrize(
        ("words", "cause", "retry"),
        [
            ("srun: error: Unable to create step: Job/step already completing or completed", Cause.OTHER, Retry.NEVER),
            ("srun: error: Unable to confirm allocation: Invalid job id specified", Cause.OTHER, Retry.NEVER),
            (
                "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)",
                Cause.NOT_THERE,
                Retry.A_FEW_TIMES,
            ),
            ("srun: error: Unable to contact slurm controller", Cause.NOT_THERE, Retry.A_FEW_TIMES),
            (
                "slurmstepd: error: execve(): /opt/py: No such file or directory\n"
                "srun: error: n1: task 0: Exited with exit code 2",
                Cause.PYTHON,
                Retry.NEVER,
            ),
            (
                "hvdgloo agent: version 0.0.9 is installed here\nsrun: error: n1: task 0: Exited with exit code 1",
                Cause.VERSION,
                Retry.NEVER,
            ),
            ("srun: error: something new", Cause.OTHER, Retry.NEVER),
        ],
    )
    def test_what_its_last_words_mean(self, words: str, cause: Cause, retry: Retry) -> None:
        found = srun.diagnose(Ending(1, tuple(words.splitlines())), Reach(python="/opt/py"))
        assert (found.cause, found.retry) == (cause, retry)
        assert "\n" not in found.text
