"""Names by which Horovod's integrations know parts of an elastic job."""

from __future__ import annotations

import importlib

import pytest

from hvdgloo.errors import ConfigError
from hvdgloo.rendezvous._elastic.events import Update
from hvdgloo.runner.elastic.discovery import FixedHosts
from hvdgloo.runner.elastic.settings import ElasticSettings
from hvdgloo.runner.elastic.worker import HostUpdateResult


class TestNamesOfHorovods:
    def test_what_an_update_means(self) -> None:
        assert dict(HostUpdateResult.__members__) == {"no_update": 0, "removed": 1, "added": 2, "mixed": 3}
        assert HostUpdateResult.added | HostUpdateResult.removed is HostUpdateResult.mixed
        assert HostUpdateResult.mixed == Update.MIXED == 3, "what the rendezvous announces"

    def test_settings_become_a_job(self) -> None:
        hosts = FixedHosts({"h1": 2})
        settings = ElasticSettings(hosts, 2, 8, 300, 5, (10, 100), num_proc=4, verbose=2)
        spec = settings.spec()
        assert (spec.discovery, spec.rules.size, spec.rules.smallest, spec.rules.largest) == (hosts, 4, 2, 8)
        assert (spec.rules.elastic_timeout, spec.rules.reset_limit, spec.rules.cooldown) == (300, 5, (10, 100))
        assert settings.verbose == 2  # type: ignore[attr-defined]
        assert ElasticSettings(hosts, 2, None, 300, None).spec().rules.size == 2
        with pytest.raises(ConfigError, match="--max-np 1 is below"):
            ElasticSettings(hosts, 2, 1, 300, None).spec()

    def test_they_are_found_under_horovods_name(self) -> None:
        names = {
            "constants": ["RESET_LIMIT_EXCEEDED_MESSAGE"],
            "discovery": ["FixedHosts", "HostDiscovery", "HostDiscoveryScript", "HostManager", "HostState"],
            "settings": ["ElasticSettings"],
            "worker": ["HostUpdateResult"],
        }
        for module, wanted in names.items():
            found = importlib.import_module(f"hvdgloo.runner.elastic.{module}")
            assert [name for name in wanted if not hasattr(found, name)] == []
