"""Example of hvdgloo.run; docs/generate_api.py tells how it is written."""

# %% run.run
from hvdgloo.run import run


def train(learning_rate):
    import hvdgloo.numpy as hvd

    hvd.init()
    return hvd.rank() * learning_rate


print(run(train, args=(0.1,), np=2))  # [0.0, 0.1]
