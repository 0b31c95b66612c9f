"""Names used in data sets' metadata, and Horovod's constants."""

ARRAY = "array"
"""``intermediate_format`` of a column whose rows are arrays, or vectors at least one of which is dense."""

CUSTOM_SPARSE = "custom_sparse_format"
"""``intermediate_format`` of a column with only sparse vectors, if sparse columns were requested."""

NOCHANGE = "nochange"
"""``intermediate_format`` of all other columns."""

TOTAL_BUFFER_MEMORY_CAP_GIB = 4
"""Horovod's limit for shuffle buffers of all workers of a machine. Here a reader's window is bounded by bytes."""

METRIC_PRINT_FREQUENCY = 100
"""Number of steps between lines about a training's metrics."""
