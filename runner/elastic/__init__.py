"""Hosts of elastic jobs that come and go: where they are listed, and what is made of the lists."""
