"""A worker's part in its job: joining it, the process's only Context, its log, and the end of the process."""
