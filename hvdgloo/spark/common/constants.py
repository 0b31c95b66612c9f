"""Names that metadata of data sets use, and Horovod's constants."""

ARRAY = "array"
"""``intermediate_format`` of a column whose rows are arrays, or vectors of which any is dense."""

CUSTOM_SPARSE = "custom_sparse_format"
"""``intermediate_format`` of a column of sparse vectors alone, if sparse columns were asked for."""

NOCHANGE = "nochange"
"""``intermediate_format`` of all other columns."""

TOTAL_BUFFER_MEMORY_CAP_GIB = 4
"""Horovod's limit for shuffle buffers of all workers of a machine. Here a reader's window is bounded by bytes."""

METRIC_PRINT_FREQUENCY = 100
"""Steps between lines about a training's metrics."""
