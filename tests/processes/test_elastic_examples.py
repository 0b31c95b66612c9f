"""Elastic programs for torch: in the shape that Horovod's documentation and examples teach, and our page's own."""

from __future__ import annotations

import pytest

from tests.support import warm
from tests.support.elastic_examples import follow_three_sizes, lose_one_and_get_another
from tests.support.elastic_launch import Job
from tests.support.launching import Launcher
from tests.support.pages import program

pytest.importorskip("torch")

pytestmark = [pytest.mark.extended, pytest.mark.timeout(150)]  # seconds; mostly a tenth of it

DIGITS = """
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--epochs", type=int, default=100_000)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--batches-per-commit", type=int, default=2)
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--fp16-allreduce", action="store_true")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)

images = torch.randn(64, 1, 8, 8)
train_dataset = TensorDataset(images, (images.mean(dim=(1, 2, 3)) > 0).long())
train_sampler = hvd.elastic.ElasticSampler(train_dataset)
train_loader = DataLoader(train_dataset, batch_size=args.batch_size, sampler=train_sampler)
test_sampler = torch.utils.data.distributed.DistributedSampler(
    train_dataset, num_replicas=hvd.size(), rank=hvd.rank()
)
test_loader = DataLoader(train_dataset, batch_size=32, sampler=test_sampler)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=3)
        self.dropout = nn.Dropout2d()
        self.fc = nn.Linear(36, 2)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.dropout(self.conv(x)), 2))
        return F.log_softmax(self.fc(x.view(-1, 36)), dim=1)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train_epoch(state):
    state.model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        state.optimizer.zero_grad()
        loss = F.nll_loss(state.model(data), target)
        loss.backward()
        state.optimizer.step()
        state.train_sampler.record_batch(batch_idx, args.batch_size)
        state.batch += 1
        if (batch_idx + 1) % args.batches_per_commit == 0:
            state.commit()
        elif (batch_idx + 1) % 3 == 0:
            state.check_host_updates()


def test():
    model.eval()
    loss = sum(F.nll_loss(model(data), target, reduction="sum").item() for data, target in test_loader)
    return metric_average(loss / len(test_sampler), "avg_loss")


def end_epoch(state):
    state.epoch += 1
    state.train_sampler.set_epoch(state.epoch)
    state.commit()


@hvd.elastic.run
def train(state):
    say("epoch", state.batch)
    began = state.batch  # which may be where an epoch has no more batches
    while state.epoch < args.epochs:
        train_epoch(state)
        loss = test()
        end_epoch(state)
        if metric_average(float(os.path.exists("over") and state.batch > began), "over"):
            return loss


model = Net()
lr_scaler = hvd.size() if not args.use_adasum else 1
optimizer = optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=0.5)
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)


def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, train_sampler=train_sampler, epoch=0, batch=0)
state.register_reset_callbacks([on_state_reset])
loss = train(state)
assert loss < 10.0
assert optimizer.param_groups[0]["lr"] == args.lr * 2
checksum = sum(parameter.double().sum() for parameter in model.parameters()).reshape(1)
assert torch.equal(hvd.allgather(checksum, name="checksum"), checksum.expand(2)), "all have the same model"
say("over", state.batch)
"""

BENCHMARK = """
import timeit

import numpy as np
import torch
import torch.nn.functional as F
import torch.optim as optim

import horovod.torch as hvd

BATCH_SIZE, LR, WARMUP_BATCHES, BATCHES_PER_ITER, MOST_ITERS = 4, 0.01, 2, 2, 100_000

hvd.init()
torch.set_num_threads(1)
convolution, norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
model = torch.nn.Sequential(convolution, norm, torch.nn.Flatten(), torch.nn.Linear(144, 10))
optimizer = optim.SGD(model.parameters(), lr=LR * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Average)
data = torch.randn(BATCH_SIZE, 3, 8, 8)
target = torch.LongTensor(BATCH_SIZE).random_() % 10


def benchmark_step(state):
    state.optimizer.zero_grad()
    loss = F.cross_entropy(state.model(data), target)
    loss.backward()
    state.optimizer.step()


@hvd.elastic.run
def run_benchmark(state):
    say("epoch", state.iter)
    if not state.warm:
        timeit.timeit(lambda: benchmark_step(state), number=WARMUP_BATCHES)
        state.warm = True
        state.commit()
    while state.iter < MOST_ITERS:
        seconds = timeit.timeit(lambda: benchmark_step(state), number=BATCHES_PER_ITER)
        state.img_secs.append(BATCH_SIZE * BATCHES_PER_ITER / seconds)
        state.iter += 1
        state.commit()
        if hvd.allreduce(torch.tensor(float(os.path.exists("over"))), name="over"):
            return


def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = LR * hvd.size()


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, img_secs=[], iter=0, warm=False)
state.register_reset_callbacks([on_state_reset])
run_benchmark(state)
assert len(state.img_secs) == state.iter, "what is appended after a commit is gone after a failure"
img_sec_mean = np.mean(state.img_secs)
img_sec_conf = 1.96 * np.std(state.img_secs)
assert img_sec_mean > 0.0
assert img_sec_conf >= 0.0
say("over", state.iter)
"""


@pytest.fixture
def job(launcher: Launcher) -> Job:
    return Job(launcher)


def test_pytorch_mnist_elastic(job: Job) -> None:
    lose_one_and_get_another(job, 1, DIGITS, warm.python())


def test_pytorch_synthetic_benchmark_elastic(job: Job) -> None:
    lose_one_and_get_another(job, 0, BENCHMARK, warm.python())


def test_the_pages_program_trains_at_the_rate_for_the_workers_who_are_there(job: Job) -> None:
    text = program("docs/elastic.md", "TorchState(model").replace("state.epoch < EPOCHS", 'not os.path.exists("over")')
    follow_three_sizes(job, text, 'optimizer.param_groups[0]["lr"]', 0.05, warm.python())
