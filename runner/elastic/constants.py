"""Texts of elastic jobs under the names that Horovod's programs import."""

from hvdgloo.rendezvous._elastic.events import RESET_LIMIT_EXCEEDED_MESSAGE

__all__ = ["RESET_LIMIT_EXCEEDED_MESSAGE"]
