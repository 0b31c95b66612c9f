"""Supervision in the launcher: one state per host, from the start of its agent until nothing is left of the job."""
