"""Train on handwritten digits with processes that may join and leave.

    hvdgloo-run -np 4 --min-np 2 --failures-per-host 99 examples/torch_digits_elastic.py

The network and the data are the same as in torch_digits.py. Kill one of the processes while it trains: the others
continue from the last commit, and another one takes its place. The lines that make this program elastic are marked (1)
to (6); without hvdgloo-run it is a job of one process.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader
from torch_digits import Net, fingerprint, load_data, test_accuracy

import hvdgloo.torch as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small convolutional network on digits, with processes that come and go.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=15, help="how often each image is seen")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument(
        "--lr", type=float, default=0.02, help="learning rate of one process; multiplied by the number of processes"
    )
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of SGD")
    parser.add_argument("--commit-every", type=int, default=1, help="steps from one commit to the next")
    parser.add_argument("--seed", type=int, default=42, help="seed of initial weights and the order of images")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    train_set, test_set = load_data()

    model = Net()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # (1) A sampler that divides the rest of an epoch among the present processes.
    sampler = hvd.elastic.ElasticSampler(train_set, seed=args.seed)

    # (2) The whole state of the training. New processes receive it, and after a failure all return to the last commit.
    state: Any = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, sizes=[])

    # (3) Settings that depend on the number of processes are set again whenever it changes.
    def suit_size() -> None:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * hvd.size()

    state.register_reset_callbacks([suit_size])
    suit_size()

    # (4) This starts from the top each time, and continues from the state.
    @hvd.elastic.run
    def train(state: Any) -> None:  # a TorchState, with the attributes given above
        suit_size()  # the state's optimizer may come from a job of another size
        loader = DataLoader(train_set, args.batch_size, sampler=state.sampler)
        while state.epoch < args.epochs:
            model.train()
            for number, (images, digits) in enumerate(loader):
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images), digits)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                state.sampler.record_batch(number, len(images))
                state.step += 1
                # (5) A commit is never lost, and the job's processes may change here.
                if state.step % args.commit_every == 0:
                    state.commit()
            state.epoch += 1
            state.sizes.append(hvd.size())
            state.sampler.set_epoch(state.epoch)
            if hvd.rank() == 0:
                ranks = "1 rank" if hvd.size() == 1 else f"{hvd.size()} ranks"
                print(f"epoch {state.epoch}/{args.epochs} on {ranks}, the first is process {os.getpid()}", flush=True)
            state.commit()

    train(state)

    # (6) Afterwards the size of the job is fixed, as in any other program.
    test_loader = DataLoader(torch.utils.data.TensorDataset(*test_set[hvd.rank() :: hvd.size()]), batch_size=256)
    accuracy = test_accuracy(model, test_loader)
    fingerprints = hvd.allgather_object(fingerprint(model), name="fingerprint")
    if len(set(fingerprints)) != 1:
        raise SystemExit(f"ranks hold different parameters: {fingerprints}")
    if hvd.rank() == 0:
        print(f"test accuracy averaged over {hvd.size()} rank{'s' * (hvd.size() > 1)}: {accuracy:.2%}")
        sizes = [str(size) for size, before in zip(state.sizes, [0, *state.sizes], strict=False) if size != before]
        print(f"trained {state.step} steps, on {' -> '.join(sizes)} ranks")
        print(f"all ranks hold identical parameters ({fingerprints[0][:12]})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
