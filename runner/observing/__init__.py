"""Observation of a launcher's job: its state for the page, ``top``, the report and the progress line."""
