"""Examples of hvdgloo.mxnet; docs/generate_api.py tells how they are written."""

import mxnet as mx

import hvdgloo.mxnet as hvd

hvd.init()
x = mx.nd.array([1.0, 2.0]) * (hvd.rank() + 1)  # [1, 2] on rank 0, [2, 4] on rank 1
model = mx.gluon.nn.Dense(1, in_units=2)
model.initialize()

# %% allreduce
print(hvd.allreduce(x).asnumpy())  # [1.5 3. ]
print(hvd.allreduce(x, op=hvd.Sum).asnumpy())  # [3. 6.]

# %% allreduce_
hvd.allreduce_(x, op=hvd.Max)
print(x.asnumpy())  # [2. 4.]

# %% grouped_allreduce
mean, tenfold = hvd.grouped_allreduce([x, x * 10])
print(mean.asnumpy(), tenfold.asnumpy())  # [1.5 3. ] [15. 30.]

# %% grouped_allreduce_
y = x * 10
hvd.grouped_allreduce_([x, y])
print(x.asnumpy(), y.asnumpy())  # [1.5 3. ] [15. 30.]

# %% allgather
rows = mx.nd.full((hvd.rank() + 1, 2), hvd.rank())  # one row on rank 0, two on rank 1
print(hvd.allgather(rows).asnumpy().tolist())  # [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]

# %% grouped_allgather
whole, begins = hvd.grouped_allgather([x, x[:1]])
print(whole.asnumpy(), begins.asnumpy())  # [1. 2. 2. 4.] [1. 2.]

# %% broadcast
print(hvd.broadcast(x, root_rank=1).asnumpy())  # [2. 4.]

# %% broadcast_
hvd.broadcast_(x, root_rank=1)
print(x.asnumpy())  # [2. 4.]

# %% alltoall
print(hvd.alltoall(x).asnumpy())  # [1. 2.]
received, counts = hvd.alltoall(mx.nd.arange(3), splits=[1, 2])  # a row for rank 0, two for rank 1
print(received.asnumpy(), counts.asnumpy())  # [0. 0.] [1 1]

# %% reducescatter
print(hvd.reducescatter(x, op=hvd.Sum).asnumpy())  # [3.]

# %% grouped_reducescatter
part, tenfold = hvd.grouped_reducescatter([x, x * 10], op=hvd.Sum)
print(part.asnumpy(), tenfold.asnumpy())  # [3.] [30.]

# %% broadcast_parameters
hvd.broadcast_parameters(model.collect_params(), root_rank=0)  # before the first step

# %% broadcast_object
found = {"epoch": 3} if hvd.rank() == 0 else None  # only one rank reads the file
print(hvd.broadcast_object(found, root_rank=0))  # {'epoch': 3}

# %% allgather_object
print(hvd.allgather_object({"rank": hvd.rank()}))  # [{'rank': 0}, {'rank': 1}]

# %% DistributedTrainer
hvd.broadcast_parameters(model.collect_params(), root_rank=0)
trainer = hvd.DistributedTrainer(model.collect_params(), "sgd", {"learning_rate": 0.1 * hvd.size()})
with mx.autograd.record():
    loss = model(x.reshape((1, 2))).sum()
loss.backward()
trainer.step(batch_size=1)

# %% DistributedOptimizer
optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1))  # for mx.mod.Module.fit(optimizer=...)
weight, gradient = mx.nd.zeros(2), x
optimizer.update(0, weight, gradient, optimizer.create_state(0, weight))
print(weight.asnumpy())  # [-0.15 -0.3 ]

# %% Compression
parameters, options = model.collect_params(), {"learning_rate": 0.1 * hvd.size()}
trainer = hvd.DistributedTrainer(parameters, "sgd", options, compression=hvd.Compression.fp16)
