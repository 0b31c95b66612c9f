"""The Params of estimators and models: Horovod's names and defaults, each with what sets and gets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvdgloo.spark.common.store import LocalStore
from hvdgloo.spark.torch import TorchEstimator, TorchModel
from hvdgloo.torch import Compression
from tests.support.estimators import InPlace

# Param, default, the name in its accessors, a value.
ESTIMATOR: list[tuple[str, Any, str, Any]] = [
    ("num_proc", None, "NumProc", 4),
    ("model", None, "Model", torch.nn.Linear(2, 1)),
    ("backend", None, "Backend", InPlace()),
    ("store", None, "Store", LocalStore("/shared/me")),
    ("optimizer", None, "Optimizer", object()),
    ("loss", None, "Loss", torch.nn.MSELoss()),
    ("metrics", [], "Metrics", [abs]),
    ("loss_weights", None, "LossWeights", [0.5, 0.5]),
    ("sample_weight_col", None, "SampleWeightCol", "weight"),
    ("gradient_compression", None, "GradientCompression", Compression.fp16),
    ("compress_sparse_cols", False, "CompressSparseCols", True),
    ("feature_cols", None, "FeatureCols", ["a", "b"]),
    ("label_cols", None, "LabelCols", ["c"]),
    ("continuous_cols", None, "ContinuousCols", ["a"]),
    ("categorical_cols", None, "CategoricalCols", ["b"]),
    ("validation", None, "Validation", 0.25),
    ("callbacks", [], "Callbacks", [abs]),
    ("batch_size", 32, "BatchSize", 64),
    ("val_batch_size", None, "ValBatchSize", 128),
    ("epochs", 1, "Epochs", 3),
    ("train_steps_per_epoch", None, "TrainStepsPerEpoch", 7),
    ("validation_steps_per_epoch", None, "ValidationStepsPerEpoch", 8),
    ("verbose", 1, "Verbose", 0),
    ("shuffle", True, "Shuffle", False),
    ("shuffle_buffer_size", None, "ShufflingBufferSize", 0),
    ("partitions_per_process", 10, "PartitionsPerProcess", 4),
    ("run_id", None, "RunId", "mine"),
    ("transformation_fn", None, "TransformationFn", abs),
    ("transformation_edit_fields", None, "TransformationEditFields", [("a", float, (), False)]),
    ("transformation_removed_fields", None, "TransformationRemovedFields", ["b"]),
    ("train_reader_num_workers", 2, "TrainReaderNumWorker", 1),
    ("val_reader_num_workers", 2, "ValReaderNumWorker", 3),
    ("reader_pool_type", "thread", "ReaderPoolType", "process"),
    ("inmemory_cache_all", False, "InMemoryCacheAll", True),
    ("label_shapes", None, "LabelShapes", [[-1, 1]]),
    ("random_seed", None, "RandomSeed", 42),
    ("use_gpu", True, "UseGpu", False),
    ("mp_start_method", None, "MpStartMethod", "spawn"),
    ("backward_passes_per_step", 1, "BackwardPassesPerStep", 2),
    ("data_module", None, "DataModule", dict),
    ("tensorflow_dataset_prefetch_buffer_size", 0, "TensorflowDatasetPrefetchBufferSize", 5),
    ("input_shapes", None, "InputShapes", [[-1, 2]]),
    ("loss_constructors", None, "LossConstructors", [abs]),
    ("train_minibatch_fn", None, "TrainMinibatchFn", abs),
]
MODEL: list[tuple[str, Any, str, Any]] = [
    ("history", None, "History", [{"epoch": 0}]),
    ("model", None, "Model", torch.nn.Linear(2, 1)),
    ("feature_columns", None, "FeatureColumns", ["a"]),
    ("label_columns", None, "LabelColumns", ["b"]),
    ("run_id", None, "RunId", "mine"),
    ("outputCols", [], "OutputCols", ["c"]),
    ("optimizer", None, "Optimizer", object()),
    ("input_shapes", None, "InputShapes", [[-1, 2]]),
    ("loss", None, "Loss", abs),
    ("loss_constructors", None, "LossConstructors", [abs]),
]


@pytest.mark.parametrize(("kind", "table"), [(TorchEstimator, ESTIMATOR), (TorchModel, MODEL)])
def test_every_param_has_a_default_a_setter_and_a_getter(spark: Any, kind: Any, table: Any) -> None:
    instance = kind()
    for name, default, accessor, value in table:
        param = instance.getParam(name)
        assert param.doc
        get = getattr(instance, f"get{accessor}")
        assert get() == default
        assert getattr(instance, f"set{accessor}")(value) is instance
        assert get() == value
        assert instance.getOrDefault(param) == value
        getattr(instance, f"set{accessor}")(None)
        assert get() == default
    assert {param.name for param in instance.params} - {"_metadata"} == {name for name, *_ in table}


def test_the_constructor_takes_every_param_but_what_is_keras_s(spark: Any) -> None:
    for name, _, accessor, value in ESTIMATOR:
        if name not in ("callbacks", "tensorflow_dataset_prefetch_buffer_size"):
            assert getattr(TorchEstimator(**{name: value}), f"get{accessor}")() == value


def test_the_misspelt_setter_is_kept(spark: Any) -> None:
    assert TorchModel().setLabelColoumns(["a"]).getLabelColumns() == ["a"]


def test_numbers_of_other_kinds_are_taken_as_what_they_are(spark: Any) -> None:
    import numpy as np

    estimator = TorchEstimator(epochs=np.int64(3), batch_size=16.0, loss_weights=(1, 2))
    assert [type(each) for each in (estimator.getEpochs(), estimator.getBatchSize())] == [int, int]
    assert estimator.getLossWeights() == [1.0, 2.0]
