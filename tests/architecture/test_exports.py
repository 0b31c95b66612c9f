"""Names are exported on purpose: the lists stand here too, so that changing one is a decision and not an accident."""

from __future__ import annotations

import importlib

import pytest

from tests.architecture.source import imports, library
from tests.support.frameworks import need
from tests.support.pages import ROOT, generator

COLLECTIVES = {
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "alltoall",
    "alltoall_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
}
BASICS = {
    "add_process_set",
    "remove_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "log",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
}
VALUES = {
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "global_process_set",
}
EVERY_FRONTEND = COLLECTIVES | BASICS | VALUES
SYNCHRONOUS = {
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
}
KERAS = (
    BASICS
    | VALUES
    | {
        "DistributedOptimizer",
        "PartialDistributedOptimizer",
        "allgather",
        "allgather_object",
        "allreduce",
        "broadcast",
        "broadcast_global_variables",
        "broadcast_object",
        "callbacks",
        "load_model",
        "reducescatter",
    }
)
CALLBACKS = {
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "LocalSGDCallback",
    "LogCallback",
    "MetricAverageCallback",
}
KERAS_ELASTIC = {
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
}
FRAMEWORK = {
    "hvdgloo.tensorflow": "tensorflow",
    "hvdgloo.keras": "keras",
    "hvdgloo.jax": "jax",
    "hvdgloo.mxnet": "mxnet",
    "hvdgloo.torch": "torch",
    "hvdgloo.torch.ignite": "ignite",
    "hvdgloo.torch.lightning": "lightning",
    "hvdgloo.spark.keras": "pyspark",
    "hvdgloo.spark.torch": "pyspark",
}

EXPORTS = {
    "hvdgloo": {"__version__"},
    "hvdgloo.ray": {"ElasticRayExecutor", "RayExecutor"},
    "hvdgloo.ray.elastic": {"ElasticRayExecutor", "RayHostDiscovery"},
    "hvdgloo.ray.runner": {"RayExecutor"},
    "hvdgloo.numpy": EVERY_FRONTEND | {"OuterOptimizer"},
    "hvdgloo.torch": EVERY_FRONTEND
    | {
        "DiLoCo",
        "DistributedOptimizer",
        "LocalSGD",
        "SyncBatchNorm",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "scale_learning_rate",
        "sparse_allreduce_async",
    },
    "hvdgloo.elastic": {"ObjectState", "State", "notification_manager", "run", "run_fn"},
    "hvdgloo.jax": BASICS
    | VALUES
    | (SYNCHRONOUS - {"broadcast_"})
    | {
        "Compression",
        "DistributedOptimizer",
        "broadcast_parameters",
        "distributed_gradients",
        "errors_of",
        "translated",
    },
    "hvdgloo.jax.elastic": {"JaxState", "ObjectState", "State", "run"},
    "hvdgloo.numpy.elastic": {"ObjectState", "State", "run"},
    "hvdgloo.mxnet.elastic": {"ObjectState", "State", "run"},
    "hvdgloo.torch.distributed": {"log", "metrics", "register"},
    "hvdgloo.torch.elastic": {"ElasticSampler", "TorchState", "run"},
    "hvdgloo.torch.ignite": {"LogHandler"},
    "hvdgloo.torch.lightning": {"LogCallback"},
    "hvdgloo.mxnet": EVERY_FRONTEND | {"DistributedOptimizer", "DistributedTrainer", "broadcast_parameters"},
    "hvdgloo.tensorflow": BASICS
    | VALUES
    | SYNCHRONOUS
    | {
        "BroadcastGlobalVariablesHook",
        "DistributedGradientTape",
        "DistributedOptimizer",
        "PartialDistributedGradientTape",
        "SyncBatchNormalization",
        "broadcast_global_variables",
        "broadcast_object_fn",
        "broadcast_variables",
        "local_rank_op",
        "local_size_op",
        "process_set_included_op",
        "rank_op",
        "size_op",
    },
    "hvdgloo.tensorflow.data": {
        "TfDataServiceConfig",
        "compute_worker_fn",
        "send_to_data_service",
        "tf_data_service",
    },
    "hvdgloo.tensorflow.elastic": {"TensorFlowKerasState", "TensorFlowState", "run"},
    "hvdgloo.keras": KERAS,
    "hvdgloo.tensorflow.keras": KERAS,
    "hvdgloo.keras.callbacks": CALLBACKS,
    "hvdgloo.tensorflow.keras.callbacks": CALLBACKS,
    "hvdgloo.keras.elastic": KERAS_ELASTIC,
    "hvdgloo.tensorflow.keras.elastic": KERAS_ELASTIC,
    "hvdgloo.data": {"AsyncDataLoaderMixin", "BaseDataLoader"},
    "hvdgloo.run": {"run"},
    "hvdgloo.spark": {"run", "run_elastic", "task"},
    "hvdgloo.spark.task": {"get_available_devices"},
    "hvdgloo.spark.common.backend": {"Backend", "LocalBackend", "SparkBackend", "default_num_proc"},
    "hvdgloo.spark.data": {"ParquetBatches"},
    "hvdgloo.spark.keras": {"KerasEstimator", "KerasModel"},
    "hvdgloo.spark.torch": {"TorchEstimator", "TorchModel"},
    "hvdgloo.spark.common.util": {
        "check_dataset",
        "check_shape_compatibility",
        "check_validation",
        "clear_training_cache",
        "data_type_to_str",
        "get_dataset_properties",
        "get_output_cols",
        "get_simple_meta_from_parquet",
        "get_spark_df_output_schema",
        "host_hash",
        "is_databricks",
        "metadata_from_json",
        "metadata_to_json",
        "prepare_data",
        "to_list",
    },
    "hvdgloo.rendezvous": {
        "SEAL_BYTES",
        "Alone",
        "ElasticClient",
        "HttpStore",
        "MemoryStore",
        "News",
        "Placement",
        "Registration",
        "RendezvousClient",
        "RendezvousServer",
        "Store",
        "WorkerInfo",
        "generate_secret",
        "host_identity",
        "seal",
        "unseal",
    },
    "hvdgloo.runner": set(),
}
"""Names that each public module offers with ``from ... import *``, and promises to keep."""

NO_LIST = {
    "hvdgloo.common": "holds modules that Horovod's programs import one by one",
    "hvdgloo.as_horovod": "for the launcher",
    "hvdgloo.as_horovod.horovod": "is imported as horovod",
}


def _exported(module: str) -> list[str]:
    for home, framework in FRAMEWORK.items():
        if f"{module}.".startswith(f"{home}."):
            need(framework)
    names: list[str] = importlib.import_module(module).__all__
    return names


@pytest.mark.parametrize("module", EXPORTS)
def test_exported_names(module: str) -> None:
    names = _exported(module)
    assert set(names) == EXPORTS[module]
    assert len(names) == len(set(names))
    assert names == sorted(names, key=lambda name: (not name.isupper(), name)), "constants come first, as for ruff"


@pytest.mark.parametrize("module", EXPORTS)
def test_every_exported_name_is_there(module: str) -> None:
    names = _exported(module)
    loaded = importlib.import_module(module)
    assert [name for name in names if not hasattr(loaded, name)] == []


@pytest.mark.parametrize(
    "module", ["hvdgloo.numpy", "hvdgloo.torch", "hvdgloo.tensorflow", "hvdgloo.keras", "hvdgloo.jax", "hvdgloo.mxnet"]
)
def test_exported_functions_are_documented(module: str) -> None:
    _exported(module)
    loaded = importlib.import_module(module)
    functions = {name: getattr(loaded, name) for name in COLLECTIVES | BASICS if name in EXPORTS[module]}
    assert [name for name, function in functions.items() if not (function.__doc__ or "").strip()] == []


def is_private(name: str) -> bool:
    """A name that begins with an underscore is private, and so is all within it; the launcher is a program, and all in
    it is its own affair."""
    return any(part.startswith("_") for part in name.split(".")) or name.startswith("hvdgloo.runner.")


PUBLIC_MODULES = {
    # Values that embedders pass, and errors that every caller may catch.
    "hvdgloo.config",
    "hvdgloo.errors",
    "hvdgloo.topology",
    "hvdgloo.types",
    "hvdgloo.version",
    "hvdgloo.data.data_loader_base",
    "hvdgloo.elastic.loop",
    "hvdgloo.elastic.news",
    "hvdgloo.elastic.state",
    # Under the names by which Horovod's programs import them.
    "hvdgloo.common.basics",
    "hvdgloo.common.elastic",
    "hvdgloo.common.exceptions",
    "hvdgloo.common.process_sets",
    "hvdgloo.common.util",
    "hvdgloo.mxnet.compression",
    "hvdgloo.mxnet.functions",
    "hvdgloo.mxnet.mpi_ops",
    "hvdgloo.spark.common",
    "hvdgloo.spark.common.cache",
    "hvdgloo.spark.common.constants",
    "hvdgloo.spark.common.datamodule",
    "hvdgloo.spark.common.estimator",
    "hvdgloo.spark.common.params",
    "hvdgloo.spark.common.serialization",
    "hvdgloo.spark.common.store",
    "hvdgloo.spark.keras",
    "hvdgloo.spark.keras.estimator",
    "hvdgloo.spark.tensorflow",
    "hvdgloo.spark.tensorflow.compute_worker",
    "hvdgloo.spark.torch.estimator",
    "hvdgloo.tensorflow.compression",
    "hvdgloo.tensorflow.data.compute_service",
    "hvdgloo.tensorflow.data.compute_worker",
    "hvdgloo.tensorflow.functions",
    "hvdgloo.tensorflow.gradient_aggregation",
    "hvdgloo.tensorflow.gradient_aggregation_eager",
    "hvdgloo.tensorflow.mpi_ops",
    "hvdgloo.tensorflow.sync_batch_norm",
    "hvdgloo.tensorflow.util",
    "hvdgloo.torch.compression",
    "hvdgloo.torch.elastic.sampler",
    "hvdgloo.torch.elastic.state",
    "hvdgloo.torch.functions",
    "hvdgloo.torch.mpi_ops",
    "hvdgloo.torch.optimizer",
    "hvdgloo.torch.sync_batch_norm",
}
"""Public modules besides those that ``EXPORTS`` has."""


def test_every_module_is_public_on_purpose_or_recognisably_private() -> None:
    public = {name for name in library() if not is_private(name)}
    assert public == set(EXPORTS) | set(NO_LIST) | PUBLIC_MODULES


@pytest.mark.parametrize("module", ["hvdgloo.torch", "hvdgloo.mxnet"])
def test_front_ends_spell_the_names_that_numpy_has_alike(module: str) -> None:
    """A program that changes its front-end changes one import; see ``Frontend``."""
    whatever_the_framework = {"OuterOptimizer"}  # takes the variables of all of them, and works on numpy's arrays
    assert set(_exported("hvdgloo.numpy")) - whatever_the_framework <= set(_exported(module))


@pytest.mark.parametrize("module", generator("stubs").MODULES)
def test_stubs_say_what_modules_export(module: str) -> None:
    _exported(module)
    stubs = generator("stubs")
    assert stubs.path(module).read_text(encoding="utf-8") == stubs.text(module), "run: python docs/generate_stubs.py"


def test_horovods_names_have_stubs_and_these_name_what_there_is() -> None:
    stubs = generator("stubs")
    there = {path: path.read_text(encoding="utf-8") for path in stubs.STAND_IN.rglob("*.pyi")}
    assert there == stubs.stand_in(), "run: python docs/generate_stubs.py"
    named = {line.split()[1] for text in there.values() for line in text.splitlines() if line.startswith("from ")}
    assert named <= set(EXPORTS) | set(NO_LIST) | PUBLIC_MODULES
    assert {"hvdgloo.torch.mpi_ops", "hvdgloo.tensorflow.keras.callbacks", "hvdgloo.run"} <= named


def test_every_module_that_binds_names_has_a_stub() -> None:
    """Type checkers do not see what ``bind`` does."""
    binding = {
        name
        for name, module in library().items()
        for entry in imports(module, frozenset(library()))
        if entry.target == "hvdgloo._collectives.names" and "bind(" in module.path.read_text(encoding="utf-8")
    }
    assert binding == set(generator("stubs").MODULES)
    assert {path.relative_to(ROOT) for path in (ROOT / "hvdgloo").rglob("*.pyi")} == {
        library()[name].path.with_suffix(".pyi").relative_to(ROOT) for name in binding
    }
