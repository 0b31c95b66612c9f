"""The agent on each host: ``python -m hvdgloo.runner.agent`` starts the workers, watches them, and ends them."""
