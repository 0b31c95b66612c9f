"""In a worker: the program that runs the function given to ``hvdgloo.run.run``."""
