"""TorchEstimator and TorchModel on a Spark session: from a DataFrame to one with predictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.linalg import DenseVector, SparseVector, Vectors
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from hvdgloo.errors import ConfigError, DataError
from hvdgloo.spark.common.backend import LocalBackend, SparkBackend
from hvdgloo.spark.common.store import Store
from hvdgloo.spark.torch import TorchEstimator, TorchModel
from tests.support import estimators
from tests.support.estimators import InPlace

ROWS = 96


@pytest.fixture(scope="module")
def df(spark: Any) -> Any:
    """``y`` is what a linear function makes of the vector ``x``; ``a`` and ``b`` are the numbers in it."""
    data = estimators.linear(ROWS, width=2)
    rows = [
        (
            index,
            Vectors.dense(x) if index % 3 else Vectors.sparse(2, [0, 1], list(x)),
            *map(float, x),
            float(y),
            index % 4,
        )
        for index, (x, y) in enumerate(zip(data["features"], data["label"], strict=True))
    ]
    frame = spark.createDataFrame(rows, ["id", "x", "a", "b", "y", "kind"]).repartition(2).cache()
    assert frame.count() == ROWS
    return frame


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(str(tmp_path / "store"))


def net(inputs: int = 2, outputs: int = 1) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return torch.nn.Sequential(torch.nn.Linear(inputs, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs))


def estimator(store: Store | None, **changes: Any) -> TorchEstimator:
    model = changes.pop("model", None) or net()
    arguments = {
        "model": model,
        "backend": InPlace(),
        "store": store,
        **({} if "loss_constructors" in changes else {"loss": torch.nn.functional.mse_loss}),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 2,
        "verbose": 0,
        **changes,
    }
    if "optimizer" not in arguments:
        arguments["optimizer"] = torch.optim.Adam(model.parameters(), lr=0.05)
    return TorchEstimator(**{name: value for name, value in arguments.items() if value is not None})


def predicted(model: torch.nn.Module, *inputs: Any) -> Any:
    with torch.no_grad():
        return model(*(torch.from_numpy(np.stack(each).astype(np.float32)) for each in inputs)).numpy()


# Training.


def test_fit_trains_on_ranks_of_this_host_and_transform_predicts(df: Any, store: Store) -> None:
    """With processes that are started for it; all else here is on one rank in this process."""
    model = estimator(store, backend=LocalBackend(2), epochs=20, validation=0.25).fit(df)
    losses = [each["train"]["loss"] for each in model.getHistory()]
    assert losses[-1] < losses[0] / 5
    assert model.getHistory()[-1]["validation"]["loss"] < losses[0] / 3
    rows = model.transform(df).orderBy("id").collect()
    assert rows[0].__fields__ == ["id", "x", "a", "b", "y", "kind", "y__output"]
    expected = predicted(model.getModel(), [row.x.toArray() for row in rows]).reshape(-1)
    np.testing.assert_allclose([row.y__output for row in rows], expected, rtol=1e-5)


def test_the_model_and_the_optimizer_that_were_given_stay_as_they_were(df: Any, store: Store) -> None:
    fitting = estimator(store)
    given, before = fitting.getModel(), net().state_dict()
    model = fitting.fit(df)
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert not all(torch.equal(value, before[name]) for name, value in model.getModel().state_dict().items())
    assert fitting.getOptimizer().state == {}
    optimizer = model.getOptimizer()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert [id(each) for each in optimizer.param_groups[0]["params"]] == [
        id(each) for each in model.getModel().parameters()
    ]
    assert len(optimizer.state) == 4


def test_params_can_be_changed_for_one_call(df: Any, store: Store) -> None:
    fitting = estimator(store, epochs=2)
    assert len(fitting.fit(df, {fitting.epochs: 1}).getHistory()) == 1
    one, three = fitting.fit(df, [{fitting.epochs: 1}, {fitting.epochs: 3}])
    assert [len(one.getHistory()), len(three.getHistory())] == [1, 3]
    assert fitting.getEpochs() == 2


def test_a_run_goes_on_by_its_name_with_its_history(df: Any, store: Store) -> None:
    first = estimator(store, run_id="mine", epochs=2).fit(df)
    second = estimator(store, run_id="mine", epochs=3).fit(df)
    assert (first.getRunId(), second.getRunId()) == ("mine", "mine")
    assert second.getHistory()[:2] == first.getHistory()
    assert [each["epoch"] for each in second.getHistory()] == [0, 1, 2]
    whole = estimator(store, run_id="other", epochs=3).fit(df)
    for name, value in whole.getModel().state_dict().items():
        torch.testing.assert_close(second.getModel().state_dict()[name], value, atol=1e-6, rtol=0)


def test_a_failure_says_by_which_name_the_run_goes_on(df: Any, store: Store) -> None:
    def notes(error: type[BaseException], **changes: Any) -> str:
        def failing(*arguments: Any) -> Any:
            raise error("in the first batch")

        with pytest.raises(error, match="in the first batch") as caught:
            estimator(store, run_id="mine", train_minibatch_fn=failing, **changes).fit(df)
        return "".join(getattr(caught.value, "__notes__", caught.value.args[1:] or caught.value.args[0][18:]))

    assert not notes(ArithmeticError), "there is nothing yet to go on after"
    estimator(store, run_id="mine", epochs=1).fit(df)
    told = "run_id='mine': 1 of 3 epochs are done; fit() with this run_id continues after the last whole one"
    assert notes(ArithmeticError, epochs=3).strip() == told
    assert notes(KeyboardInterrupt, epochs=3).strip() == told


def test_runs_without_a_name_do_not_share_one(df: Any, store: Store) -> None:
    names = {estimator(store, epochs=1).fit(df).getRunId() for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("pytorch_") for name in names)


def test_several_features_and_labels_with_losses_of_their_own(df: Any, store: Store) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 4)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
            both = torch.stack([a, b], 1)
            return self.first(both), self.second(both)

    def kinds(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, label.long())

    def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == label).float().mean() if output.shape[1] > 1 else torch.zeros(())

    model = estimator(
        store,
        model=Two(),
        feature_cols=["a", "b"],
        label_cols=["y", "kind"],
        loss=[torch.nn.functional.mse_loss, kinds],
        loss_weights=[0.75, 0.25],
        metrics=[accuracy, [torch.nn.functional.mse_loss, kinds]],
        epochs=1,
    ).fit(df)
    (record,) = model.getHistory()
    groups = record["train"]["all_metrics"]
    assert [sorted(group) for group in groups] == [["group_0_kind", "group_0_y"], ["group_1_kind", "group_1_y"]]
    total = 0.75 * groups[1]["group_1_y"] + 0.25 * groups[1]["group_1_kind"]
    assert record["train"]["loss"] == pytest.approx(total, rel=1e-5)
    result = model.transform(df)
    assert isinstance(result.schema["y__output"].dataType, T.DoubleType)
    assert len(result.collect()[0].kind__output) == 4


def test_rows_count_by_their_weights(df: Any, store: Store) -> None:
    """Rows of weight 0 are as if they were not there."""
    weighted = df.withColumn("weight", F.when(F.col("id") < ROWS // 2, 1.0).otherwise(0.0))
    arguments: dict[str, Any] = {"epochs": 3, "batch_size": ROWS, "shuffle": False}
    all_rows = estimator(store, sample_weight_col="weight", loss=torch.nn.MSELoss(), **arguments).fit(weighted)
    # The mean over all rows has half of the gradient that the mean over those that count has.
    half = estimator(store, loss=lambda output, label: torch.nn.functional.mse_loss(output, label) / 2, **arguments)
    for name, value in half.fit(df.where(df.id < ROWS // 2)).getModel().state_dict().items():
        torch.testing.assert_close(all_rows.getModel().state_dict()[name], value, atol=1e-5, rtol=0)


def test_fit_on_parquet_that_spark_wrote(df: Any, store: Store) -> None:
    """Vectors included, and also where no data set has been prepared in this store."""
    df.select("x", "y").write.parquet(store.get_train_data_path())
    df.select("x", "y").limit(20).write.parquet(store.get_val_data_path())
    model = estimator(store, validation=0.1).fit_on_parquet()
    assert len(model.getHistory()) == 2
    assert "validation" in model.getHistory()[0]
    fitting = estimator(store)
    for nothing in ({}, {fitting.validation: 0.0}):
        without = fitting.fit_on_parquet({fitting.epochs: 1, **nothing})
        assert [sorted(each) for each in without.getHistory()] == [["epoch", "train"]]
    assert len(model.transform(df).where("y__output is not null").collect()) == ROWS


def test_data_are_transformed_as_they_are_read(df: Any, store: Store) -> None:
    def doubled(frame: Any) -> Any:
        frame["y"] = 2 * frame["y"]
        return frame

    seen = []

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        seen.append(label.detach())
        return torch.nn.functional.mse_loss(output, label)

    edited = [("y", np.float64, (), False)]
    fitting = estimator(store, feature_cols=["a"], model=Single(), loss=loss, epochs=1)
    fitting.setTransformationFn(doubled).setTransformationEditFields(edited).fit(df)
    labels = np.sort(torch.cat([each.reshape(-1) for each in seen]).numpy())
    np.testing.assert_allclose(labels, np.sort(2 * estimators.linear(ROWS, width=2)["label"]), rtol=1e-5)


class Single(torch.nn.Module):
    """Of one column of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.layer(value.reshape(-1, 1))


class Heads(torch.nn.Module):
    """Returns its outputs by name, in another order than the labels'."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        both = self.layer(value)
        return {"b": both[:, 1:], "features": both, "a": both[:, :1]}


def test_a_model_may_return_its_outputs_in_a_dictionary(df: Any, store: Store) -> None:
    trained = estimator(store, model=Heads(), label_cols=["a", "b"], validation=0.2, epochs=30).fit(df)
    rows = trained.transform(df).collect()
    off = np.array([(row.a__output - row.a, row.b__output - row.b) for row in rows])
    assert np.abs(off).mean() < 0.3
    with pytest.raises(ConfigError, match="a dictionary of 'b', 'features', 'a', but label_cols are 'y': name its"):
        estimator(store, model=Heads()).fit(df)


# Transforming.


def made_by_hand(spark: Any, model: torch.nn.Module | None = None, **changes: Any) -> TorchModel:
    """A model that no estimator has made, so without metadata."""
    arguments = {"model": model or net(), "feature_columns": ["x"], "label_columns": ["y"], "input_shapes": [[-1, 2]]}
    return TorchModel(**{**arguments, **changes})


def test_columns_beside_the_features_pass_unchanged(spark: Any, df: Any) -> None:
    result = made_by_hand(spark).transform(df)
    before, after = (sorted(frame.collect(), key=lambda row: row.id) for frame in (df, result.drop("y__output")))
    assert before == after
    assert {type(row.x) for row in after} == {DenseVector, SparseVector}


def test_output_columns_are_named_and_replace_what_was_there(spark: Any, df: Any) -> None:
    model = made_by_hand(spark).setOutputCols(["kind"])
    assert model.getOutputCols() == ["kind"]
    result = model.transform(df)
    assert result.columns == ["id", "x", "a", "b", "y", "kind"]
    assert isinstance(result.schema["kind"].dataType, T.DoubleType)
    with pytest.raises(ConfigError, match=r"outputCols are \['p', 'q'\], but the model has 1 labels"):
        model.setOutputCols(["p", "q"]).transform(df)


def test_a_name_may_have_dots_and_backticks_and_stand_there_twice(df: Any, store: Store) -> None:
    """``x.y`` is a column, whatever else is called ``x``; ``x`` is a struct in Spark's files, being a vector."""
    odd = df.withColumnsRenamed({"y": "y.of `x`", "a": "x.type", "id": "a`b"})
    fitting = estimator(store, feature_cols=["x", "x.type"], label_cols=["y.of `x`"], model=Second(), epochs=1)
    model = fitting.fit(odd)
    twice = odd.select("*", odd["b"])
    result = model.transform(twice)
    assert result.columns == ["a`b", "x", "x.type", "b", "y.of `x`", "kind", "b", "y.of `x`__output"]
    for row in result.collect():
        assert row[2] == pytest.approx(row[1].toArray()[0])
        assert row[3] == row[6] == pytest.approx(row[1].toArray()[1])
        with torch.no_grad():
            expected = model.getModel()(None, torch.tensor([row[2]], dtype=torch.float32))
        assert row[7] == pytest.approx(float(expected), rel=1e-4)


class Second(Single):
    """Of the second of two columns."""

    def forward(self, first: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(value)


def test_a_missing_column_is_named(spark: Any, df: Any) -> None:
    with pytest.raises(ConfigError, match="no column 'x', which the model needs"):
        made_by_hand(spark).transform(df.drop("x"))


def test_what_transform_cannot_be_given_is_told_before_spark_runs_it(spark: Any, df: Any) -> None:
    model = made_by_hand(spark)
    with pytest.raises(DataError, match="'x' holds strings"):
        model.transform(df.withColumn("x", F.lit("a")))
    with pytest.raises(ConfigError, match=r"transform\(df\): give a Spark DataFrame, not list"):
        model.transform([])


def test_a_column_can_be_several_features(df: Any, store: Store) -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return self.linear(one) + self.linear(other)

    model = estimator(store, model=Both(), feature_cols=["x", "x"], epochs=1).fit(df)
    assert model.transform(df.limit(2)).count() == 2


def test_outputs_have_the_types_of_their_labels(spark: Any, df: Any) -> None:
    labels = {
        "double": (T.DoubleType, 1.6),
        "float": (T.FloatType, 1.6),
        "long": (T.LongType, 2),
        "integer": (T.IntegerType, 2),
        "short": (T.ShortType, 2),
        "byte": (T.ByteType, 2),
        "boolean": (T.BooleanType, True),
        "decimal": (T.DecimalType, 1.6),
        "array": (T.ArrayType, [1.6]),
        "vector": (DenseVector, DenseVector([1.6])),
    }

    class Constant(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> Any:
            return [value.sum(1, keepdim=True) * 0 + 1.6] * len(labels)

    metadata = {name: {"spark_data_type": kind, "output_shape": [1]} for name, (kind, _) in labels.items()}
    model = made_by_hand(spark, Constant(), _metadata=metadata, label_columns=list(labels))
    (row,) = model.transform(df.where("id = 3")).collect()
    for name, (_, expected) in labels.items():
        output = row[f"{name}__output"]
        assert type(output) is type(expected)
        if isinstance(expected, (int, bool)):
            assert output == expected
        else:
            assert np.allclose(np.asarray(output), np.asarray(expected))


def test_transform_is_lazy_and_does_not_run_the_model_for_its_types(df: Any, store: Store, tmp_path: Path) -> None:
    model = estimator(store, epochs=1).fit(df)
    marks = tmp_path / "marks"
    model.setModel(Marking(net(), marks))
    result = model.transform(df.where("id < 5"))
    assert result.schema["y__output"].dataType == T.DoubleType()
    assert not marks.exists()
    assert len(result.collect()) == 5
    assert marks.exists()


class Marking(torch.nn.Module):
    """Leaves a line in a file whenever it has been unpickled or is called."""

    def __init__(self, inner: torch.nn.Module, marks: Path) -> None:
        super().__init__()
        self.inner = inner
        self.marks = str(marks)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._mark("loaded")

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self._mark("called")
        return self.inner(value)

    def _mark(self, text: str) -> None:
        import os

        with open(self.marks, "a") as file:
            file.write(f"{text} {os.getpid()}\n")


def test_a_python_worker_loads_a_model_once_for_all_its_tasks(spark: Any, df: Any, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    model = made_by_hand(spark, Marking(net(), marks))
    model._set(_metadata={"y": {"spark_data_type": T.DoubleType, "output_shape": [1]}})
    result = model.transform(df.repartition(8))
    for _ in range(2):
        assert len(result.collect()) == ROWS
    lines = marks.read_text().splitlines()
    loaded = [line for line in lines if line.startswith("loaded")]
    workers = {line.split()[1] for line in lines}
    assert len([line for line in lines if line.startswith("called")]) >= 16
    assert len(loaded) == len(set(loaded)) == len(workers)


def test_arrays_scalars_and_sparse_vectors_are_features(spark: Any, df: Any) -> None:
    class Sum(torch.nn.Module):
        def forward(self, *columns: torch.Tensor) -> torch.Tensor:
            return sum((column.reshape(len(column), -1).sum(1) for column in columns), torch.zeros(()))

    frame = df.select(
        "a", "x", F.array("a", "b").alias("both"), F.col("kind").cast("int"), (F.col("a") > 0).alias("up"), "y"
    )
    features = ["a", "x", "both", "kind", "up"]
    shapes = [[-1], [-1, 2], [-1, 2], [-1], [-1]]
    model = made_by_hand(spark, Sum(), feature_columns=features, input_shapes=shapes)
    for row in model.transform(frame).collect():
        expected = row.a + row.x.toArray().sum() + sum(row.both) + row.kind + row.up
        assert row.y__output == pytest.approx(expected, rel=1e-5)


# Pipelines, saving, loading.


def test_an_estimator_is_a_stage_of_a_pipeline_that_can_be_saved(df: Any, store: Store, tmp_path: Path) -> None:
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="features")
    pipeline = Pipeline(stages=[assembler, estimator(store, feature_cols=["features"])])
    fitted = pipeline.fit(df)
    expected = fitted.transform(df).orderBy("id").select("y__output").collect()

    pipeline.save(str(tmp_path / "pipeline"))
    again = Pipeline.load(str(tmp_path / "pipeline"))
    again.getStages()[1].setBackend(InPlace()).setStore(store)
    assert again.fit(df).transform(df).orderBy("id").select("y__output").collect() == expected

    fitted.save(str(tmp_path / "fitted"))
    loaded = PipelineModel.load(str(tmp_path / "fitted"))
    assert loaded.transform(df).orderBy("id").select("y__output").collect() == expected


def test_an_estimator_is_loaded_as_it_was_saved(spark: Any, df: Any, store: Store, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    model = net()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}], lr=0.01, momentum=0.9
    )
    saved = estimator(
        store, model=model, optimizer=optimizer, loss=[lambda output, label: (output - label).abs().mean()], epochs=7,
        label_shapes=[[-1, 1]], metrics=[torch.nn.functional.mse_loss], run_id="mine",
    )  # fmt: skip
    saved.save(path)
    loaded = TorchEstimator.load(path)
    assert loaded.uid == saved.uid
    assert (loaded.getBackend(), loaded.getStore()) == (None, None)
    assert (loaded.getEpochs(), loaded.getLabelShapes(), loaded.getRunId()) == (7, [[-1, 1]], "mine")
    assert [group["lr"] for group in loaded.getOptimizer().param_groups] == [0.1, 0.01]
    assert {id(each) for group in loaded.getOptimizer().param_groups for each in group["params"]} == {
        id(each) for each in loaded.getModel().parameters()
    }
    one, other = (each.setStore(store).setBackend(InPlace()).fit(df, {each.run_id: None}) for each in (saved, loaded))
    assert one.getHistory() == other.getHistory()


def test_nothing_is_unpickled_unless_the_folder_is_trusted(spark: Any, df: Any, store: Store, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    marks = tmp_path / "marks"
    model = estimator(store, epochs=1).fit(df)
    weights = model.getModel().state_dict()
    model.setModel(Marking(model.getModel(), marks))
    model.setOptimizer(torch.optim.Adam(model.getModel().parameters(), lr=0.03))
    model.save(path)
    marks.unlink(missing_ok=True)
    with pytest.raises(ConfigError, match=r"model, (optimizer, )?loss would be unpickled.*trusted=False, model=\.\.\."):
        TorchModel.load(path, trusted=False)
    assert not marks.exists()
    given = Marking(net(), marks)
    loaded = TorchModel.load(path, trusted=False, model=given, loss=torch.nn.functional.mse_loss)
    assert loaded.getModel() is given
    assert all(torch.equal(value, given.inner.state_dict()[name]) for name, value in weights.items())
    assert loaded.getOptimizer().param_groups[0]["lr"] == 0.03
    assert loaded.getHistory() == model.getHistory()
    assert not marks.exists()
    with pytest.raises(ConfigError, match="weights do not fit the given model"):
        TorchModel.load(path, trusted=False, model=net(), loss=torch.nn.functional.mse_loss)


def test_a_path_that_is_taken_is_replaced_only_on_request(spark: Any, store: Store, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    estimator(store, epochs=1).save(path)
    with pytest.raises(ConfigError, match="already exists"):
        estimator(store, epochs=2).save(path)
    estimator(store, epochs=3).write().overwrite().save(path)
    assert TorchEstimator.load(path).getEpochs() == 3
    with pytest.raises(ConfigError, match=r"contains a .*TorchEstimator, which TorchModel"):
        TorchModel.load(path)
    with pytest.raises(ConfigError, match="does not exist"):
        TorchModel.load(path + "-elsewhere")
    with pytest.raises(ConfigError, match="TorchEstimator has no 'modle'"):
        TorchEstimator.load(path, modle=net())


def test_a_copy_is_independent_and_shares_the_model(store: Store) -> None:
    original = estimator(store, epochs=2)
    copied = original.copy({original.batch_size: 8})
    copied.setEpochs(5)
    assert (original.getEpochs(), original.getBatchSize()) == (2, 16)
    assert (copied.getEpochs(), copied.getBatchSize()) == (5, 8)
    assert copied.getModel() is original.getModel()


# Bad input: errors before training, each naming what to change.


@dataclasses.dataclass
class Bad:
    message: str
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: Callable[[Any], Any] = lambda df: df
    error: type[Exception] = ConfigError


def _other() -> torch.optim.Optimizer:
    return torch.optim.SGD(net().parameters(), lr=0.1)


def _unwritten(df: Any) -> Any:
    """Rows that cannot be computed: an attempt to write them fails with another error."""
    return df.withColumn("y", F.expr("raise_error('the rows were computed')").cast("double"))


BAD = {
    "no model": Bad(r"model is not set: TorchEstimator\(model=", {"model": None}),
    "a model of nothing": Bad("trains a torch.nn.Module", {"model": "net", "optimizer": _other()}),
    "no optimizer": Bad("optimizer is not set", {"optimizer": None}),
    "an optimizer of nothing": Bad("must be an optimizer of torch.optim", {"optimizer": "adam"}),
    "an optimizer of another model": Bad("optimizer belongs to another model", {"optimizer": _other()}),
    "no loss": Bad("loss is not set", {"loss": None}),
    "losses for other labels": Bad("loss has 2 functions for 1 label_cols", {"loss": [torch.nn.MSELoss()] * 2}),
    "a loss that is none": Bad("'mse' is not a function", {"loss": "mse"}),
    "a class of losses": Bad(r"loss: MSELoss is a class: .*MSELoss\(\)", {"loss": torch.nn.MSELoss}),
    "a loss without rows": Bad(
        "does not take reduction='none'", {"loss": lambda output, label: output.mean(), "sample_weight_col": "a"}
    ),
    "a constructor that asks for more": Bad(
        "requires 'data', but can take only model", {"loss_constructors": lambda data: None}
    ),
    "no store": Bad("store is not set", {"store": None}),
    "no labels": Bad("label_cols is empty", {"label_cols": []}),
    "no features": Bad("feature_cols is empty", {"feature_cols": []}),
    "an unknown column": Bad("no column 'z'", {"feature_cols": ["z"]}, error=DataError),
    "an unknown label": Bad("no column 'z'", {"label_cols": ["z"]}, error=DataError),
    "strings": Bad("'x' holds strings", data=lambda df: df.withColumn("x", F.lit("a")), error=DataError),
    "nulls": Bad(
        "'y' is null in 3 rows", data=lambda df: df.withColumn("y", F.expr("if(id < 3, null, y)")), error=DataError
    ),
    "ragged arrays": Bad(
        "'x' has rows of different lengths .2 elements in 95 rows, 1 elements in 1 row",
        data=lambda df: df.withColumn("x", F.expr("if(id = 7, array(a), array(a, b))")),
        error=DataError,
    ),
    "too many numbers for the model": Bad(
        "does not accept features of these shapes: 'x' of 3 numbers per row.*shapes cannot be multiplied",
        data=lambda df: df.withColumn("x", F.array("a", "b", "y")),
    ),
    "shapes that do not fit": Bad("'x' has 2 values in a row.*-1, 3", {"input_shapes": [[-1, 3]]}, error=DataError),
    "shapes for other columns": Bad(
        "input_shapes has 2 shapes for 1 feature_cols", {"input_shapes": [[-1, 2], [-1, 2]]}
    ),
    "more outputs than labels": Bad("the model has 1 outputs for 2 label_cols", {"label_cols": ["y", "a"]}),
    "fewer rows than ranks": Bad(
        "1 training rows.* 2 ranks", {"backend": LocalBackend(2)}, lambda df: df.limit(1), DataError
    ),
    "nothing to validate with": Bad(
        "'none' leaves 0 validation rows", {"validation": "none"}, lambda df: df.withColumn("none", F.lit(0)), DataError
    ),
    "an unknown column to validate with": Bad("no column 'z'", {"validation": "z"}, error=DataError),
    "lazy modules": Bad("lazy modules", {"model": torch.nn.LazyLinear(1), "optimizer": _other()}),
    "a step with other arguments": Bad(
        r"train_minibatch_fn must take \(model,", {"train_minibatch_fn": lambda a, b: None}
    ),
    "a DataFrame of another library": Bad(
        r"fit\(df\): give a Spark DataFrame, not pandas.DataFrame; spark.createDataFrame",
        data=lambda df: df.limit(1).select("y").toPandas(),
    ),
    "no DataFrame": Bad(r"fit\(df\): give a Spark DataFrame, not NoneType", data=lambda df: None),
    "too few task slots": Bad(r"num_proc=9.: Spark runs 2 tasks at once", {"backend": SparkBackend(9)}, _unwritten),
    "bytes": Bad("'x' is binary", data=lambda df: df.withColumn("x", F.encode(F.lit("a"), "utf-8"))),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_what_cannot_be_trained_is_refused_before_ranks_start(df: Any, store: Store, case: Bad) -> None:
    class Untouched(InPlace):
        def run(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("ranks were started")

    changes = {"backend": Untouched(), **case.changes}
    fitting = estimator(
        changes.pop("store", store), **{name: value for name, value in changes.items() if value is not None}
    )
    for name, value in case.changes.items():
        if value is None:
            fitting._set(**{name: None})
    with pytest.raises(case.error, match=case.message):
        fitting.fit(case.data(df))


CONTRADICTIONS = {
    "backend and num_proc exclude each other": {"num_proc": 2},
    "loss and loss_constructors exclude each other": {
        "loss": torch.nn.MSELoss(),
        "loss_constructors": [torch.nn.MSELoss],
    },
    "loss_weights has 2 numbers for 1 label_cols": {"loss_weights": [0.5, 0.5]},
    "callbacks are not supported by a TorchEstimator": {"callbacks": [print]},
    "batch_size=0: it must be": {"batch_size": 0},
    "epochs='3': it must be a whole number": {"epochs": "3"},
    "backward_passes_per_step=0: it must be": {"backward_passes_per_step": 0},
    "validation=1.5: give a fraction": {"validation": 1.5},
    r"feature_cols='x': give a list of names: \['x'\]": {"feature_cols": "x"},
    "input_shapes=.*it must be a list of shapes": {"input_shapes": [2]},
    "reader_pool_type='fork': it must be 'thread'": {"reader_pool_type": "fork"},
    "shuffle='no': it must be True or False": {"shuffle": "no"},
    "transformation_fn='f': it must be a function": {"transformation_fn": "f"},
    "loss_weights=.*finite": {"loss_weights": [float("nan")]},
    "metrics=3: it must be a list": {"metrics": 3},
    "run_id='': it must be a nonempty string": {"run_id": ""},
    r"run_id='\.\./up': it must name a directory below": {"run_id": "../up"},
    "backend=2: give a SparkBackend": {"backend": 2},
    "store='/shared/me': make a store of the path: Store.create": {"store": "/shared/me"},
    "store=3: it must be a store, such as Store.create": {"store": 3},
    "gradient_compression='fp16': give one of the framework's hvd.Compression": {"gradient_compression": "fp16"},
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_what_can_never_be_is_refused_by_the_constructor(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimator(**{"store": None, **CONTRADICTIONS[message]})


def test_a_checkpoint_of_another_model_is_refused(df: Any, store: Store) -> None:
    estimator(store, run_id="mine").fit(df)
    wider = torch.nn.Sequential(torch.nn.Linear(2, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    with pytest.raises(ConfigError, match=r"run 'mine' is of another model: its parameter '0\.weight'"):
        estimator(store, run_id="mine", model=wider).fit(df)
