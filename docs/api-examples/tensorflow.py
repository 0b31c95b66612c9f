"""Examples of hvdgloo.tensorflow; docs/generate_api.py tells how they are written."""

import tensorflow as tf

import hvdgloo.tensorflow as hvd

hvd.init()
x = tf.constant([1.0, 2.0]) * (hvd.rank() + 1)  # [1, 2] on rank 0, [2, 4] on rank 1
v = tf.Variable(x)

# %% allreduce
print(hvd.allreduce(x).numpy())  # [1.5 3. ]
print(hvd.allreduce(x, op=hvd.Sum).numpy())  # [3. 6.]

# %% grouped_allreduce
mean, tenfold = hvd.grouped_allreduce([x, x * 10])
print(mean.numpy(), tenfold.numpy())  # [1.5 3. ] [15. 30.]

# %% allgather
rows = tf.fill([hvd.rank() + 1, 2], hvd.rank())  # one row on rank 0, two on rank 1
print(hvd.allgather(rows).numpy().tolist())  # [[0, 0], [1, 1], [1, 1]]

# %% grouped_allgather
whole, begins = hvd.grouped_allgather([x, x[:1]])
print(whole.numpy(), begins.numpy())  # [1. 2. 2. 4.] [1. 2.]

# %% broadcast
print(hvd.broadcast(x, root_rank=1).numpy())  # [2. 4.]

# %% broadcast_
hvd.broadcast_([v], root_rank=1)
print(v.numpy())  # [2. 4.]

# %% alltoall
print(hvd.alltoall(x).numpy())  # [1. 2.]
received, counts = hvd.alltoall(tf.range(3), splits=[1, 2])  # a row for rank 0, two for rank 1
print(received.numpy(), counts.numpy())  # [0 0] [1 1]

# %% reducescatter
print(hvd.reducescatter(x, op=hvd.Sum).numpy())  # [3.]

# %% grouped_reducescatter
part, tenfold = hvd.grouped_reducescatter([x, x * 10], op=hvd.Sum)
print(part.numpy(), tenfold.numpy())  # [3.] [30.]

# %% join
for _ in range(hvd.rank() + 1):  # rank 1 has a batch more
    hvd.allreduce(x, name="gradient")
print(int(hvd.join()))  # 1

# %% broadcast_variables
hvd.broadcast_variables([v], root_rank=0)  # before the first step
print(v.numpy())  # [1. 2.]

# %% broadcast_global_variables, BroadcastGlobalVariablesHook
with tf.Graph().as_default():  # TensorFlow 1
    w = tf.compat.v1.get_variable("w", initializer=float(hvd.rank()), use_resource=True)
    with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(1)]) as session:
        print(session.run(w))  # 1.0

# %% broadcast_object
found = {"epoch": 3} if hvd.rank() == 0 else None  # only one rank reads the file
print(hvd.broadcast_object(found, root_rank=0))  # {'epoch': 3}

# %% broadcast_object_fn
from_rank_1 = hvd.broadcast_object_fn(root_rank=1)
print(from_rank_1({"rank": hvd.rank()}))  # {'rank': 1}

# %% allgather_object
print(hvd.allgather_object({"rank": hvd.rank()}))  # [{'rank': 0}, {'rank': 1}]

# %% DistributedGradientTape
with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
    loss = tf.reduce_sum(v * v)
print(tape.gradient(loss, [v])[0].numpy())  # [3. 6.]

# %% PartialDistributedGradientTape
layer = tf.keras.layers.Dense(1)
layer(x[None])  # builds it
with hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer) as tape:
    loss = tf.reduce_sum(layer(x[None])) + tf.reduce_sum(v)
gradients = tape.gradient(loss, [*layer.trainable_variables, v])  # the layer's stay this rank's own
print(gradients[2].numpy())  # [1. 1.]

# %% DistributedOptimizer
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
hvd.broadcast_variables([v], root_rank=0)
optimizer.apply([x], [v])  # the mean of both ranks' gradients
print(v.numpy())  # [0.85 1.7 ]

# %% SyncBatchNormalization
layer = hvd.SyncBatchNormalization()
print(layer(tf.random.normal([4, 3]), training=True).shape)  # (4, 3)

# %% Compression
print(hvd.allreduce(x, compression=hvd.Compression.fp16).numpy())  # [1.5 3. ]


# %% rank_op, local_rank_op
@tf.function  # traced once, and right in an elastic job's next epoch, too
def own_rank():
    return hvd.rank_op(), hvd.local_rank_op()


print([int(each) for each in own_rank()])  # [0, 0]

# %% size_op, local_size_op
print(int(hvd.size_op()), int(hvd.local_size_op()))  # 2 2

# %% process_set_included_op
first = hvd.add_process_set([0])
print(int(hvd.process_set_included_op(first.process_set_id)))  # 1
hvd.remove_process_set(first)


# %% elastic.run, TensorFlowState
@hvd.elastic.run
def train(state):
    while state.epoch < 3:
        v.assign_sub(hvd.allreduce(v) * 0.1)
        state.epoch += 1
        state.commit()


state = hvd.elastic.TensorFlowState([v], epoch=0)
train(state)
print(state.epoch)  # 3

# %% TensorFlowKerasState
model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), loss="mse")
state = hvd.elastic.TensorFlowKerasState(model, epoch=0)
state.commit()

# %% TfDataServiceConfig, tf_data_service, send_to_data_service
# The compute job: hvdgloo-run -np 1 -- python -m hvdgloo.tensorflow.data.compute_worker service.json
from hvdgloo.tensorflow.data import TfDataServiceConfig, tf_data_service

config = TfDataServiceConfig.read("service.json", wait_for_file_creation=True)
with tf_data_service(config, hvd.rank()):
    dataset = tf.data.Dataset.range(4).map(lambda number: number * 10)  # computed by the service
    dataset = dataset.send_to_data_service(config, hvd.rank())
    print(sorted(int(number) for number in dataset))  # [0, 10, 20, 30]
hvd.barrier()
if hvd.rank() == 0:
    config.compute_client().shutdown()  # ends the compute job

# %% compute_worker_fn
from hvdgloo.tensorflow.data import TfDataServiceConfig, compute_worker_fn


def compute(config: TfDataServiceConfig) -> None:
    """Serve in the compute job, in the place of the program compute_worker."""
    compute_worker_fn(config)
