"""Processes: starting one, and finding it again with all its children in order to end them."""
