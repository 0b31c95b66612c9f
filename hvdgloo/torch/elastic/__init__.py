"""What elastic training needs of torch: so far the sampler, which serves jobs of a fixed size as well."""

from __future__ import annotations

from hvdgloo.torch.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
