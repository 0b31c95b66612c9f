"""Observation of a job: what ranks measure and report once a second, and what the page, top and reports make of it."""
