"""Examples of hvdgloo.keras; docs/generate_api.py tells how they are written."""

import keras
import numpy as np

import hvdgloo.keras as hvd

hvd.init()
x = np.array([1.0, 2.0]) * (hvd.rank() + 1)  # [1, 2] on rank 0, [2, 4] on rank 1
inputs, targets = np.ones((8, 2)), np.zeros((8, 1))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

# %% DistributedOptimizer
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())), loss="mse")
start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model.fit(inputs, targets, epochs=2, callbacks=[start], verbose=0)

# %% PartialDistributedOptimizer
first = model.layers[0]  # each rank trains this layer for itself
optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.01), local_layers=first)
model.compile(optimizer, loss="mse")

# %% load_model
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
if hvd.rank() == 0:
    model.save("model.keras")
path = hvd.broadcast_object("model.keras")  # arrives once rank 0 has saved
model = hvd.load_model(path)  # its optimizer is distributed again

# %% allreduce
print(hvd.allreduce(x))  # [1.5 3. ]

# %% allgather
print(hvd.allgather(x))  # [1. 2. 2. 4.]

# %% broadcast
print(hvd.broadcast(x, root_rank=1))  # [2. 4.]

# %% reducescatter
print(hvd.reducescatter(x, op=hvd.Sum))  # [3.]

# %% broadcast_object
found = {"epoch": 3} if hvd.rank() == 0 else None  # only one rank reads the file
print(hvd.broadcast_object(found, root_rank=0))  # {'epoch': 3}

# %% allgather_object
print(hvd.allgather_object({"rank": hvd.rank()}))  # [{'rank': 0}, {'rank': 1}]

# %% broadcast_global_variables
import tensorflow as tf

with tf.Graph().as_default():  # TensorFlow 1
    w = tf.compat.v1.get_variable("w", initializer=float(hvd.rank()), use_resource=True)
    broadcast = hvd.broadcast_global_variables(root_rank=1)
    with tf.compat.v1.Session() as session:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(broadcast)
        print(session.run(w))  # 1.0

# %% Compression
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), compression=hvd.Compression.bf16)

# %% callbacks.BroadcastGlobalVariablesCallback, callbacks.MetricAverageCallback, callbacks.LearningRateWarmupCallback
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * hvd.size(), warmup_epochs=1),
]
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())), loss="mse")
model.fit(inputs, targets, batch_size=4, epochs=2, callbacks=callbacks, verbose=0)

# %% callbacks.LearningRateScheduleCallback
rate = 0.01 * hvd.size()
halved = hvd.callbacks.LearningRateScheduleCallback(rate, multiplier=0.5)  # with each epoch
start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), loss="mse")
model.fit(inputs, targets, epochs=2, callbacks=[start, halved], verbose=0)
print(f"{float(model.optimizer.learning_rate):.3f}")  # 0.010

# %% callbacks.LocalSGDCallback
model.compile(keras.optimizers.SGD(0.01), loss="mse")  # a plain optimizer
model.fit(inputs, targets, batch_size=2, callbacks=[hvd.callbacks.LocalSGDCallback(sync_every=2)], verbose=0)

# %% callbacks.LogCallback
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model.fit(inputs, targets, callbacks=[start, hvd.callbacks.LogCallback()], verbose=0)  # last in the list

# %% callbacks.BestModelCheckpoint
checkpoint = hvd.callbacks.BestModelCheckpoint(monitor="loss")
checkpoint.filepath = "best.keras"
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)] + [checkpoint] * (hvd.rank() == 0)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
model.fit(inputs, targets, callbacks=callbacks, verbose=0)

# %% elastic.run, KerasState, CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
callbacks = [
    hvd.elastic.CommitStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.UpdateEpochStateCallback(state),
]


@hvd.elastic.run
def train(state):
    model.fit(inputs, targets, initial_epoch=state.epoch, epochs=3, callbacks=callbacks, verbose=0)


train(state)
print(state.epoch)  # 3
