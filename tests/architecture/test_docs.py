"""The documentation agrees with the code: what it names exists, what is generated is up to date."""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from hvdgloo._observe.top.command import build_parser as build_top_parser
from hvdgloo.config import environment_names, settings
from hvdgloo.rendezvous import _cli as rendezvous_cli
from hvdgloo.runner.cli.main import build_parser, config_file
from hvdgloo.runner.cli.setting_flags import IGNORED_FLAGS, REFUSED_FLAGS
from hvdgloo.runner.job.command import interface_variables, worker_environment
from hvdgloo.runner.job.spec import HostEntry, assign
from hvdgloo.runner.network.interfaces import Address
from tests.clients.table import CLIENTS
from tests.support.frameworks import need
from tests.support.pages import ROOT, generated, outdated
from tests.torch_suite import expected

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
"""Pages for users."""

FOR_CONTRIBUTORS = [
    ROOT / name
    for name in ("CONTRIBUTING.md", "SECURITY.md", "tests/README.md", "tests/pains.md", "tests/mutants/README.md")
]
OTHER_OPTIONS = {
    "--agents",
    "--archives",
    "--backend",
    "--choice",
    "--epochs",
    "--field-selector",
    "--from-literal",
    "--horovod",
    "--gpus-per-node",
    "--index-url",
    "--ipc",
    "--network",
    "--no-build-isolation",
    "--no-deps",
    "--nodes",
    "--ntasks-per-node",
    "--pid",
    "--plane",
    "--layouts",
    "--only",
    "--processes",
    "--processor",
    "--py-files",
    "--ranks",
    "--torchrun-timeout",
    "--measured",
    "--rate",
    "--rounds",
    "--steps",
    "--idle",
    "--rows",
    "--runs",
    "--seconds",
    "--seed",
    "--shm-size",
    "--sysctl",
    "--tf",
    "--trials",
    "--unix-socket",
    "--validate",
    "--address",
    "--array",
    "--for",
    "--kill-on-bad-exit",
    "--no-kill",
    "--replicas",
    "--requeue",
    "--scale",
    "--signal",
    "--wait",
    "--workers",
}
"""Options in examples that belong to other programs."""
OF_SPARK_S_TASKS = {
    "HOROVOD_SPARK_PYTHONPATH",
    "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX",
    "HOROVOD_SPARK_WORK_DIR",
}
HOROVODS_EXTRAS = {
    "all-frameworks",
    "keras",
    "mxnet",
    "pytorch",
    "pytorch-spark",
    "ray",
    "spark",
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-gpu",
}
"""All of Horovod 0.28's that are for users."""
EXTRAS = ("torch", "tensorflow", "keras", "jax", "mxnet", "pygloo", "spark", "ray", "top")
FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "optax", "mxnet", "pygloo", "pyspark", "pyarrow", "fsspec", "ray")
"""Packages that extras install."""
WITHOUT_EFFECT = {
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE",
    "HOROVOD_BATCH_D2D_MEMCOPIES",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_DISABLE_NVTX_RANGES",
    "HOROVOD_DYNAMIC_PROCESS_SETS",
    "HOROVOD_ENABLE_ASYNC_COMPLETION",
    "HOROVOD_ENABLE_XLA_OPS",
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_HIERARCHICAL_ALLGATHER",
    "HOROVOD_HIERARCHICAL_ALLREDUCE",
    "HOROVOD_MPI_THREADS_DISABLE",
    "HOROVOD_NUM_NCCL_STREAMS",
    "HOROVOD_TORUS_ALLREDUCE",
}
"""Variables of Horovod's that nothing here reads."""


LONG = {"performance.md", "troubleshooting.md"}
"""Pages in which users look something up rather than read them; they may have more than 4,000 words."""


def _ids(page: Path) -> str:
    return page.name


def test_configuration_is_what_config_declares() -> None:
    written = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert written == generated("configuration"), "run: python docs/generate_configuration.py"


def test_the_api_pages_are_what_the_docstrings_say() -> None:
    pytest.importorskip("torch", reason="the pages are about hvdgloo.torch")
    assert outdated("api_torch") == [], "run: python docs/generate_api_torch.py"


def test_the_index_of_the_api_has_what_the_other_pages_have() -> None:
    assert (ROOT / "docs/api.md").read_text(encoding="utf-8") == generated("api"), "run: python docs/generate_api.py"


@pytest.mark.parametrize("name", sorted(settings()))
def test_configuration_shows_every_name_of_a_setting(name: str) -> None:
    setting = settings()[name]
    section = generated("configuration").partition(f"\n## {setting.env}\n")[2].partition("\n## ")[0]
    names = [setting.flag, setting.yaml, *setting.fallback]
    assert [shown for shown in names if shown is not None and f"`{shown}`" not in section] == []


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_variables_that_are_named_exist(page: Path) -> None:
    known = {*environment_names(), *_worker_variables(), *WITHOUT_EFFECT, *OF_SPARK_S_TASKS}
    named = set(re.findall(r"\b(?:HVDGLOO|HOROVOD)_[A-Z][A-Z_]*[A-Z]\b", page.read_text(encoding="utf-8")))
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=_ids)
def test_options_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text(encoding="utf-8")))
    assert named - _options() - OTHER_OPTIONS == set()


def test_keys_of_the_configuration_file_are_documented(tmp_path: Path) -> None:
    page = (ROOT / "docs/settings-file.md").read_text(encoding="utf-8")
    parser = build_parser()
    assert [key for key in parser.keys if f"`{key}`" not in page] == []
    (example,) = (text for text in re.findall(r"```yaml\n(.*?)```", page, re.S) if "num_proc" in text)
    (tmp_path / "example.yaml").write_text(example)
    assert config_file.read(str(tmp_path / "example.yaml"), parser).ignored == []


def test_migrating_tells_of_every_flag_and_variable_of_horovods_that_does_nothing() -> None:
    page = (ROOT / "docs/migrating.md").read_text(encoding="utf-8")
    flags = {flag for flag, *_ in (*IGNORED_FLAGS, *REFUSED_FLAGS) if not flag.startswith("--no-")}
    assert [name for name in sorted(flags | WITHOUT_EFFECT) if f"`{name}`" not in page] == []
    assert [name for name in WITHOUT_EFFECT if name in set(environment_names())] == []


@pytest.mark.parametrize("page", [*PAGES, *FOR_CONTRIBUTORS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [link for link in _links(text) if not os.path.exists(page.parent / link.partition("#")[0])] == []
    headings = {
        re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)
    }
    assert {link[1:] for link in _links(text) if link.startswith("#")} <= headings


@pytest.mark.parametrize("page", FOR_CONTRIBUTORS, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_contributors_are_sent_to_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w/.*]+/[\w*]+\.(?:py|md))`", page.read_text(encoding="utf-8")))
    roots = (ROOT, ROOT / "hvdgloo", page.parent)
    assert [name for name in sorted(named) if not any(next(root.glob(name), None) for root in roots)] == []


def test_no_page_is_too_long_to_be_read() -> None:
    words = {page.name: len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md")}
    assert {name: count for name, count in words.items() if count > 4000 and name not in LONG} == {}


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in _links((ROOT / "README.md").read_text(encoding="utf-8"))}
    # The site's page of changes is CHANGELOG.md.
    assert {str(page.relative_to(ROOT)) for page in PAGES} - {"README.md", "docs/changelog.md"} <= linked


def test_requirements_agree_with_setup_cfg() -> None:
    """Pain 3: the matrix of tested versions cannot fall behind."""
    # Not the installed metadata, which is as old as the installation.
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = setup["options.extras_require"]
    lines = "".join([setup["options"]["install_requires"], *(extras[name] for name in EXTRAS)])
    wanted = [r for r in map(Requirement, lines.split("\n")[1:]) if str(r.specifier).startswith(">=")]
    asked = {r.name: f">= {str(r.specifier)[2:]}" for r in wanted}
    asked["Python"] = setup["options"]["python_requires"].replace(">=", ">= ")
    assert {_canonical(name): needs for name, (needs, _) in _matrix().items()} == {
        _canonical(name): needs for name, needs in asked.items()
    }


def test_warnings_are_errors() -> None:
    """Pain 5: what Python, NumPy or a framework will remove is noticed before they do."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert setup["tool:pytest"]["filterwarnings"].split()[0] == "error"


def test_pyproject_says_how_to_build_and_nothing_else() -> None:
    """All other metadata, and the settings of tools, stay in setup.cfg: two places would contradict each other."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r"^\[.*\]$", text, re.MULTILINE) == ["[build-system]"]
    (needed,) = re.findall(r'^requires = \["(.*)"\]$', text, re.MULTILINE)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    (tool,) = (
        each for each in setup["options.extras_require"]["packaging"].split("\n") if each.startswith("setuptools")
    )
    least = min(Version(each.version) for each in Requirement(tool).specifier)
    assert least in Requirement(needed).specifier, "the extra's setuptools builds without isolation"


def test_the_picture_of_the_architecture_is_up_to_date() -> None:
    drawn = (ROOT / "docs/images/architecture.svg").read_text(encoding="utf-8")
    assert drawn == generated("architecture"), "run: python docs/generate_architecture.py"


def test_horovods_extras_are_there() -> None:
    """``horovod[tensorflow,keras,pytorch,mxnet]`` in a user's requirements: only the first word has to change."""
    setup, stand_in = configparser.ConfigParser(), configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    stand_in.read(ROOT / "packaging/horovod/setup.cfg", encoding="utf-8")
    own, theirs = setup["options.extras_require"], stand_in["options.extras_require"]
    assert own["pytorch"].split() == ["hvdgloo[torch]"]
    assert set(theirs) == HOROVODS_EXTRAS
    for needed in map(Requirement, "".join(theirs.values()).split("\n")[1:]):
        if needed.name == "hvdgloo":
            assert needed.extras <= set(own), needed


@pytest.mark.parametrize("name", [*FRAMEWORKS, "Python", "numpy", "flask", "cheroot", "cloudpickle"])
def test_this_environment_is_in_the_matrix(name: str) -> None:
    """Pains 3 and 4: a run of the tests reports versions that the matrix lacks; that alone is no failure."""
    if name in ("jax", "optax", "pygloo", "pyspark", "pyarrow", "fsspec", "ray"):
        pytest.importorskip(name, reason="its tests have an environment of their own")
    if name in ("torch", "tensorflow", "keras", "mxnet"):
        need(name)
    package = "tensorflow-cpu" if name == "tensorflow" else name
    present = Version(platform.python_version() if name == "Python" else importlib.metadata.version(package))
    needs, tested = _matrix()[name]
    assert present in Requirement(f"x {needs}").specifier
    if f"{present.major}.{present.minor}" not in tested:
        pytest.skip(f"{name} {present} is not in docs/compatibility.md: add it if all tests pass")


def test_the_workflow_runs_targets_that_exist_on_every_python_that_is_supported() -> None:
    """Only the code host runs it, so a name that is gone would not be noticed here."""
    text = (ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"run: make ([a-z-]+)", text))
    assert {"check", "test", "test-packaging"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in targets)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    supported = re.findall(r"Python :: (3\.\d+)$", setup["metadata"]["classifiers"], re.M)
    assert supported
    assert set(supported) <= set(jobs["test"]["strategy"]["matrix"]["python"])


def test_the_table_of_clients_is_what_make_clients_tries() -> None:
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| `(\w+)\.py` \| ", page, re.M)
    assert rows == [(client.name, client.version, client.program) for client in CLIENTS]
    for client in CLIENTS:
        assert any(package.endswith(f"=={client.version}") for package in client.packages + client.bare)
        assert (ROOT / f"tests/clients/programs/{client.program}.py").is_file()


def test_the_table_of_torch_s_tests_that_fail_is_what_is_expected_of_them() -> None:
    page = (ROOT / "docs/torch-distributed.md").read_text(encoding="utf-8")
    section = page.partition("## torch's own tests")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| .*`test_.*$", section, re.M)
    assert "\n".join(rows) == expected.table()


def test_cuda_is_called_untested_until_there_is_a_report() -> None:
    """A report of ``make test-gpu``; see ``tests/gpu/report.py``."""
    reports = [*(ROOT / "docs").glob("gpu-report*.md")]
    for page in ("README.md", "docs/gpus.md"):
        text = (ROOT / page).read_text("utf-8")
        assert ("CUDA is untested" in text) == (not reports), page
        assert "make test-gpu" in text, page


def test_a_wrong_name_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("HVDGLOO_NONSENSE, `--no-such-option`, [here](nowhere.md), [there](#nowhere)")
    for check in (
        test_variables_that_are_named_exist,
        test_options_that_are_named_exist,
        test_links_lead_somewhere,
    ):
        with pytest.raises(AssertionError):
            check(page)


def _matrix() -> dict[str, tuple[str, list[str]]]:
    text = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (>= [\d.]+) \| ([\d., ]+) \|$", text, re.M)
    return {name: (needs, tested.replace(" ", "").split(",")) for name, needs, tested in rows}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def _worker_variables() -> set[str]:
    slot = assign([HostEntry("localhost", 1)], 1)[0]
    interfaces = interface_variables(Address("eth0", "10.0.0.1", 24), chosen=True).keys()
    return interfaces | set(
        worker_environment(
            slot, job_id="", epoch=0, rendezvous=("h", 1), secret=b"", address="127.0.0.1", master=("h", 1)
        )
    )


def _options() -> set[str]:
    launcher = {option for action in build_parser()._actions for option in action.option_strings}
    top = {option for action in build_top_parser()._actions for option in action.option_strings}
    examples = (ROOT / "examples").glob("*.py")
    others = (Path(rendezvous_cli.__file__), ROOT / "hvdgloo/tensorflow/data/compute_worker.py", *examples)
    named = {option for path in others for option in re.findall(r'"(--[a-z-]+)"', path.read_text("utf-8"))}
    return launcher | top | named
