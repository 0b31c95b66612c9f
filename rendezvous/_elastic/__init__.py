"""Elastic jobs: which workers form each epoch, decided without clock, socket or thread."""
