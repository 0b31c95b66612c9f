"""A worker's part in its job: joining it, the process's one Context, its log, and the end of the process."""
