"""pytorch-ignite's horovod backend: auto_model, auto_optim, auto_dataloader, an engine, and its collectives."""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint
from ignite.metrics import Accuracy
from torch.utils.data import TensorDataset

import hvdgloo.torch as hvd
from hvdgloo._job import process
from hvdgloo._observe.samples import Progress
from hvdgloo.torch.ignite import LogHandler


def train(local_rank: int) -> None:
    assert idist.backend() == "horovod"
    assert idist.get_world_size() == 2
    torch.manual_seed(7)
    x = torch.randn(256, 8)
    y = (x.sum(dim=1) > 0).long()
    loader = idist.auto_dataloader(TensorDataset(x, y), batch_size=32, shuffle=True)
    torch.manual_seed(idist.get_rank())  # models differ until they are broadcast
    model = idist.auto_model(torch.nn.Linear(8, 2))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5))

    def step(engine: Engine, batch: list[torch.Tensor]) -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    evaluator = Engine(lambda engine, batch: (model(batch[0]), batch[1]))
    Accuracy().attach(evaluator, "accuracy")

    checkpoint = Checkpoint({"model": model}, lambda saved, name, metadata: None)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, checkpoint)
    LogHandler().attach(trainer, output_transform=lambda loss: {"loss": loss})
    LogHandler().attach_evaluator(evaluator, "validation")
    trainer.add_event_handler(Events.COMPLETED, lambda engine: evaluator.run(loader))
    trainer.run(loader, max_epochs=5)
    accuracy = evaluator.state.metrics["accuracy"]
    assert hvd.metrics().logged == {"loss": trainer.state.output, "validation/accuracy": accuracy}
    counters = process.group_counters()
    assert counters.progress.sample(0) == Progress(None, 256 // 32, 4, 5), counters.progress
    assert counters.saves["checkpoint"][0] == 5, counters.saves
    counters.progress = None
    trainer.state.max_epochs = None
    trainer.run(loader, max_iters=6)  # without epochs
    assert counters.progress.sample(0) == Progress(5, 6), counters.progress
    weights = idist.all_gather(next(model.parameters()).detach().flatten()[None])
    assert torch.equal(weights[0], weights[1]), weights
    assert evaluator.state.metrics["accuracy"] > 0.9, evaluator.state.metrics
    assert idist.all_reduce(idist.get_rank() + 1.0) == 3.0
    assert idist.broadcast("words" if idist.get_rank() == 0 else "", src=0) == "words"
    idist.barrier()
    print("as it should be", flush=True)


if __name__ == "__main__":
    with idist.Parallel(backend="horovod") as parallel:
        parallel.run(train)
