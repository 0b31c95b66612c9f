"""The page of a job: its routes, live events and static files, and the same as a file, which is the report."""
