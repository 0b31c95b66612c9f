"""Data planes. Each module imports what it needs only when it is loaded."""
