"""The ranks of a TorchEstimator: they do the same as one process would on all their batches; and runs that continue."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hvdgloo.run
import hvdgloo.torch as hvd
from hvdgloo._job import process
from hvdgloo.errors import ConfigError
from hvdgloo.spark.common._training import Reading, Training, TrainingResult
from hvdgloo.spark.common.datamodule import DataModule
from hvdgloo.spark.common.store import Store
from hvdgloo.spark.torch import _remote
from hvdgloo.spark.torch._remote import TorchJob, train, train_minibatch
from tests.support import estimators
from tests.support.launching import run_command

ROWS = 101
LR = 0.02
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=LR, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=LR),
}


def model(dropout: float = 0.0) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(12, 1)
        )


def job(net: torch.nn.Module, optimizer: torch.optim.Optimizer, **changes: Any) -> TorchJob:
    plain = TorchJob(net, optimizer, [torch.nn.MSELoss()], None, None, [], None, None, None)
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(str(tmp_path))
    estimators.write(made, estimators.linear(ROWS), rows_in_group=17)
    return made


def state(result: TrainingResult | None) -> dict[str, Any]:
    assert result is not None
    return torch.load(io.BytesIO(result.state), weights_only=True)


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


# On several ranks. Processes take seconds to start, so each number of ranks is started once, and trains everything.


@dataclasses.dataclass
class Seen:
    """The data of one rank in one training: its batches, and the learning rate at each."""

    batches: list[tuple[Any, Any]]
    rates: list[float]
    result: TrainingResult | None


def _on_ranks(trainings: dict[str, Training]) -> dict[str, Seen]:
    hvd.init()
    seen = {}
    for name, each in trainings.items():
        batches: list[tuple[Any, Any]] = []
        rates: list[float] = []

        def step(
            net: Any, optimizer: Any, transform: Any, loss: Any, inputs: Any, labels: Any, weights: Any,
            batches: Any = batches, rates: Any = rates,
        ) -> Any:  # fmt: skip
            batches.append((inputs[0].clone(), labels[0].clone()))
            rates.append(optimizer.param_groups[0]["lr"])
            return train_minibatch(net, optimizer, transform, loss, inputs, labels, weights)

        net = model(dropout=0.3 if name.startswith("dropout") else 0.0)
        optimizer = OPTIMIZERS["sgd" if name == "sgd" else "adam"](net.parameters())
        seen[name] = Seen(batches, rates, train(each, job(net, optimizer, train_minibatch_fn=step)))
    return seen


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Seen]]:
    store = Store.create(str(tmp_path_factory.mktemp("store")))
    estimators.write(store, estimators.linear(ROWS), rows_in_group=17)
    kinds = {"sgd": 3, "adam": 3, "dropout whole": 4, "dropout half": 2, "dropout on": 4}
    runs = {"dropout half": "parts", "dropout on": "parts"}
    trainings = {
        name: estimators.training(store, ROWS, run_id=runs.get(name, name), epochs=epochs)
        for name, epochs in kinds.items()
    }
    return hvdgloo.run.run(_on_ranks, (trainings,), np=request.param)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_ranks_train_as_one_process_does_on_all_their_batches(several: list[dict[str, Seen]], kind: str) -> None:
    net = model()
    optimizer = OPTIMIZERS[kind](net.parameters())
    optimizer.param_groups[0]["lr"] *= len(several)
    steps = [rank[kind].batches for rank in several]
    assert len({len(each) for each in steps}) == 1
    for batches in zip(*steps, strict=True):
        optimizer.zero_grad()
        losses = [torch.nn.functional.mse_loss(net(inputs), labels.reshape(-1, 1)) for inputs, labels in batches]
        (sum(losses) / len(losses)).backward()
        optimizer.step()
    trained = state(several[0][kind].result)["model"]
    assert difference(trained, net.state_dict()) < 1e-5
    assert difference(trained, model().state_dict()) > 0.01
    assert all(rank[kind].result is None for rank in several[1:])


def test_ranks_see_every_row_once_in_an_epoch(several: list[dict[str, Seen]]) -> None:
    labels = [label for rank in several for _, label in rank["sgd"].batches[: len(rank["sgd"].batches) // 3]]
    seen = np.sort(torch.cat(labels).numpy())
    np.testing.assert_allclose(seen, np.sort(estimators.linear(ROWS)["label"]).astype(np.float32))


def test_the_learning_rate_is_multiplied_while_it_trains_and_given_back_as_it_was(
    several: list[dict[str, Seen]],
) -> None:
    for name in ("sgd", "dropout on"):
        assert {rate for rank in several for rate in rank[name].rates} == {LR * len(several)}
        assert state(several[0][name].result)["optimizer"]["param_groups"][0]["lr"] == LR


def test_a_run_that_goes_on_ends_where_one_without_a_break_does(several: list[dict[str, Seen]]) -> None:
    whole, on = several[0]["dropout whole"], several[0]["dropout on"]
    assert whole.result is not None
    assert on.result is not None
    assert len(on.batches) == len(whole.batches) // 2, "the first two epochs were not trained again"
    assert difference(state(whole.result)["model"], state(on.result)["model"]) < 1e-6
    assert [each["epoch"] for each in on.result.history] == [0, 1, 2, 3]
    for one, other in zip(whole.result.history, on.result.history, strict=True):
        assert one["train"]["loss"] == pytest.approx(other["train"]["loss"], abs=1e-6)


# On one rank, in this process.


def test_history_has_losses_and_groups_of_metrics_for_each_epoch(store: Store) -> None:
    estimators.write(store, estimators.linear(20, seed=1), validation=True)
    net = model()

    def error(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - label).abs().mean()

    both = estimators.training(store, ROWS, validation_rows=20)
    result = train(both, job(net, torch.optim.Adam(net.parameters()), metrics=[error, [torch.nn.functional.mse_loss]]))
    assert result is not None
    assert [each["epoch"] for each in result.history] == [0, 1]
    for record in result.history:
        for part in (record["train"], record["validation"]):
            assert [list(group) for group in part["all_metrics"]] == [["group_0_label"], ["group_1_label"]]
            assert part["all_metrics"][1]["group_1_label"] == pytest.approx(part["loss"], rel=1e-5)
    # Of the validation of the last epoch nothing has changed since.
    data = estimators.linear(20, seed=1)
    with torch.no_grad():
        output = net(torch.from_numpy(data["features"].astype(np.float32))).reshape(-1).numpy()
    last = result.history[-1]["validation"]
    assert last["loss"] == pytest.approx(float(((output - data["label"]) ** 2).mean()), rel=1e-5)
    assert last["all_metrics"][0]["group_0_label"] == pytest.approx(np.abs(output - data["label"]).mean(), rel=1e-5)
    assert result.outputs == ((1,),)


def test_means_do_not_depend_on_how_many_batches_are_added_up_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven batches, the last of 5 rows: in pieces of 1, in pieces that leave a rest, and all at once."""
    histories = []
    for together in (1, 3, 7, 100):
        monkeypatch.setattr(_remote, "_TOGETHER", together)
        net = model()
        run = estimators.training(store, ROWS, run_id=f"by {together}")
        metrics = [torch.nn.functional.l1_loss]
        result = train(run, job(net, torch.optim.SGD(net.parameters(), lr=LR), metrics=metrics))
        assert result is not None
        epochs = [record["train"] for record in result.history]
        histories.append([[each["loss"], each["all_metrics"][0]["group_0_label"]] for each in epochs])
    for history in histories:
        np.testing.assert_allclose(history, histories[0], rtol=1e-12)


def test_backward_passes_add_up_to_one_step_and_the_rest_of_an_epoch_is_used(store: Store) -> None:
    """Seven batches of 16 rows: two steps of three batches each, and one on the last one."""
    steps: list[int] = []

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            steps.append(len(steps))
            return super().step(closure)

    net = model()
    accumulating = estimators.training(store, ROWS, epochs=1, backward_passes_per_step=3)
    train(accumulating, job(net, Counting(net.parameters(), lr=LR)))
    assert len(steps) == 3

    same, reader = model(), accumulating.batches(0, 1)
    optimizer = torch.optim.SGD(same.parameters(), lr=LR)
    with reader:
        batches = list(reader.epoch(0))
    for first in range(0, len(batches), 3):
        optimizer.zero_grad()
        for batch in batches[first : first + 3]:
            inputs, labels = (
                torch.from_numpy(each.astype(np.float32)) for each in (batch.features[0], batch.labels[0])
            )
            (torch.nn.functional.mse_loss(same(inputs), labels.reshape(-1, 1)) / 3).backward()
        optimizer.step()
    assert difference(net.state_dict(), same.state_dict()) < 1e-6


def test_a_step_of_the_users_is_called_with_as_many_arguments_as_it_takes(store: Store) -> None:
    calls: list[tuple[Any, ...]] = []

    def short(net: Any, optimizer: Any, transform: Any, loss: Any, inputs: Any, labels: Any, weights: Any) -> Any:
        calls.append(())
        return train_minibatch(net, optimizer, transform, loss, inputs, labels, weights)

    def long(net: Any, optimizer: Any, transform: Any, loss: Any, inputs: Any, labels: Any, *others: Any) -> Any:
        calls.append(others[1:])
        return train_minibatch(net, optimizer, transform, loss, inputs, labels, *others)

    steps = estimators.training(store, ROWS, epochs=1, train_steps=3)
    results = []
    for number, step in enumerate((short, long, None)):
        net = model()
        each = dataclasses.replace(steps, run_id=str(number), store=store.to_remote(str(number), 0))
        train(each, job(net, torch.optim.SGD(net.parameters(), lr=LR), train_minibatch_fn=step))
        results.append(net.state_dict())
    assert calls == [(), (), (), (1, 0), (1, 1), (1, 2)]
    assert difference(results[0], results[1]) == difference(results[0], results[2]) == 0


@pytest.mark.parametrize("steps", [3, 7, 12])
def test_an_epoch_has_as_many_steps_as_were_asked_for(store: Store, steps: int) -> None:
    """Seven show every row once: fewer stop early, and more go round."""
    seen = []

    def step(*arguments: Any) -> Any:
        seen.append(len(arguments[4][0]))
        return train_minibatch(*arguments)

    net = model()
    train(
        estimators.training(store, ROWS, epochs=1, train_steps=steps),
        job(net, torch.optim.SGD(net.parameters(), lr=LR), train_minibatch_fn=step),
    )
    assert len(seen) == steps
    assert min(seen) > 0


class Endless(DataModule):
    """Batches of four rows, and no end of them; none to validate on."""

    def train_data(self) -> Any:
        return itertools.repeat({"features": np.ones((4, 6)), "label": np.ones(4)})

    def val_data(self) -> None:
        return None


class Short(Endless):
    def train_data(self) -> Any:
        return itertools.islice(super().train_data(), 2)


@pytest.mark.parametrize(("steps", "expected"), [(3, 3), (None, 7)])
def test_a_data_module_is_held_to_the_steps_of_an_epoch(store: Store, steps: int | None, expected: int) -> None:
    with estimators.training(store, ROWS, train_steps=steps, reading=Reading(data_module=Endless)).batches(
        0, 1
    ) as reader:
        assert len(reader) == expected
        assert [len(batch) for batch in reader.epoch(0)] == [4] * expected


def test_a_data_module_that_does_not_give_what_it_should_is_told(store: Store) -> None:
    short = estimators.training(store, ROWS, train_steps=3, reading=Reading(data_module=Short))
    with (
        short.batches(0, 1) as reader,
        pytest.raises(ConfigError, match="data_module yielded 2 batches in an epoch of 3"),
    ):
        list(reader.epoch(0))
    none = estimators.training(store, ROWS, validation_rows=5, reading=Reading(data_module=Endless))
    with pytest.raises(ConfigError, match=r"Endless\.val_data\(\) returned None"):
        none.batches(0, 1, validation=True)


class Unlabelled(Endless):
    def train_data(self) -> Any:
        return itertools.repeat({"features": np.ones((4, 6))})


def test_a_column_that_the_user_s_code_leaves_out_is_named(store: Store) -> None:
    for reading, who in [
        (Reading(transformation_fn=lambda frame: frame.drop(columns="label")), "transformation_fn"),
        (Reading(data_module=Unlabelled), "data_module"),
    ]:
        with (
            estimators.training(store, ROWS, reading=reading).batches(0, 1) as reader,
            pytest.raises(ConfigError, match=f"no column 'label' in the batches: {who} returns features"),
        ):
            next(reader.epoch(0))


def test_inputs_and_labels_get_the_shapes_that_were_asked_for(store: Store) -> None:
    shapes = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            shapes.append(tuple(value.shape))
            return self.layer(value.mean(1))

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        assert label.shape == (len(output), 1, 1)
        return ((output.unsqueeze(-1) - label) ** 2).mean()

    net = Net()
    one = estimators.training(store, ROWS, epochs=1, train_steps=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    result = train(one, job(net, optimizer, losses=[loss], input_shapes=[[-1, 2, 3]], label_shapes=[[1, 1]]))
    assert shapes == [(16, 2, 3)]
    assert result is not None
    assert result.outputs == ((1,),)


def test_constructors_of_losses_are_given_what_they_ask_for_by_name(store: Store) -> None:
    given: list[Any] = []

    def constructor(model: Any, label_columns: Any, unrelated: int = 3) -> Any:
        given.append((model, label_columns, unrelated))
        return torch.nn.functional.mse_loss

    net = model()
    one = estimators.training(store, ROWS, epochs=1, train_steps=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    train(one, job(net, optimizer, losses=None, loss_constructors=[constructor]))
    assert given == [(net, ("label",), 3)]


def test_gradients_are_sent_compressed(store: Store) -> None:
    """On one rank nothing is sent, but the compressor sees the gradients."""
    net = model()
    one = estimators.training(store, ROWS, epochs=1, gradient_compression=hvd.Compression.fp16)
    compressors = []

    def step(*arguments: Any) -> Any:
        compressors.append(arguments[1]._hvd.options.compression)
        return train_minibatch(*arguments)

    train(one, job(net, torch.optim.SGD(net.parameters(), lr=LR), train_minibatch_fn=step))
    assert set(compressors) == {hvd.Compression.fp16}


def test_a_checkpoint_is_a_file_that_torch_reads_alone(store: Store) -> None:
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)
    before, _ = process.group_counters().saves.get("checkpoint", (0, 0.0))
    train(estimators.training(store, ROWS), job(net, optimizer))
    assert process.group_counters().saves["checkpoint"][0] - before == 2, "one mark on the charts for each epoch"
    path = Path(store.get_full_path(store.get_checkpoint_path("run")).removeprefix("file://"), "checkpoint")
    saved = torch.load(path, weights_only=True)
    assert difference(saved["model"], net.state_dict()) == 0
    assert saved["optimizer"]["state"].keys() == optimizer.state_dict()["state"].keys()


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = estimators.training(store, ROWS, epochs=3)
    written = type(whole.store).write_bytes
    times = []

    def full(self: Any, path: str, data: bytes) -> None:
        times.append(path)
        if len(times) == 3:
            raise OSError(28, "No space left on device")
        written(self, path, data)

    net = model()
    with monkeypatch.context() as patch:
        patch.setattr(type(whole.store), "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            train(whole, job(net, torch.optim.SGD(net.parameters(), lr=LR)))
    left = whole.resume()
    assert left is not None
    assert left.epoch == 2
    net = model()
    result = train(whole, job(net, torch.optim.SGD(net.parameters(), lr=LR)))
    assert result is not None
    assert [each["epoch"] for each in result.history] == [0, 1, 2]


def test_losses_and_metrics_are_logged_for_tensorboard(store: Store) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    estimators.write(store, estimators.linear(20, seed=1), validation=True)
    net = model()
    metrics = [torch.nn.functional.l1_loss]
    logged = estimators.training(store, ROWS, validation_rows=20)
    result = train(logged, job(net, torch.optim.SGD(net.parameters(), lr=LR), metrics=metrics))
    assert result is not None
    logs = Path(store.get_full_path(store.get_logs_path("run") or "").removeprefix("file://"))
    for part in ("train", "validation"):
        events = EventAccumulator(str(logs / part))
        events.Reload()
        losses = [event.value for event in events.Scalars("loss")]
        assert losses == pytest.approx([record[part]["loss"] for record in result.history])
        assert len(events.Scalars("group_0_label")) == 2


def test_logs_are_written_without_tensorflow(tmp_path: Path) -> None:
    """It may be installed, and would be imported by what TensorBoard itself writes with."""
    pytest.importorskip("tensorboard")
    program = (
        "import sys\nfrom hvdgloo.spark.common._logs import ScalarLogs\n"
        "for _ in range(2):\n    with ScalarLogs(sys.argv[1]) as logs:\n        logs.write(0, {'loss': 1.5})\n"
        "print('tensorflow' in sys.modules)"
    )
    done = run_command([sys.executable, "-c", program, str(tmp_path / "logs")], check=True, timeout=300)
    assert done.stdout == "False\n"
    assert len(list((tmp_path / "logs").iterdir())) == 2


def test_a_run_that_is_complete_is_not_trained_again(store: Store) -> None:
    whole = estimators.training(store, ROWS)
    net = model()
    first = train(whole, job(net, torch.optim.SGD(net.parameters(), lr=LR)))
    again = model()
    second = train(whole, job(again, torch.optim.SGD(again.parameters(), lr=LR)))
    assert first is not None
    assert second is not None
    assert first.history == second.history
    assert first.outputs == second.outputs
    assert difference(state(first)["model"], state(second)["model"]) == 0


def test_a_checkpoint_of_another_model_is_refused_with_the_parameter_that_differs(store: Store) -> None:
    net = model()
    signature = [(name, tuple(each.shape)) for name, each in net.named_parameters()]
    train(estimators.training(store, ROWS, signature=signature), job(net, torch.optim.SGD(net.parameters(), lr=LR)))
    other = copy.deepcopy(signature)
    other[2] = ("3.weight", (1, 13))
    with pytest.raises(ConfigError, match=r"'3\.weight' is of shape \(1, 12\), the model's of \(1, 13\).*run_id"):
        estimators.training(store, ROWS, signature=other).resume()
    other[2] = ("4.weight", (1, 12))
    with pytest.raises(ConfigError, match=r"a parameter '3\.weight' where the model has '4\.weight'"):
        estimators.training(store, ROWS, signature=other).resume()
    with pytest.raises(ConfigError, match="4 parameters, the model 3"):
        estimators.training(store, ROWS, signature=signature[:3]).resume()


def test_a_file_that_is_no_checkpoint_is_refused_with_its_path(store: Store) -> None:
    path = f"{store.get_checkpoint_path('run')}/checkpoint"
    store.write_text(path, "something else")
    with pytest.raises(ConfigError, match=r"runs/run/checkpoint is not a checkpoint"):
        estimators.training(store, ROWS).resume()


def test_random_numbers_of_the_caller_go_on_as_if_nothing_had_been(store: Store) -> None:
    net = model(dropout=0.5)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    train(estimators.training(store, ROWS, epochs=1), job(net, torch.optim.SGD(net.parameters(), lr=LR)))
    assert torch.equal(torch.rand(3), expected)
