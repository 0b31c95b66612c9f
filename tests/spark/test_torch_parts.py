"""Parts of the torch estimator that need neither Spark nor ranks: losses, how values are saved, columns of outputs."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn import functional

from hvdgloo.errors import ConfigError, DataError
from hvdgloo.spark.common._metadata import metadata_from_json
from hvdgloo.spark.common._predicting import Apply, Feature, _Map, as_arrow
from hvdgloo.spark.common.serialization import Refused
from hvdgloo.spark.torch._codecs import ModuleCodec, OptimizerCodec
from hvdgloo.spark.torch._losses import TotalLoss, constructed
from hvdgloo.spark.torch._remote import like, outputs_of, takes
from hvdgloo.spark.torch.estimator import TorchModel

OUTPUT = torch.tensor([[1.0], [2.0], [4.0]])
LABEL = torch.tensor([[0.0], [0.0], [1.0]])
WEIGHTS = torch.tensor([1.0, 0.5, 2.0])


@pytest.mark.parametrize(
    "loss",
    [torch.nn.MSELoss(), functional.mse_loss, lambda output, label, **kw: functional.mse_loss(output, label, **kw)],
)
def test_each_row_s_loss_is_multiplied_by_its_weight_before_the_mean(loss: Any) -> None:
    total = TotalLoss([loss], None, weighted_rows=True)([OUTPUT], [LABEL], WEIGHTS)
    assert total.item() == pytest.approx((1 * 1 + 4 * 0.5 + 9 * 2) / 3)


def test_a_loss_is_not_changed_by_being_weighted() -> None:
    loss = torch.nn.BCELoss()
    TotalLoss([loss], None, weighted_rows=True)
    assert loss.reduction == "mean"


def test_rows_of_several_numbers_have_one_weight() -> None:
    wide = torch.stack([OUTPUT[:, 0], OUTPUT[:, 0]], 1)
    total = TotalLoss([functional.mse_loss], None, weighted_rows=True)([wide], [torch.zeros_like(wide)], WEIGHTS)
    assert total.item() == pytest.approx((1 + 4 * 0.5 + 16 * 2) / 3)


def test_losses_of_labels_add_up_with_their_weights() -> None:
    losses = [functional.mse_loss, functional.l1_loss]
    one, other = functional.mse_loss(OUTPUT, LABEL), functional.l1_loss(OUTPUT, LABEL)
    equal = TotalLoss(losses, None, weighted_rows=False)([OUTPUT] * 2, [LABEL] * 2)
    assert equal.item() == pytest.approx((one + other).item() / 2)
    weighted = TotalLoss(losses, [3.0, 0.5], weighted_rows=False)([OUTPUT] * 2, [LABEL] * 2)
    assert weighted.item() == pytest.approx((3 * one + 0.5 * other).item())


def test_a_class_may_be_the_constructor_of_a_loss() -> None:
    """None of its arguments is known to it by our names."""
    (loss,) = constructed([torch.nn.MSELoss], {"model": None, "hvd": None})
    assert isinstance(loss, torch.nn.MSELoss)


class Callable7:
    def __call__(self, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> None: ...


@pytest.mark.parametrize(
    ("step", "number"),
    [
        (lambda a, b, c, d, e, f, g: None, 7),
        (Callable7(), 7),
        (lambda a, b, c, d, e, f, g, backward_passes_per_step, batch_idx: None, 9),
        (lambda a, b, c, d, e, f, g, backward_passes_per_step=1, batch_idx=0: None, 9),
        (lambda *arguments: None, 9),
        # Its own affair, not two more arguments of a step.
        (lambda a, b, c, d, e, f, g, seen=None, rates=None: None, 7),
        (lambda a, b: None, None),
        (lambda a, b, c, d, e, f, g, h: None, None),
    ],
)
def test_how_many_arguments_a_step_takes(step: Any, number: int | None) -> None:
    assert takes(step) == number


# Saving.


class Tied(torch.nn.Module):
    """Shares a parameter, and has a buffer outside of its state dict, and a tensor that is neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.offset = torch.full((3,), 0.5)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(value)) * self.scale + self.offset


@pytest.mark.parametrize("module", [Tied(), torch.nn.LSTM(3, 4), torch.nn.BatchNorm1d(3)], ids=["tied", "lstm", "norm"])
def test_a_module_is_what_it_was(module: torch.nn.Module) -> None:
    codec = ModuleCodec()
    files = codec.encode(module, None)
    value = torch.randn(5, 3)
    loaded = codec.decode(files, {}, trusted=True)
    for one, other in ((module, loaded),):
        expected, found = one.eval()(value), other.eval()(value)
        torch.testing.assert_close(expected, found)
    assert [(name, each.requires_grad) for name, each in loaded.named_parameters()] == [
        (name, each.requires_grad) for name, each in module.named_parameters()
    ]
    # No tensor's data are in the pickle.
    assert torch.load(io.BytesIO(files["weights.pt"]), weights_only=True)["state"].keys() == module.state_dict().keys()
    with pytest.raises(Refused):
        codec.decode(files, {}, trusted=False)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adadelta", "RMSprop"])
def test_an_optimizer_of_torch_s_needs_no_pickle(spark: Any, name: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    optimizer = getattr(torch.optim, name)(
        [{"params": net[1].parameters(), "lr": 0.3}, {"params": net[0].parameters()}], lr=0.1
    )
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    codec = OptimizerCodec()
    files = codec.encode(optimizer, TorchModel(model=net))
    other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    loaded = codec.decode(files, {"model": other}, trusted=False)
    assert type(loaded) is type(optimizer)
    assert [id(each) for each in loaded.param_groups[0]["params"]] == [id(each) for each in other[1].parameters()]
    assert [group["lr"] for group in loaded.param_groups] == [0.3, 0.1]
    assert str(loaded.state_dict()) == str(optimizer.state_dict())


@pytest.mark.parametrize("name", ["lr_scheduler", "Optimizer", "Any", "__loader__", "NotThere"])
def test_a_file_names_no_other_optimizer_than_torch_s(spark: Any, name: str) -> None:
    """Nothing else of torch's is called because a folder that is not trusted says so."""
    net = torch.nn.Linear(2, 1)
    codec = OptimizerCodec()
    files = codec.encode(torch.optim.SGD(net.parameters(), lr=0.1), TorchModel(model=net))
    facts = torch.load(io.BytesIO(files["pt"]), weights_only=True)
    changed = io.BytesIO()
    torch.save({**facts, "class": name}, changed)
    with pytest.raises(ConfigError, match=f"the saved optimizer is '{name}', which torch"):
        codec.decode({"pt": changed.getvalue()}, {"model": net}, trusted=False)


def test_an_optimizer_that_was_put_among_torch_s_is_the_user_s_own(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "Mine", Mine, raising=False)
    net = torch.nn.Linear(2, 1)
    assert list(OptimizerCodec().encode(Mine(net.parameters()), TorchModel(model=net))) == ["structure.pkl"]


@pytest.mark.parametrize("name", ["SparkContext", "json", "DataType.fromDDL", "NotThere"])
def test_a_file_names_no_other_type_than_spark_s(spark: Any, name: str) -> None:
    with pytest.raises(DataError, match=f"'{name}' is not a Spark type"):
        metadata_from_json(json.dumps({"x": {"spark_data_type": name}}))


# What a model returns.


def test_outputs_in_a_dictionary_go_by_the_labels_names() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    assert outputs_of({"b": b, "c": None, "a": a}, ["a", "b"]) == [a, b]
    assert outputs_of({"logits": a}, ["y"]) == [a]
    assert outputs_of((a, b), ["x", "y"]) == [a, b]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            {"logits": torch.ones(1), "hidden": torch.ones(1)},
            "dictionary of 'logits', 'hidden', but label_cols are 'y'",
        ),
        ((torch.ones(1), (torch.ones(1),)), "output 1 of the model is of type tuple: return a tensor"),
        ({"y": {"y": torch.ones(1)}}, "output 0 of the model is of type dict: return a tensor"),
        (None, "output 0 of the model is of type NoneType"),
    ],
)
def test_outputs_that_belong_to_no_label_are_told(outputs: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        outputs_of(outputs, ["y"])


class Mine(torch.optim.SGD):
    pass


def test_an_optimizer_of_the_user_s_is_over_the_loaded_model(spark: Any) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = Mine(net.parameters(), lr=0.1, momentum=0.5)
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    codec = OptimizerCodec()
    files = codec.encode(optimizer, TorchModel(model=net))
    other = torch.nn.Linear(2, 1)
    with pytest.raises(Refused):
        codec.decode(files, {"model": other}, trusted=False)
    loaded = codec.decode(files, {"model": other}, trusted=True)
    assert {id(each) for each in loaded.param_groups[0]["params"]} == {id(each) for each in other.parameters()}
    assert set(loaded.state) == set(other.parameters())


@pytest.mark.parametrize(
    ("output", "label"),
    [((4, 1), (4,)), ((4,), (4, 1)), ((4, 1, 3), (4, 3)), ((4, 1, 2, 3), (4, 6)), ((4, 6), (4, 2, 3)), ((), (1, 1))],
)
def test_a_label_gets_its_output_s_shape(output: tuple[int, ...], label: tuple[int, ...]) -> None:
    values = torch.arange(float(torch.Size(label).numel()))
    assert torch.equal(like(torch.zeros(output), values.reshape(label)), values.reshape(output))


def test_a_label_is_not_reshaped_over_axes_of_its_own() -> None:
    for output, label in (((4, 3, 2), (4, 2, 3)), ((3, 4), (4, 3)), ((8, 3), (4, 6))):
        with pytest.raises(ConfigError, match=r"equally many values in different axes.*label_shapes"):
            like(torch.zeros(output), torch.zeros(label))
    classes = torch.zeros(4, 1)
    assert like(torch.zeros(4, 3), classes) is classes


# Outputs.


def test_outputs_that_do_not_fit_their_column_are_named() -> None:
    with pytest.raises(ConfigError, match="3 rows of 'p' for a batch of 2"):
        as_arrow("p", np.zeros((3, 1)), "double", 2)
    with pytest.raises(ConfigError, match=r"returned \(4,\) numbers for a row of 'p', which takes one"):
        as_arrow("p", np.zeros((2, 4)), "double", 2)


@pytest.mark.parametrize("kind", ["vectorudt", "array", "double", "long", "boolean"])
def test_no_rows_are_a_column_of_no_rows(kind: str) -> None:
    assert len(as_arrow("p", np.zeros((0, 2)), kind, 0)) == 0


@pytest.mark.parametrize(("kind", "bits"), [("byte", 8), ("short", 16), ("integer", 32), ("long", 64)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_whole_numbers_are_rounded_and_end_at_the_ends_of_their_type(kind: str, bits: int, dtype: Any) -> None:
    values = np.array([-1e30, -2.6, 1.4, 1e30], dtype)
    assert as_arrow("p", values, kind, 4).to_pylist() == [-(2 ** (bits - 1)), -3, 1, 2 ** (bits - 1) - 1]


def test_a_truth_is_what_is_above_a_half() -> None:
    values = np.array([-3.0, 0.4, 0.6, 7.0])
    assert as_arrow("p", values, "boolean", 4).to_pylist() == [False, False, True, True]


def test_a_model_is_not_given_a_whole_arrow_batch_at_once() -> None:
    class Doubling:
        def load(self) -> Any:
            return lambda columns: [2 * columns[0], np.full(len(columns[0]), len(columns[0]))]

    model = SimpleNamespace(value=cloudpickle.dumps(Doubling()))
    doubling = _Map("a test's", model, (Feature("x", 0, 1),), (0,), ("p", "rows"), ("double", "long"))
    batch = pa.record_batch({"x": pa.array(np.arange(2500.0))})
    (result,) = doubling(iter([batch]))
    assert result.column(1).to_pylist() == (2 * np.arange(2500.0)).tolist()
    assert result.column(2).to_pylist() == [1024] * 2048 + [452] * 452


def test_rows_that_a_model_was_not_trained_with_are_named_where_it_fails() -> None:
    class Strict:
        def load(self) -> Apply:
            return lambda columns: [columns[0] @ np.ones(2)]

    model = SimpleNamespace(value=cloudpickle.dumps(Strict()))
    batch = pa.record_batch({"x": pa.array([[1.0, 2.0, 3.0]] * 4)})
    for size, error, message in [
        (2, DataError, r"'x' has 3 numbers in a row, but had 2 when the model was trained \(matmul"),
        (3, ValueError, "matmul"),
        (None, ValueError, "matmul"),
    ]:
        strict = _Map(f"of {size}", model, (Feature("x", 0, size),), (), ("p",), ("double",))
        with pytest.raises(error, match=message):
            list(strict(iter([batch])))
