"""The changing hosts of elastic jobs: discoveries that list them, and the thread that calls one repeatedly."""
