"""What elastic training needs for torch: so far the sampler, which also serves jobs of a fixed size."""

from __future__ import annotations

from typing import NoReturn

from hvdgloo.torch.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]


def __getattr__(name: str) -> NoReturn:
    planned = ""
    if name in ("run", "TorchState"):
        planned = ": elastic jobs, which grow and shrink while they run, are not in this version of hvdgloo"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{planned}", name=name)
