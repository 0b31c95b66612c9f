"""``ElasticSettings``: the options of an elastic job, in the form of integrations that were written for Horovod."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdgloo.rendezvous._elastic.events import Rules
from hvdgloo.runner.job.spec import Discovery, ElasticSpec


class ElasticSettings:
    """Hosts, sizes and limits of an elastic job.

    Args:
        discovery: an object that lists hosts.
        min_num_proc, max_num_proc: the minimum and the maximum number of workers; None for no limit.
        elastic_timeout: seconds to wait for workers.
        reset_limit: how often workers may form again; None for no limit.
        cooldown_range: the shortest and the longest time in seconds for which a host is left out; None for ever.
        settings: any others, which become attributes unchanged: ``num_proc``, ``verbose``, ``nics``, ...
    """

    def __init__(
        self,
        discovery: Discovery,
        min_num_proc: int | None,
        max_num_proc: int | None,
        elastic_timeout: float,
        reset_limit: int | None,
        cooldown_range: Sequence[float] | None = None,
        **settings: Any,
    ) -> None:
        self.num_proc: int | None = None
        self.__dict__.update(settings)
        self.discovery = discovery
        self.min_num_proc = min_num_proc
        self.max_num_proc = max_num_proc
        self.elastic_timeout = elastic_timeout
        self.reset_limit = reset_limit
        self.cooldown_range = cooldown_range

    def spec(self) -> ElasticSpec:
        """Return the same settings in our launcher's form.

        Raises:
            ConfigError: the settings contradict each other.
        """
        smallest = self.min_num_proc if self.min_num_proc is not None else self.num_proc or 1
        rules = Rules(
            size=self.num_proc if self.num_proc is not None else smallest,
            smallest=smallest,
            largest=self.max_num_proc,
            elastic_timeout=self.elastic_timeout,
            reset_limit=self.reset_limit,
            cooldown=None if self.cooldown_range is None else (self.cooldown_range[0], self.cooldown_range[1]),
        )
        return ElasticSpec(rules, self.discovery)
