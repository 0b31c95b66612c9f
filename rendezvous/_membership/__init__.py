"""Membership of a job, and ranks: what all jobs share, and the members of a job of a fixed size. Pure."""
