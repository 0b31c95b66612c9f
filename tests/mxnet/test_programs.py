"""Whole programs on ranks that are processes: the examples, and one that Horovod's users might have written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.examples import check_learned
from tests.support.launching import Launcher

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PROGRAM = """
import os, pickle, signal, sys, warnings
warnings.simplefilter("ignore")
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import horovod.mxnet as hvd
from horovod.mxnet.compression import Compression
from horovod.mxnet.functions import allgather_object, broadcast_object
from horovod.mxnet.mpi_ops import allgather, allreduce, allreduce_, broadcast, broadcast_, rank, size

assert "torch" not in sys.modules
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which comes as soon as the other rank has ended
hvd.init()
me = hvd.rank()
assert rank() == me and size() == hvd.size() == 2

# All functions of the module, as Horovod's programs write them.
x = mx.nd.array([1.0, 2.0]) * (me + 1)
assert allreduce(x, False, "sum", 3).asnumpy().tolist() == [3.0, 6.0]
assert hvd.allreduce(x, priority=-1).asnumpy().tolist() == [1.5, 3.0]
assert hvd.allreduce(x, op=hvd.Max, name="max").asnumpy().tolist() == [2.0, 4.0]
assert hvd.allreduce(x, None, None, 0, 0.5, 4.0, hvd.global_process_set, hvd.Sum).asnumpy().tolist() == [6.0, 12.0]
y = x.copy()
assert allreduce_(y, name="y", priority=0) is y and y.asnumpy().tolist() == [1.5, 3.0]
assert [t.asnumpy().tolist() for t in hvd.grouped_allreduce([x, x[:1]])] == [[1.5, 3.0], [1.5]]
assert [t.shape for t in hvd.grouped_allreduce_([y, y.copy()], op=hvd.Sum)] == [(2,), (2,)]
assert allgather(x[: me + 1], "rows", 0).asnumpy().tolist() == [1.0, 2.0, 4.0]
assert [t.shape[0] for t in hvd.grouped_allgather([x, x[:1]])] == [4, 2]
assert broadcast(x, 1, "b", 0).asnumpy().tolist() == [2.0, 4.0]
assert broadcast_(y, root_rank=0) is y
for splits in (mx.nd.array([1, 1], dtype="int32"), mx.nd.array([1, 1])):  # float32 by default
    received, counts = hvd.alltoall(x, splits)
    assert counts.asnumpy().tolist() == [1, 1] and counts.dtype == np.int32
assert hvd.alltoall(x).shape == (2,)
assert hvd.reducescatter(x, hvd.Sum).asnumpy().tolist() == [[3.0], [6.0]][me]
assert hvd.grouped_reducescatter([x], priority=2)[0].shape == (1,)
handle = hvd.allreduce_async_(y, name="asynchronous")
assert hvd.synchronize(handle) is y
only = hvd.add_process_set([1])
if me == 1:
    assert hvd.allreduce(x, process_set=only).asnumpy().tolist() == [2.0, 4.0]
assert broadcast_object({"rank": me}, 1) == {"rank": 1} and allgather_object(me) == [0, 1]
for wrong in ([x], {"a": 1}):
    try:
        hvd.broadcast_parameters(wrong)
    except ValueError:
        continue
    raise AssertionError(wrong)

# Training is what one process does with all the data, to 1e-5: weights of one network whose shapes are known late.
data = np.random.default_rng(1).normal(size=(24, 6)).astype(np.float32)
wanted = data.sum(axis=1, keepdims=True)
loss_of = gluon.loss.L2Loss()

def network(seed):
    mx.random.seed(seed)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(8, activation="tanh"), gluon.nn.BatchNorm(use_global_stats=True), gluon.nn.Dense(1))
    net.initialize(mx.init.Normal(0.5))
    net.hybridize()
    return net

def weights_of(net):
    return [p.data().asnumpy() for p in net.collect_params().values()]

def train(net, trainer, rows):
    for step in range(6):
        batch = slice(step % 3 * 8, step % 3 * 8 + 8)
        with autograd.record():
            loss = loss_of(net(mx.nd.array(data[batch][rows])), mx.nd.array(wanted[batch][rows]))
        loss.backward()
        trainer.step(len(loss))
    return weights_of(net)

cases = [
    (lambda: "sgd", {"learning_rate": 0.1, "momentum": 0.9}, {}),
    (lambda: "adam", {"learning_rate": 0.05}, {"num_groups": 2, "prefix": "second."}),
    (lambda: mx.optimizer.SGD(learning_rate=0.1), None, {"gradient_predivide_factor": 2.0}),
    (lambda: "sgd", {"learning_rate": 0.1}, {"compression": hvd.Compression.fp16}),
]
for optimizer, parameters, options in cases:
    alone = network(1)
    expected = train(alone, gluon.Trainer(alone.collect_params(), optimizer(), parameters, kvstore=None), slice(None))
    net = network(1 + me)
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), optimizer(), parameters, **options)
    got = train(net, trainer, slice(me, None, 2))
    for a, b in zip(got, expected):
        np.testing.assert_allclose(a, b, atol=2e-3 if "compression" in options else 1e-5)
    assert len(set(map(str, hvd.allgather_object([w.tobytes() for w in got])))) == 1
    trainer.save_states("states.%d" % me)
    trainer.load_states("states.%d" % me)

# Broadcast again, now that the shapes are known; and from the other rank.
net.collect_params().initialize(mx.init.Normal(1.0), force_reinit=True)
hvd.broadcast_parameters(net.collect_params(), root_rank=1, prefix="again.")
both = hvd.allgather_object([w.tobytes() for w in weights_of(net)])
assert both[0] == both[1]

# A parameter that has a new gradient on one rank alone steps on both.
for p in net.collect_params().values():
    p.zero_grad()

def in_two_parts(trainer):
    trainer.allreduce_grads()
    trainer.update(1, ignore_stale_grad=True)

for update in (lambda trainer: trainer.step(1, ignore_stale_grad=True), in_two_parts):
    left, right = gluon.nn.Dense(1, in_units=6), gluon.nn.Dense(1, in_units=6)
    for side in (left, right):
        side.initialize(mx.init.One())
    params = dict(left.collect_params().items()) | dict(right.collect_params().items())
    trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 1.0})
    for step in range(2):
        with autograd.record():
            loss = (left if me == 0 else right)(mx.nd.array(data[:4])).sum()
        loss.backward()
        update(trainer)
    for side in (left, right):
        np.testing.assert_allclose(side.weight.data().asnumpy()[0], 1 - data[:4].sum(axis=0), atol=1e-5)
    everyone = hvd.allgather_object([w.tobytes() for side in (left, right) for w in weights_of(side)])
    assert everyone[0] == everyone[1]

# Without ignore_stale_grad a stale gradient is told, as in a plain trainer.
with autograd.record():
    loss = (left if me == 0 else right)(mx.nd.array(data[:4])).sum()
loss.backward()
trainer.allreduce_grads()
try:
    trainer.update(1)
except UserWarning as error:
    assert (right if me == 0 else left).bias.name in str(error), error
else:
    raise AssertionError("a stale gradient was stepped with")

# gluon.Trainer goes on averaging with what it loads, also with an optimizer that takes weights one at a time.
def with_gluons_trainer(optimizer, states=None, made=gluon.Trainer, wrapped=hvd.DistributedOptimizer, **options):
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Zero())
    trainer = made(net.collect_params(), wrapped(optimizer), **options)
    for step in range(2):
        if step == 1:
            trainer.save_states("saved.%d" % me)
            trainer.load_states(states or "saved.%d" % me)
        with autograd.record():
            loss = net(mx.nd.ones((1, 1)) * (me + 1)).sum()
        loss.backward()
        trainer.step(1)
    return net.weight.data().asscalar(), trainer.optimizer

half = hvd.Compression.fp16
last, loaded = with_gluons_trainer(mx.optimizer.SGD(learning_rate=1.0), kvstore=None)
assert last == -3.0 and type(loaded).__name__ == "SGD"
last, _ = with_gluons_trainer(
    mx.optimizer.Adam(), wrapped=lambda plain: hvd.DistributedOptimizer(plain, compression=half), kvstore=None
)
everyone = hvd.allgather_object(last)
assert everyone[0] == everyone[1] != 0, everyone
# Its file suits DistributedTrainer, which averages by itself.
os.rename("saved.%d" % me, "kept.%d" % me)
last, loaded = with_gluons_trainer(
    mx.optimizer.Adam(), "kept.%d" % me, made=hvd.DistributedTrainer, wrapped=lambda plain: plain
)
assert type(loaded) is mx.optimizer.Adam, type(loaded)
# With process sets, as long as there is one of these ranks.
apart = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), process_set=only)
pickled = pickle.dumps(apart)
weight = mx.nd.zeros((1,))
pickle.loads(pickled).update(0, weight, mx.nd.ones((1,)) * (me + 1), None)
assert weight.asscalar() == -1.0 - me
hvd.remove_process_set(only)
try:
    pickle.loads(pickled)
except ValueError as error:
    assert "not registered" in str(error), error
else:
    raise AssertionError("loaded without its process set")

# What a trainer cannot do it says.
embedding = gluon.nn.Embedding(4, 2, sparse_grad=True)
embedding.initialize()
trainer = hvd.DistributedTrainer(embedding.collect_params(), "sgd")
with autograd.record():
    loss = embedding(mx.nd.array([1])).sum()
loss.backward()
devices = gluon.nn.Dense(1, in_units=1)
devices.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
rows = {"rows": gluon.Parameter("rows", shape=(4, 2), stype="row_sparse")}
rows["rows"].initialize()
broken = gluon.nn.Dense(1, in_units=me + 1, prefix="broken%d_" % me)
broken.initialize()
misshapen = hvd.DistributedTrainer(broken.collect_params(), "sgd", prefix="misshapen.")
with autograd.record():
    loss = broken(mx.nd.ones((1, me + 1))).sum()
loss.backward()
grouped = hvd.DistributedTrainer(broken.collect_params(), "sgd", prefix="grouped.", num_groups=1)
for wrong, text in [
    (lambda: trainer.step(1), "row_sparse array cannot be sent"),
    (lambda: hvd.DistributedTrainer(devices.collect_params(), "sgd"), "start a rank for each device"),
    (lambda: hvd.DistributedTrainer(left.collect_params(), "sgd", num_groups=-1), "num_groups"),
    (lambda: hvd.DistributedOptimizer("sgd"), "expected an mx.optimizer.Optimizer"),
    (lambda: hvd.broadcast_parameters(rows), "parameter 'rows' is row_sparse: sparse parameters need a kvstore"),
    (lambda: hvd.DistributedTrainer(rows, "sgd"), "parameter 'rows' is row_sparse: sparse parameters need a kvstore"),
    (lambda: hvd.alltoall(x, mx.nd.array([0.5, 1.5])), "dtype='int32'"),
    (lambda: misshapen.step(1), f"(on this rank 1 is broken{me}_weight)"),
    (lambda: grouped.step(1), f"(on this rank 0 is broken{me}_bias)"),
]:
    try:
        wrong()
    except (ValueError, hvd.HorovodInternalError) as error:
        assert text in str(error), error
        continue
    raise AssertionError(text)

# The Module API, with and without a kvstore.
def module(distributed, rows, kvstore=None):
    mx.random.seed(3)
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="fc")
    symbol = mx.sym.LinearRegressionOutput(symbol, mx.sym.Variable("label"), name="out")
    take = np.concatenate([np.arange(first, first + 8)[rows] for first in (0, 8, 16)])
    batch = len(take) // 3
    iterator = mx.io.NDArrayIter(data[take], wanted[take], batch, label_name="label")
    made = mx.mod.Module(symbol, label_names=["label"])
    optimizer = mx.optimizer.Adam(learning_rate=0.05, rescale_grad=1 / batch)
    if distributed:
        plain, optimizer = optimizer, hvd.DistributedOptimizer(optimizer)
        assert isinstance(optimizer, mx.optimizer.Adam) and type(optimizer).__name__ == "Adam"
        assert type(pickle.loads(pickle.dumps(optimizer))) is type(optimizer)
        optimizer.set_learning_rate(0.04)
        assert plain.learning_rate == 0.04
    else:
        optimizer.set_learning_rate(0.04)
    made.fit(iterator, kvstore=kvstore, optimizer=optimizer, num_epoch=3, eval_metric="mse",
             initializer=mx.init.Normal(0.5))
    return {name: array.asnumpy() for name, array in made.get_params()[0].items()}

expected = module(False, slice(None))
for kvstore in (None, mx.kv.create("local")):
    for name, array in module(True, slice(me, None, 2), kvstore).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5)

# A rank that is lost is our error: in a trainer, and for any later call.
for p in left.collect_params().values():
    p.zero_grad()
trainer = hvd.DistributedTrainer(left.collect_params(), "sgd")
with autograd.record():
    loss = hvd.allreduce(left(mx.nd.array(data[:4])), name="loss").sum()
if me == 1:
    os._exit(7)
loss.backward()
for what, call in (("trainer", lambda: trainer.step(4)), ("later", lambda: hvd.allreduce(x))):
    try:
        call()
    except hvd.HorovodInternalError as error:
        print(f"{what}: {type(error).__name__}", flush=True)
"""


WAITING = """
import hvdgloo._job.process  # before MXNet, whose end waits for all that it has to compute
import mxnet as mx
from mxnet import autograd
import hvdgloo.mxnet as hvd

hvd.init()
x = mx.nd.ones((2,))
x.attach_grad()
with autograd.record():
    losses = [hvd.allreduce(x, name=name).sum() for name in "ab"]
losses[hvd.rank()].backward()  # waits for a rank that never comes
hvd.allreduce_async_(mx.nd.ones((3,)), name=f"of {hvd.rank()}")
hvd.broadcast_object("so far", name="so far")
many = mx.nd.ones((2500, 2500))
mx.nd.dot(many, many)  # keeps the only thread that computes busy, so that the end of a gradient is not there at once
print("end", flush=True)
"""


@pytest.mark.parametrize("example", ["mxnet_digits", "mxnet_module_digits"])
def test_examples_learn_to_read(launcher: Launcher, example: str) -> None:
    done = launcher.run("-np", "2", "--", str(EXAMPLES / f"{example}.py"), timeout=58)
    check_learned(done)


def test_a_program_of_horovods_runs_without_an_edit(launcher: Launcher) -> None:
    arguments = ("-np", "2", "--as-horovod", "--grace-period", "30", launcher.script(PROGRAM))
    done = launcher.run(*arguments, timeout=58)
    assert done.returncode == 7, done.stdout + done.stderr
    said = [line.partition(">:")[2] for line in done.stdout.splitlines()]
    assert said == ["trainer: PeerLostError", "later: PeerLostError"], done.stdout + done.stderr


def test_gradients_that_still_wait_let_the_program_end(launcher: Launcher) -> None:
    one_thread = {"MXNET_CPU_WORKER_NTHREADS": "1"}
    done = launcher.run("-np", "2", launcher.script(WAITING), timeout=50, env=one_thread)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(">:")[2] for line in done.stdout.splitlines()] == ["end"] * 2
    assert "MXNetError" not in done.stderr, "what was shut down is in the log, and no trouble of MXNet's"
