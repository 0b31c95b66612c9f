"""Data loaders that work ahead of the training loop, for loaders that do not do so themselves."""

from __future__ import annotations

from hvdgloo.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]
