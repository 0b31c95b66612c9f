"""The program of a worker that runs the function given to ``hvdgloo.run.run``."""
