"""Examples of hvdgloo.jax; docs/generate_api.py tells how they are written."""

import jax
import jax.numpy as jnp
import optax

import hvdgloo.jax as hvd

hvd.init()
x = jnp.array([1.0, 2.0]) * (hvd.rank() + 1)  # [1, 2] on rank 0, [2, 4] on rank 1

# %% allreduce
print(hvd.allreduce(x))  # [1.5 3. ]
print(jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(x))  # [3. 6.]
tree = hvd.allreduce({"loss": x[0], "count": 1}, op=hvd.Sum)
print(float(tree["loss"]), int(tree["count"]))  # 3.0 2

# %% grouped_allreduce
mean, tenfold = hvd.grouped_allreduce([x, x * 10])
print(mean, tenfold)  # [1.5 3. ] [15. 30.]

# %% allgather
rows = jnp.full((hvd.rank() + 1, 2), hvd.rank())  # one row on rank 0, two on rank 1
print(hvd.allgather(rows).tolist())  # [[0, 0], [1, 1], [1, 1]]
print(jax.jit(hvd.allgather)(x))  # [1. 2. 2. 4.]

# %% grouped_allgather
whole, begins = hvd.grouped_allgather([x, x[:1]])
print(whole, begins)  # [1. 2. 2. 4.] [1. 2.]

# %% broadcast
print(hvd.broadcast(x, root_rank=1))  # [2. 4.]

# %% alltoall
print(hvd.alltoall(x))  # [1. 2.]
received, counts = hvd.alltoall(jnp.arange(3), splits=[1, 2])  # a row for rank 0, two for rank 1
print(received, counts)  # [0 0] [1 1]

# %% reducescatter
print(hvd.reducescatter(x, op=hvd.Sum))  # [3.]

# %% grouped_reducescatter
part, tenfold = hvd.grouped_reducescatter([x, x * 10], op=hvd.Sum)
print(part, tenfold)  # [3.] [30.]

# %% barrier
hvd.barrier()  # outside of compiled functions

# %% join
for _ in range(hvd.rank() + 1):  # rank 1 has a batch more
    hvd.allreduce(x, name="gradient")
print(int(hvd.join()))  # 1

# %% broadcast_object
found = {"epoch": 3} if hvd.rank() == 0 else None  # only one rank reads the file
print(hvd.broadcast_object(found, root_rank=0))  # {'epoch': 3}

# %% allgather_object
print(hvd.allgather_object({"rank": hvd.rank()}))  # [{'rank': 0}, {'rank': 1}]

# %% DistributedOptimizer
optimizer = hvd.DistributedOptimizer(optax.sgd(0.5))
parameters = {"w": jnp.ones(2)}
state = optimizer.init(parameters)


@jax.jit
def step(parameters, state, x):
    gradients = jax.grad(lambda parameters: (parameters["w"] * x).sum())(parameters)
    updates, state = optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state


parameters, state = step(parameters, state, x)  # the mean of both ranks' gradients is [1.5, 3]
print(parameters["w"])  # [ 0.25 -0.5 ]

# %% distributed_gradients
optimizer = optax.chain(optax.clip(3.0), hvd.distributed_gradients(), optax.sgd(0.5))
updates, state = optimizer.update(x, optimizer.init(x))  # of [1, 2] and [2, 3], since rank 1's are clipped
print(updates)  # [-0.75 -1.25]

# %% broadcast_parameters
parameters = hvd.broadcast_parameters({"w": x, "step": 10 * hvd.rank()}, root_rank=1)
print(parameters["w"], parameters["step"])  # [2. 4.] 10

# %% errors_of
total = jax.jit(lambda x: hvd.allreduce(x, name="rows"))
try:
    hvd.errors_of(total)(jnp.ones(2 + hvd.rank()))
except hvd.HorovodInternalError as error:
    print(error)  # allreduce.rows: ranks disagree about its shape: (2,) on rank 0; (3,) on rank 1

# %% translated
total = jax.jit(lambda x: hvd.allreduce(x, name="rows"))
try:
    with hvd.translated():  # waits at its end
        total(jnp.ones(2 + hvd.rank()))
except hvd.HorovodInternalError as error:
    print(type(error).__name__)  # MismatchError

# %% Compression
print(hvd.allreduce(x, compression=hvd.Compression.fp16))  # [1.5 3. ]


# %% run, JaxState
@hvd.elastic.run
def train(state):
    while state.epoch < 3:
        state.parameters = hvd.allreduce(state.parameters * 0.5)
        state.epoch += 1
        state.commit()


state = hvd.elastic.JaxState(parameters=x, epoch=0)
train(state)
print(state.epoch)  # 3
