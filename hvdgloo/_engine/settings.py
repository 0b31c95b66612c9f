"""The settings of an engine that may change while it runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Choice:
    """The settings that may change while a job runs: sizes in bytes, times in seconds.

    ``hierarchical_threshold`` is 0 where the data plane of the set of all ranks has no such threshold.
    """

    fusion_threshold: int
    cycle_time: float
    hierarchical_threshold: int
    inline_threshold: int

    def as_flags(self, start: Choice) -> str:
        """The launcher's flags for what differs from another choice."""
        flags = {
            "fusion_threshold": f"--fusion-threshold-mb {self.fusion_threshold / (1 << 20):g}",
            "cycle_time": f"--cycle-time-ms {self.cycle_time * 1000:g}",
            "hierarchical_threshold": f"--hierarchical-threshold {self.hierarchical_threshold}",
            "inline_threshold": f"--inline-threshold {self.inline_threshold}",
        }
        own, other = asdict(self), asdict(start)
        return " ".join(flag for name, flag in flags.items() if own[name] != other[name])
