"""The job as values: hosts, slots, commands, environments, and how it ended."""
