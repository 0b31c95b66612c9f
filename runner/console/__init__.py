"""What the launcher shows: workers' output, progress while hosts start, the closing summary."""
