"""Texts of elastic jobs under the names by which Horovod's programs import them."""

from hvdgloo.rendezvous._elastic.events import RESET_LIMIT_EXCEEDED_MESSAGE

__all__ = ["RESET_LIMIT_EXCEEDED_MESSAGE"]
