"""The launcher's console: workers' output, progress while hosts start, the closing summary."""
