"""The findings of ``hvdgloo-run doctor``: rules, tables, JSON."""

from __future__ import annotations

import configparser
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdgloo.config import Config
from hvdgloo.errors import LaunchError
from hvdgloo.runner.agent import facts as examine
from hvdgloo.runner.agent.facts import Facts, GpuFacts
from hvdgloo.runner.doctor.report import all_well, as_json, as_text
from hvdgloo.runner.doctor.rules import (
    Clock,
    Finding,
    Severity,
    Visit,
    addresses_reached,
    compare_clocks,
    diagnose,
    size,
    unconnected,
    verdict,
)
from hvdgloo.runner.job.command import needs
from hvdgloo.runner.network.addressing import Reports, tried
from hvdgloo.runner.network.interfaces import Address
from hvdgloo.runner.network.probe import Answer, ProbeResult
from hvdgloo.runner.processes.bootstrap import REQUIRED
from hvdgloo.runner.protocol.frames import Require
from tests.support.pages import ROOT

GIB = 1024**3
H200 = GpuFacts("NVIDIA H200", 140 * GIB)
FACTS = Facts(
    hostname="node",
    system="Linux 6.1",
    processor="x86_64",
    python="3.11.7",
    executable="/opt/python",
    packages={"hvdgloo": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
    cores=8,
    machine_cores=8,
    memory=64 * GIB,
    shm_size=32 * GIB,
    shm_free=32 * GIB,
    open_files=65536,
    open_files_most=65536,
)


def visit(name: str, slots: int = 2, *, clock: Clock | None = None, **changes: Any) -> Visit:
    return Visit(name, slots, facts=replace(FACTS, **changes), clock=clock or Clock(0.0, 0.001), identity=name)


def found(*visits: Visit) -> list[Finding]:
    return diagnose(visits, FACTS, "/data/job")


def only(*visits: Visit) -> Finding:
    findings = found(*visits)
    assert len(findings) == 1, findings
    return findings[0]


def with_gloo_from(*providers: str) -> dict[str, str]:
    """A host's packages."""
    return {"hvdgloo": "0.1.0", "numpy": "2.4.6", **dict.fromkeys(providers, "2.13.0")}


class TestRules:
    def test_alike_hosts_are_well(self) -> None:
        assert found(visit("h1"), visit("h2"), visit("h3", 8)) == []

    @pytest.mark.parametrize(
        ("changes", "text", "remedy"),
        [
            ({"directory": "/data/job"}, "there is no working directory /data/job", "copies no files"),
            ({"missing": ["file train.py"]}, "there is no file train.py (looked in /data/job)", "copies no files"),
            ({"lacking": ["flask", "yaml"]}, "hvdgloo needs flask, yaml there", "/opt/python -m pip install hvdgloo=="),
        ],
    )
    def test_pain_19_what_stops_a_job(self, changes: dict[str, Any], text: str, remedy: str) -> None:
        finding = only(visit("h1"), visit("h2", **changes))
        assert (finding.severity, finding.hosts) == (Severity.STOP, ("h2",))
        assert text in finding.text
        assert remedy in finding.remedy

    def test_who_listens_must_be_able_to_make_a_certificate(self) -> None:
        """The launcher, and rank 0 on the first host; neither does if the user has one."""
        bare = replace(FACTS, hostname="desk", certificates=False)
        visits = [visit("h1", certificates=False), visit("h2", certificates=False)]
        assert diagnose(visits, bare, "/") == []
        assert diagnose(visits, bare, "/", config=Config(tls="required", tls_cert="cert")) == []
        findings = diagnose(visits, bare, "/", config=Config(tls="required"))
        assert {finding.hosts for finding in findings} == {("launcher",), ("h1",)}
        for finding in findings:
            assert finding.severity is Severity.STOP
            assert "cryptography is not installed" in finding.text
            assert finding.remedy.startswith("/opt/python -m pip install 'hvdgloo[tls]'")
        (finding,) = diagnose(visits[:1], replace(FACTS, certificates=False), "/", config=Config(tls="required"))
        assert finding.hosts == ("h1",)

    def test_without_torch_and_pygloo_nothing_is_exchanged(self) -> None:
        finding = only(visit("h1"), visit("h2", packages=with_gloo_from()))
        assert (finding.severity, finding.hosts) == (Severity.STOP, ("h2",))
        assert "neither torch nor pygloo is installed" in finding.text

    def test_pygloo_everywhere_will_do(self) -> None:
        packages = with_gloo_from("pygloo")
        assert diagnose([visit("h1", packages=packages), visit("h2", packages=packages)], FACTS, "/") == []

    @pytest.mark.parametrize("first", ["torch", "pygloo"])
    def test_all_hosts_take_gloo_from_the_same_package(self, first: str) -> None:
        second = "pygloo" if first == "torch" else "torch"
        finding = only(visit("h1", packages=with_gloo_from(first)), visit("h2", packages=with_gloo_from(second)))
        assert (finding.severity, finding.hosts) == (Severity.STOP, ("h2",))
        assert f"{first} is not installed, through which h1" in finding.text
        assert finding.remedy == f"/opt/python -m pip install 'hvdgloo[{first}]'"

    def test_ranks_of_one_host_need_neither(self) -> None:
        assert found(visit("h1", packages=with_gloo_from())) == []

    def test_ranks_of_one_host_that_are_to_use_gloo_need_one(self) -> None:
        config = Config(cpu_operations="gloo")
        assert diagnose([visit("h1", packages=with_gloo_from("pygloo"))], FACTS, "/", config=config) == []
        (finding,) = diagnose([visit("h1", packages=with_gloo_from())], FACTS, "/", config=config)
        assert finding.severity is Severity.STOP
        assert "--cpu-operations gloo asks for Gloo" in finding.text
        assert finding.remedy.startswith("leave that out, or /opt/python -m pip install")
        config = Config(cpu_operations="gloo", gloo_provider="torch")
        (finding,) = diagnose([visit("h1", packages=with_gloo_from("pygloo"))], FACTS, "/", config=config)
        assert finding.severity is Severity.STOP

    def test_a_choice_that_has_no_effect_on_one_host_is_remarked_on(self) -> None:
        visits = [visit("h1", packages=with_gloo_from("torch"))]
        assert diagnose(visits, FACTS, "/", config=Config(gloo_provider="torch")) == []
        (finding,) = diagnose(visits, FACTS, "/", config=Config(gloo_provider="pygloo"))
        assert (finding.severity, finding.hosts) == (Severity.WARNING, ("h1",))
        assert "pygloo is not installed, which --gloo-provider names" in finding.text
        assert "it has no effect here" in finding.text

    def test_the_package_that_the_job_asks_for_is_looked_for(self) -> None:
        both, one = with_gloo_from("torch", "pygloo"), with_gloo_from("pygloo")
        visits = [visit("h1", packages=both), visit("h2", packages=one)]
        assert diagnose(visits, FACTS, "/", config=Config(gloo_provider="pygloo")) == []
        (finding,) = diagnose(visits, FACTS, "/", config=Config(gloo_provider="torch"))
        assert (finding.severity, finding.hosts) == (Severity.STOP, ("h2",))
        assert "torch is not installed, through which ranks are to exchange tensors (--gloo-provider)" in finding.text

    def test_what_all_hosts_have_can_be_chosen(self) -> None:
        both = with_gloo_from("torch", "pygloo")
        finding = only(visit("h1", packages=both), visit("h2", packages=with_gloo_from("pygloo")))
        assert finding.remedy.endswith(", or run with --gloo-provider pygloo")

    def test_pain_15_an_unreachable_host_keeps_its_reason(self) -> None:
        finding = only(visit("h1"), Visit("h2", 1, problem="its name cannot be looked up", remedy="correct it"))
        assert finding == Finding(Severity.STOP, ("h2",), "its name cannot be looked up", "correct it")

    def test_one_machine_under_two_names(self) -> None:
        finding = only(visit("h1"), replace(visit("h2"), identity="h1"))
        assert (finding.severity, finding.hosts) == (Severity.STOP, ("h1", "h2"))
        assert "the same machine" in finding.text
        visits = [visit("h1"), replace(visit("h2"), identity="h1")]
        (finding,) = diagnose(visits, FACTS, "/", one_machine=Severity.WARNING)
        assert finding.severity is Severity.WARNING, "a template may lead there twice"

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"cores": 1, "machine_cores": 16}, "2 workers share 1 core (of 16: a control group"),
            ({"cores": 1, "machine_cores": 1}, "2 workers share 1 core"),
            ({"shm_size": None, "shm_free": None}, "there is no /dev/shm"),
            ({"shm_size": 64 * 1024**2, "shm_free": 64 * 1024**2}, "/dev/shm has only 64 MiB"),
            ({"shm_free": 1024**2}, "/dev/shm is nearly full: 1 MiB of 32.0 GiB are free"),
            ({"open_files": 200}, "only 200 files open; about 264 may be needed"),
            ({"python": "3.12.1"}, "Python is 3.12.1, the launcher's is 3.11.7"),
        ],
    )
    def test_what_may_disappoint(self, changes: dict[str, Any], text: str) -> None:
        finding = only(visit("h1", **changes))
        assert finding.severity is Severity.WARNING
        assert text in finding.text
        assert finding.remedy

    def test_the_mend_of_a_low_limit_depends_on_who_may_raise_it(self) -> None:
        assert "ulimit -n 264" in only(visit("h1", open_files=200)).remedy
        assert "limits.conf" in only(visit("h1", open_files=200, open_files_most=200)).remedy
        assert found(visit("h1", open_files=None, open_files_most=None)) == []

    def test_differences_name_the_hosts_that_are_unlike_the_most(self) -> None:
        packages = {**FACTS.packages, "torch": "2.12.0"}
        finding = only(visit("h1", packages=packages), visit("h2"), visit("h3"))
        assert finding.hosts == ("h1",)
        assert finding.text == "torch differs: 2.12.0 on h1; 2.13.0 on h2, h3"

    def test_a_framework_that_some_hosts_lack(self) -> None:
        finding = only(visit("h1", packages={**FACTS.packages, "keras": "3.15.1"}), visit("h2"))
        assert (finding.severity, finding.hosts) == (Severity.WARNING, ("h2",))
        assert "keras is not installed, as it is on h1" in finding.text

    def test_the_kind_of_processor(self) -> None:
        assert only(visit("h1"), visit("h2", processor="aarch64")).hosts == ("h2",)

    def test_gpus(self) -> None:
        well = {"gpus": (H200, H200), "visible_gpus": 2, "driver": "570.86", "torch_cuda": "12.8"}
        assert found(visit("h1", **well)) == []
        assert "3 workers share 2 GPUs" in only(visit("h1", 3, **well)).text
        assert "built without CUDA" in only(visit("h1", **{**well, "torch_cuda": None})).text
        assert "nvidia-smi does not answer" in only(visit("h1", **{**well, "gpus": (), "driver": ""})).text
        rocm = {"amd_gpus": 2, "visible_gpus": 2, "torch_rocm": "6.2"}
        assert found(visit("h1", **rocm)) == []  # which has no nvidia-smi
        assert "built without ROCm" in only(visit("h1", **{**rocm, "torch_rocm": None, "torch_cuda": "12.8"})).text
        other = {**well, "gpus": (GpuFacts("NVIDIA A100", 80 * GIB),) * 2, "driver": "535.1"}
        texts = [finding.text for finding in found(visit("h1", **well), visit("h2", **other))]
        assert texts == [
            "the kind of GPU differs: NVIDIA H200 on h1; NVIDIA A100 on h2",
            "NVIDIA's driver differs: 570.86 on h1; 535.1 on h2",
        ]

    @pytest.mark.parametrize(
        ("clock", "said"),
        [
            (Clock(0.9, 0.0), ""),
            (Clock(3.0, 2.5), ""),
            (Clock(95.04, 0.02), "95.0 s ahead of the launcher's"),
            (Clock(-7.0, 0.02), "7.0 s behind the launcher's"),
        ],
    )
    def test_clocks(self, clock: Clock, said: str) -> None:
        findings = found(visit("h1", clock=clock))
        assert said in findings[0].text if said else not findings

    def test_the_worst_comes_first(self) -> None:
        findings = found(visit("h1", 9), visit("h2", directory="/data/job"))
        assert [finding.severity for finding in findings] == [Severity.STOP, Severity.WARNING]
        assert verdict("h1", findings) is Severity.WARNING
        assert verdict("h2", findings) is Severity.STOP
        assert verdict("h3", findings) is None
        assert not all_well(findings)
        assert all_well(findings[1:])


class TestConnections:
    """Pain 7: by address and by pair of hosts, not by names of interfaces."""

    CANDIDATES = (
        (Address("eth0", "10.0.0.1", 24), Address("docker0", "172.17.0.1", 16)),
        (Address("ens5", "10.0.0.2", 24),),
        (Address("ib0", "10.0.0.3", 24),),
    )

    def reports(self, **failing: ProbeResult) -> Reports:
        """All reach each other, except at docker0 and where ``h1_h2=Outcome...`` says otherwise."""
        reports = Reports(("h1", "h2", "h3"), self.CANDIDATES)
        for source, target, address in tried(reports):
            outcome = failing.get(f"h{source + 1}_h{target + 1}", ProbeResult.REACHED)
            if address.nic == "docker0":
                outcome = ProbeResult.REFUSED
            detail = "3" if outcome is ProbeResult.TIMED_OUT else ""
            answers = {**reports.answers, (source, target, address.address): Answer(outcome, "", target, detail)}
            reports = replace(reports, answers=answers)
        return reports

    def test_who_reaches_whom(self) -> None:
        said, findings = addresses_reached(self.reports())
        assert said == {
            "h1": [("10.0.0.1 (eth0)", "all"), ("172.17.0.1 (docker0)", "none (refused the connection)")],
            "h2": [("10.0.0.2 (ens5)", "all")],
            "h3": [("10.0.0.3 (ib0)", "all")],
        }
        assert findings == []

    def test_one_direction_that_is_closed_stops_a_job(self) -> None:
        said, findings = addresses_reached(self.reports(h2_h3=ProbeResult.TIMED_OUT))
        assert said["h3"] == [("10.0.0.3 (ib0)", "all but h2 (timed out after 3 s)")]
        assert [(finding.severity, finding.hosts) for finding in findings] == [(Severity.STOP, ("h3",))]
        assert "h2 -> h3" in findings[0].text
        assert "--port-range" in findings[0].remedy
        assert "--port-range" not in findings[0].text

    def test_an_error_without_pairs_is_about_all(self) -> None:
        finding = unconnected(LaunchError("host h1 has no address; use --nics"), ["h1", "h2"])
        assert finding == Finding(Severity.STOP, ("h1", "h2"), "host h1 has no address", "use --nics")


class TestClocks:
    def test_a_slow_answer_does_not_count_as_difference(self) -> None:
        clock = compare_clocks(sent=100.0, asked=1100.2, answered=1105.2, received=105.4)
        assert clock.offset == pytest.approx(1000.0)
        assert clock.uncertainty == pytest.approx(0.2)


class TestReport:
    VISITS = (
        visit("h1", gpus=(H200, H200), visible_gpus=2, driver="570.86", torch_cuda="12.8"),
        visit("h2.example.com", 4, cores=2, memory_limit=8 * GIB, clock=Clock(-12.5, 0.01)),
        Visit("h3", 1, problem="its name cannot be looked up", remedy="correct it"),
    )

    def test_as_text(self) -> None:
        text = as_text(self.VISITS, found(*self.VISITS), 80)
        rows = {line.split()[0]: line for line in text.split("\n\n")[0].splitlines()}
        assert "verdict" in rows["host"]
        assert "warning" in rows["h2.example.com"]
        assert "2 of 8" in rows["h2.example.com"]
        assert "8.0 GiB of 64.0 GiB" in rows["h2.example.com"]
        assert "-12.500 s" in rows["h2.example.com"]
        assert rows["h3"].split() == ["h3", "STOP"]
        assert "2 x NVIDIA H200, 140 GiB" in text
        assert "8 x AMD" in as_text([visit("h1", amd_gpus=8, visible_gpus=4)], [])
        assert "STOP:    h3: its name cannot be looked up\n         -> correct it\n" in text
        assert "1 of 3 hosts cannot take part" in text.splitlines()[-1]
        assert max(map(len, text.splitlines())) <= 80 + 20, "tables may be wider, sentences not"

    def test_the_conclusion(self) -> None:
        well = [visit("h1"), visit("h2")]
        assert as_text(well, []).endswith("All is well: all 2 hosts are ready for a job.\n")
        assert as_text(well[:1], []).endswith("All is well: this host is ready for a job.\n")
        assert "A job can start." in as_text(well, found(visit("h1", 99))).splitlines()[-1]

    def test_as_json(self) -> None:
        data = json.loads(as_json(self.VISITS, found(*self.VISITS)))
        assert data["ok"] is False
        assert [host["verdict"] for host in data["hosts"]] == ["ok", "warning", "stop"]
        assert data["hosts"][0]["facts"]["gpus"][0] == {"name": "NVIDIA H200", "memory": 140 * GIB}
        assert data["hosts"][1]["clock"]["offset"] == -12.5
        assert data["hosts"][2]["facts"] is None
        assert data["findings"][0] == {
            "severity": "stop",
            "hosts": ["h3"],
            "text": "its name cannot be looked up",
            "remedy": "correct it",
        }

    @pytest.mark.parametrize(
        ("amount", "text"),
        [
            (None, ""),
            (512, "512 bytes"),
            (64 * 1024**2, "64 MiB"),
            (int(23.5 * GIB), "23.5 GiB"),
            (2000 * GIB, "2000 GiB"),
        ],
    )
    def test_sizes(self, amount: int | None, text: str) -> None:
        assert size(amount) == text


class TestExamine:
    def test_versions_without_importing_anything(self) -> None:
        distributions = {"numpy": "2.4.6", "mxnet-cu112": "1.9.1", "tf-nightly": "2.22.dev"}
        assert examine.installed(distributions)["numpy"] == "2.4.6"
        assert next(examine._matching(examine.PACKAGES["mxnet"], distributions)) == "1.9.1"
        assert next(examine._matching(examine.PACKAGES["tensorflow"], distributions)) == "2.22.dev"

    def test_a_folder_of_that_name_is_no_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A folder with a user's data in it, beside the script."""
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "mxnet").mkdir()
        assert "mxnet" not in examine.installed({"mxnet": "1.9.1"})
        (tmp_path / "mxnet" / "__init__.py").write_text("raise SystemExit")
        importlib.invalidate_caches()
        assert examine.installed({})["mxnet"] == ""

    def test_facts_survive_the_journey(self) -> None:
        facts = replace(FACTS, gpus=(H200,), missing=["file x"])
        again = Facts.from_json(json.loads(json.dumps(facts.to_json())))
        assert again.gpus == facts.gpus
        assert again.packages == facts.packages
        assert Facts.from_json({"python": "3.10.1", "from_a_later_version": 1}).python == "3.10.1"

    def test_nvidia_smi(self) -> None:
        text = "NVIDIA H200, 143771, 570.86.10\nNVIDIA H200 NVL, v2, [N/A], 570.86.10\n"
        gpus, driver = examine.parse_nvidia(text)
        assert gpus == (GpuFacts("NVIDIA H200", 143771 * 1024**2), GpuFacts("NVIDIA H200 NVL, v2", 0))
        assert driver == "570.86.10"
        assert examine.parse_nvidia("") == ((), "")

    @pytest.mark.parametrize(
        ("lines", "versions"),
        [
            ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None", ("12.8", None)),
            ('cuda = "11.8"', ("11.8", None)),
            ("cuda: Optional[str] = None", (None, None)),
            ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2.41133-dd7f95766'", (None, "6.2.41133-dd7f95766")),
        ],
    )
    def test_torch_says_for_which_platform_it_was_built(self, lines: str, versions: tuple[str | None, ...]) -> None:
        assert examine.parse_torch(f"__version__ = '2.13.0'\n{lines}\ndebug = False\n") == versions

    def test_directories_files_and_programs(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").touch()
        programs = ["/bin/sh", "sh", "./train.py", "no-such-program"]
        required = Require(str(tmp_path), ["train.py", "other.py"], programs, "/usr/bin:/bin")
        facts = examine.examine({}, required)
        assert list(facts.missing) == ["file other.py", "program ./train.py", "program no-such-program"]
        assert examine.examine({}, Require(str(tmp_path / "no"))).directory == str(tmp_path / "no")

    def test_what_hvdgloo_requires_is_what_setup_cfg_says(self) -> None:
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg", encoding="utf-8")
        required = [line.split()[0] for line in setup["options"]["install_requires"].split("\n")[1:]]
        assert {"PyYAML": "yaml"}.get(required[-1]) == "yaml"
        assert {name.replace("PyYAML", "yaml") for name in required} == set(REQUIRED)
        assert examine.examine({}, Require("/")).lacking == []

    @pytest.mark.parametrize(
        ("command", "expected"),
        [
            ((), ([], [])),
            (("/py", "train.py", "data.py"), (["train.py"], [])),
            (("/py", "-m", "x.py"), ([], [])),
            (("/bin/prog", "x.py"), ([], ["/bin/prog"])),
        ],
    )
    def test_what_a_command_needs(self, command: tuple[str, ...], expected: object) -> None:
        files, programs = needs(command, "/py")
        assert (list(files), list(programs)) == expected
