"""The name under which eager programs know ``LocalGradientAggregationHelper``."""

from __future__ import annotations

from hvdgloo.tensorflow.gradient_aggregation import (
    LocalGradientAggregationHelper as LocalGradientAggregationHelperEager,
)

__all__ = ["LocalGradientAggregationHelperEager"]
