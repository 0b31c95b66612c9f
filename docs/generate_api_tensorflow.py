"""Write the pages of the API about TensorFlow and Keras from the docstrings of what these front-ends export.

python docs/generate_api_tensorflow.py
"""

from __future__ import annotations

from generate_api import Page, Section, pages, write

SHARED = """\
Those which are the same in all front-ends (`init`, `rank`, process sets, ...) are [here](api-start.md), and the errors
that any collective may raise [here](api-collectives.md). [All names](api.md).
"""
ABOUT = """\
These are names that `import hvdgloo.tensorflow as hvd` provides; for `fit` take [Keras](api-keras.md)'s.
"""
ABOUT_DATA = """\
[tf.data's service](tf-data-service.md) explains how these work together. [All names](api.md).
"""
ABOUT_KERAS = """\
These are names that `import hvdgloo.keras as hvd` provides; `hvdgloo.tensorflow.keras` is the same module.
"""

TENSORFLOW = (
    "allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "broadcast_", "alltoall",
    "reducescatter", "grouped_reducescatter", "join", "broadcast_variables", "broadcast_global_variables",
    "broadcast_object", "broadcast_object_fn", "allgather_object", "DistributedGradientTape",
    "PartialDistributedGradientTape", "DistributedOptimizer", "BroadcastGlobalVariablesHook", "SyncBatchNormalization",
    "Compression", "rank_op", "local_rank_op", "size_op", "local_size_op", "process_set_included_op",
)  # fmt: skip
DATA = ("TfDataServiceConfig", "tf_data_service", "send_to_data_service", "compute_worker_fn")
KERAS = (
    "DistributedOptimizer", "PartialDistributedOptimizer", "load_model", "allreduce", "allgather", "broadcast",
    "reducescatter", "broadcast_object", "allgather_object", "broadcast_global_variables", "Compression",
)  # fmt: skip
CALLBACKS = (
    "BroadcastGlobalVariablesCallback", "MetricAverageCallback", "LearningRateScheduleCallback",
    "LearningRateWarmupCallback", "LocalSGDCallback", "LogCallback", "BestModelCheckpoint",
)  # fmt: skip
ELASTIC = ("run", "TensorFlowState", "TensorFlowKerasState")
KERAS_ELASTIC = (
    "run", "KerasState", "CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback",
)  # fmt: skip


def texts() -> dict[str, str]:
    """Return the pages by the names of their files."""
    tensorflow = (
        Section("`hvdgloo.tensorflow`", "hvdgloo.tensorflow", TENSORFLOW),
        Section("`hvdgloo.tensorflow.elastic`", "hvdgloo.tensorflow.elastic", ELASTIC),
    )
    data = (Section("`hvdgloo.tensorflow.data`", "hvdgloo.tensorflow.data", DATA),)
    keras = (
        Section("`hvdgloo.keras`", "hvdgloo.keras", KERAS),
        Section("`hvdgloo.keras.callbacks`", "hvdgloo.keras.callbacks", CALLBACKS),
        Section("`hvdgloo.keras.elastic`", "hvdgloo.keras.elastic", KERAS_ELASTIC),
    )
    return pages(
        __file__,
        Page("tensorflow", "TensorFlow", "tensorflow", ABOUT + SHARED, tensorflow),
        Page("tensorflow-data", "the service of tf.data", "tensorflow", ABOUT_DATA, data),
        Page("keras", "Keras", "keras", ABOUT_KERAS + SHARED, keras),
    )


if __name__ == "__main__":
    write(texts())
