"""The job as values: hosts, slots, commands, environments, and the outcome."""
