"""Variables that travel to other hosts, and the name of the working directory there. Pain 19."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdgloo.errors import ConfigError
from hvdgloo.runner.job.environment import (
    for_other_hosts,
    is_host_specific,
    parse_exports,
    read_env_file,
    working_directory,
)
from tests.support.launching import of_a_service


class TestVariables:
    @pytest.mark.parametrize(
        "name",
        [
            "SSH_AUTH_SOCK", "DISPLAY", "HOSTNAME", "XDG_RUNTIME_DIR", "TMPDIR", "HOME", "USER", "PWD", "_",
            "TMUX_PANE", "SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "DBUS_SESSION_BUS_ADDRESS", "KUBERNETES_PORT",
            "WEB_SERVICE_HOST", "WEB_PORT_80_TCP_ADDR",
        ],
    )  # fmt: skip
    def test_pain_19_what_describes_this_host_stays_here(self, name: str) -> None:
        assert is_host_specific(name)
        assert for_other_hosts({name: "x"}, frozenset(), export_all=True) == {}
        assert for_other_hosts({name: "x"}, frozenset({name}), export_all=True) == {name: "x"}

    @pytest.mark.parametrize(
        "name",
        [
            "PATH",
            "PYTHONPATH",
            "LD_LIBRARY_PATH",
            "CONDA_PREFIX",
            "NCCL_DEBUG",
            "OMP_NUM_THREADS",
            "MY_DISPLAY",
            "LANG",
        ],
    )
    def test_pain_19_everything_else_travels(self, name: str) -> None:
        assert for_other_hosts({name: "x"}, frozenset(), export_all=True) == {name: "x"}
        assert for_other_hosts({name: "x"}, frozenset(), export_all=False) == {}
        assert for_other_hosts({name: "x"}, frozenset({name}), export_all=False) == {name: "x"}

    def test_settings_travel_in_any_case(self) -> None:
        environ = {"HVDGLOO_CYCLE_TIME": "1", "HOROVOD_LOG_LEVEL": "debug"}
        assert for_other_hosts(environ, frozenset(), export_all=False) == environ

    @pytest.mark.parametrize("service", ["HVDGLOO", "HOROVOD", "HVDGLOO_RENDEZVOUS", "WEB"])
    def test_pain_19_a_kubernetes_service_stays_here(self, service: str) -> None:
        """Another cluster's service may have the same name and another address."""
        brought = of_a_service(service)
        assert for_other_hosts({**brought, "HVDGLOO_PORT_RANGE": "1-9"}, frozenset(), export_all=True) == {
            "HVDGLOO_PORT_RANGE": "1-9"
        }
        assert for_other_hosts(brought, frozenset(brought), export_all=False) == brought

    def test_exports(self) -> None:
        assert parse_exports(["A", "B=1=2", "C="], {"A": "here"}) == {"A": "here", "B": "1=2", "C": ""}

    @pytest.mark.parametrize("text", ["", "=1", "A B=1", "A\0"])
    def test_what_is_no_variable(self, text: str) -> None:
        with pytest.raises(ConfigError, match=r"-x .*expected NAME or NAME=VALUE"):
            parse_exports([text], {})

    @pytest.mark.parametrize("text", ["BAD NAME=s3cret", "A=s3cret\0"])
    def test_pain_30_a_value_is_not_shown(self, text: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse_exports([text], {})
        assert str(caught.value) == f"-x {text.partition('=')[0]}: expected NAME or NAME=VALUE"

    def test_a_variable_that_is_not_set(self) -> None:
        with pytest.raises(ConfigError, match="-x NOPE: NOPE is not set here; give it a value"):
            parse_exports(["NOPE"], {})

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "env"
        path.write_text(
            "# comment\n\nA=1\nexport B=two words\nC='quoted # text'\nD=\"x\"\nE\nF=$HOME\n  G = 7\nH=\nI='\n"
        )
        assert read_env_file(str(path), {"E": "here"}) == {
            "A": "1", "B": "two words", "C": "quoted # text", "D": "x", "E": "here", "F": "$HOME", "G": "7", "H": "",
            "I": "'",
        }  # fmt: skip

    def test_mistakes_name_file_and_line(self, tmp_path: Path) -> None:
        path = tmp_path / "env"
        path.write_text("A=1\n\nNOPE\n")
        with pytest.raises(ConfigError, match=rf"--env-file {path}, line 3: NOPE is not set here"):
            read_env_file(str(path), {})
        with pytest.raises(ConfigError, match="absent: No such file"):
            read_env_file(str(tmp_path / "absent"), {})


class TestTheWorkingDirectory:
    def test_pain_19_goes_by_the_name_that_the_user_knows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, name = tmp_path / "real", tmp_path / "name"
        real.mkdir()
        name.symlink_to(real)
        monkeypatch.chdir(real)
        assert working_directory({"PWD": str(name)}) == str(name)
        assert working_directory({}) == str(real)
        # What a program has left there that changed its folder.
        assert working_directory({"PWD": str(tmp_path)}) == str(real)
        assert working_directory({"PWD": str(tmp_path / "absent")}) == str(real)
        assert working_directory({"PWD": "."}) == str(real)

    def test_one_that_was_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        with pytest.raises(ConfigError, match="the current directory no longer exists"):
            working_directory({"PWD": str(gone)})
