"""Hosts' addresses: which there are, which can be reached, and which to use."""
