"""Examples of hvdgloo.torch; docs/generate_api.py tells how they are written."""

import torch

import hvdgloo.torch as hvd

hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.tensor([1.0, 2.0]) * (hvd.rank() + 1)  # [1, 2] on rank 0, [2, 4] on rank 1

# %% init
hvd.init(process_sets=[[0], [1]])  # at the beginning of the program; here it is a second call, which does nothing
print(hvd.size())  # 2

# %% is_initialized
print(hvd.is_initialized())  # True

# %% rank
if hvd.rank() == 0:  # one process saves, or all would write the same file
    torch.save(model.state_dict(), "model.pt")

# %% size
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())  # twice the rate for twice the batch
print(optimizer.param_groups[0]["lr"])  # 0.2

# %% local_rank
if torch.cuda.is_available():
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

# %% local_size
torch.set_num_threads(max(1, torch.get_num_threads() // hvd.local_size()))  # ranks of a host share its cores

# %% cross_rank, cross_size
print(f"host {hvd.cross_rank()} of {hvd.cross_size()}")  # host 0 of 1

# %% is_homogeneous
print(hvd.is_homogeneous())  # True

# %% allreduce
print(hvd.allreduce(x))  # tensor([1.5000, 3.0000])
print(hvd.allreduce(x, op=hvd.Sum))  # tensor([3., 6.])

# %% allreduce_async
handle = hvd.allreduce_async(x, op=hvd.Sum)
print(x.norm() > 2)  # tensor(True)
print(hvd.synchronize(handle))  # tensor([3., 6.])

# %% allreduce_
hvd.allreduce_(x, op=hvd.Max)
print(x)  # tensor([2., 4.])

# %% allreduce_async_
handle = hvd.allreduce_async_(x, op=hvd.Min)
hvd.synchronize(handle)
print(x)  # tensor([1., 2.])

# %% grouped_allreduce
count = torch.tensor([10])
mean, total = hvd.grouped_allreduce([x, count], op=hvd.Sum)
print(mean, total)  # tensor([3., 6.]) tensor([20])

# %% grouped_allreduce_async
handle = hvd.grouped_allreduce_async([x, x * 10])
print(hvd.synchronize(handle))  # [tensor([1.5000, 3.0000]), tensor([15., 30.])]

# %% grouped_allreduce_
hvd.grouped_allreduce_([parameter.data for parameter in model.parameters()])  # the mean of the ranks' models

# %% grouped_allreduce_async_
handle = hvd.grouped_allreduce_async_([parameter.data for parameter in model.parameters()])
hvd.synchronize(handle)

# %% sparse_allreduce_async
row = torch.sparse_coo_tensor([[hvd.rank()]], [1.0], (3,))
wait = hvd.sparse_allreduce_async(row, name=None, op=hvd.Sum)
print(wait().to_dense())  # tensor([1., 1., 0.])

# %% Average
print(hvd.allreduce(x, op=hvd.Average))  # tensor([1.5000, 3.0000])

# %% Sum
print(hvd.allreduce(x, op=hvd.Sum))  # tensor([3., 6.])

# %% Adasum
print(hvd.allreduce(x, op=hvd.Adasum))  # tensor([1.5000, 3.0000])
print(hvd.allreduce(torch.eye(2)[hvd.rank()], op=hvd.Adasum))  # tensor([1., 1.])

# %% Min
print(hvd.allreduce(x, op=hvd.Min))  # tensor([1., 2.])

# %% Max
print(hvd.allreduce(x, op=hvd.Max))  # tensor([2., 4.])

# %% Product
print(hvd.allreduce(x, op=hvd.Product))  # tensor([2., 8.])

# %% allgather
rows = torch.full((hvd.rank() + 1, 2), hvd.rank())  # one row on rank 0, two on rank 1
print(hvd.allgather(rows).tolist())  # [[0, 0], [1, 1], [1, 1]]

# %% allgather_async
handle = hvd.allgather_async(x)
print(hvd.synchronize(handle))  # tensor([1., 2., 2., 4.])

# %% grouped_allgather
print(hvd.grouped_allgather([x, x[:1]]))  # [tensor([1., 2., 2., 4.]), tensor([1., 2.])]

# %% grouped_allgather_async
handle = hvd.grouped_allgather_async([x, x[:1]])
print(hvd.synchronize(handle))  # [tensor([1., 2., 2., 4.]), tensor([1., 2.])]

# %% allgather_object
print(hvd.allgather_object({"rank": hvd.rank()}))  # [{'rank': 0}, {'rank': 1}]

# %% broadcast
print(hvd.broadcast(x, root_rank=1))  # tensor([2., 4.])

# %% broadcast_async
handle = hvd.broadcast_async(x, root_rank=1)
print(hvd.synchronize(handle))  # tensor([2., 4.])

# %% broadcast_
hvd.broadcast_(x, root_rank=1)
print(x)  # tensor([2., 4.])

# %% broadcast_async_
handle = hvd.broadcast_async_(x, root_rank=1)
hvd.synchronize(handle)
print(x)  # tensor([2., 4.])

# %% broadcast_object
found = {"epoch": 3} if hvd.rank() == 0 else None  # only one rank reads the file
print(hvd.broadcast_object(found, root_rank=0))  # {'epoch': 3}

# %% broadcast_parameters
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # before the first step

# %% broadcast_optimizer_state
hvd.broadcast_optimizer_state(optimizer, root_rank=0)  # after a checkpoint was loaded on rank 0

# %% alltoall
print(hvd.alltoall(x))  # tensor([1., 2.])
received, counts = hvd.alltoall(torch.arange(3), splits=[1, 2])  # a row for rank 0, two for rank 1
print(received, counts)  # tensor([0, 0]) tensor([1, 1], dtype=torch.int32)

# %% alltoall_async
handle = hvd.alltoall_async(x)
received, counts = hvd.synchronize(handle)
print(received)  # tensor([1., 2.])

# %% reducescatter
print(hvd.reducescatter(x, op=hvd.Sum))  # tensor([3.])

# %% reducescatter_async
handle = hvd.reducescatter_async(x, op=hvd.Sum)
print(hvd.synchronize(handle))  # tensor([3.])

# %% grouped_reducescatter
print(hvd.grouped_reducescatter([x, x * 10], op=hvd.Sum))  # [tensor([3.]), tensor([30.])]

# %% grouped_reducescatter_async
handle = hvd.grouped_reducescatter_async([x, x * 10], op=hvd.Sum)
print(hvd.synchronize(handle))  # [tensor([3.]), tensor([30.])]

# %% barrier
if hvd.rank() == 0:
    torch.save(x, "data.pt")  # such as a download
hvd.barrier()
print(torch.load("data.pt"))  # tensor([1., 2.])

# %% join
for _ in range(hvd.rank() + 1):  # rank 1 has a batch more
    hvd.allreduce(x, name="gradient")
print(hvd.join())  # 1

# %% poll
handle = hvd.allreduce_async(x)
while not hvd.poll(handle):
    pass  # something useful
print(hvd.synchronize(handle))  # tensor([1.5000, 3.0000])

# %% synchronize
handles = [hvd.allreduce_async(x * factor) for factor in (1, 2)]
print([hvd.synchronize(handle) for handle in handles])  # [tensor([1.5000, 3.0000]), tensor([3., 6.])]

# %% ProcessSet, add_process_set, remove_process_set
first = hvd.add_process_set(hvd.ProcessSet([0]))
if first.included():
    print(hvd.allreduce(x, process_set=first))  # tensor([1., 2.])
hvd.remove_process_set(first)

# %% global_process_set
print(hvd.global_process_set.ranks)  # [0, 1]

# %% DistributedOptimizer, DistributedTorchOptimizer
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
model(x).sum().backward()
optimizer.synchronize()  # only to clip gradients
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
with optimizer.skip_synchronize():
    optimizer.step()

# %% LocalSGD, LocalTorchOptimizer
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.LocalSGD(optimizer, model, sync_every=4)
for _ in range(10):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
optimizer.finish()  # before evaluating or saving the model

# %% DiLoCo
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.AdamW(model.parameters())
optimizer = hvd.DiLoCo(optimizer, model, sync_every=100, compression=hvd.Compression.int8)
for _ in range(200):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
optimizer.finish()

# %% OuterOptimizer
import numpy as np

import hvdgloo.numpy

weights = np.zeros(3)
outer = hvdgloo.numpy.OuterOptimizer([weights], sync_every=2)
for _ in range(4):
    weights += hvd.rank()  # a step of this rank's own
    outer.step()
print(weights)  # [2. 2. 2.]

# %% Compression
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=hvd.Compression.bf16)
print(hvd.allreduce(x, compression=hvd.Compression.fp16))  # tensor([1.5000, 3.0000])

# %% PowerSGD
compression = hvd.Compression.powersgd(rank=2)  # one for each optimizer
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)

# %% SyncBatchNorm
layer = hvd.SyncBatchNorm(3)
print(layer(torch.randn(4, 3, 8, 8)).shape)  # torch.Size([4, 3, 8, 8])

# %% scale_learning_rate
saved = {"workers": 1, "optimizer": optimizer.state_dict()}  # a checkpoint that one process wrote
optimizer.load_state_dict(saved["optimizer"])
hvd.scale_learning_rate(optimizer, hvd.size() / saved["workers"])
print(optimizer.param_groups[0]["lr"])  # 0.2

# %% metrics, Metrics, PlaneMetrics
before = hvd.metrics()
hvd.allreduce(x)
counted = hvd.metrics() - before
print(counted.operations, counted.bytes)  # 1 8
print(sum(plane.operations for plane in counted.planes.values()))  # 1

# %% log
for step in range(10):
    hvd.log(loss=1 / (step + 1), step=step, steps=10)
hvd.log(accuracy=0.5 + 0.1 * hvd.rank(), average=True)
print(hvd.metrics().logged)  # {'loss': 0.1, 'accuracy': 0.55}

# %% start_timeline, stop_timeline
hvd.start_timeline("timeline.json")
hvd.allreduce(x)
hvd.stop_timeline()

# %% gloo_built, gloo_enabled
print(hvd.gloo_built(), hvd.gloo_enabled())  # True True

# %% nccl_built, cuda_built, rocm_built
device = "cuda" if hvd.cuda_built() or hvd.rocm_built() else "cpu"
print(hvd.nccl_built() >= 21805)  # False

# %% mpi_built, mpi_enabled, ccl_built, ddl_built
print(hvd.mpi_built(), hvd.mpi_enabled(), hvd.ccl_built(), hvd.ddl_built())  # False False False False

# %% mpi_threads_supported
print(hvd.mpi_enabled() and hvd.mpi_threads_supported())  # False

# %% HorovodInternalError
try:
    hvd.allreduce(torch.ones(hvd.rank() + 1))  # shapes that differ
except hvd.HorovodInternalError as error:
    print(type(error).__name__)  # MismatchError

# %% elastic.run, TorchState
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    while state.epoch < 3:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        state.epoch += 1
        state.commit()


state = hvd.elastic.TorchState(model, optimizer, epoch=0)
train(state)
print(state.epoch)  # 3

# %% ElasticSampler
data = torch.utils.data.TensorDataset(torch.arange(8))
sampler = hvd.elastic.ElasticSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
for number, (batch,) in enumerate(loader):
    sampler.record_batch(number, batch_size=2)
    print(batch)  # tensor([0, 2])
    break
sampler.reset()  # divides what is left
print(list(sampler))  # [4, 6]

# %% State, ObjectState
from hvdgloo.elastic import ObjectState

state = ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, losses=[])
state.losses.append(0.5)
state.restore()  # to what was saved last
print(state.losses)  # []

# %% AsyncDataLoaderMixin, BaseDataLoader
from hvdgloo.data import AsyncDataLoaderMixin, BaseDataLoader


class Batches(BaseDataLoader):
    def __len__(self):
        return 3

    def _iterate(self):
        yield from torch.arange(6).split(2)  # such as from files


class AheadOfTime(AsyncDataLoaderMixin, Batches):
    pass


print([batch.tolist() for batch in AheadOfTime(async_loader_queue_size=2)])  # [[0, 1], [2, 3], [4, 5]]

# %% shutdown
hvd.shutdown()
print(hvd.is_initialized())  # False
