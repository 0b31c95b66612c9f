"""TensorFlow, once for all tests of this folder; they are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import os

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("tensorflow") is None:
    if "tensorflow" in os.environ.get("HVDGLOO_TEST_FRONTENDS", "").split(","):
        raise RuntimeError("HVDGLOO_TEST_FRONTENDS names tensorflow, which is not installed")
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    # Ranks are threads here, and operators that wait for each other share one pool; ranks that are processes do not.
    tf.config.threading.set_inter_op_parallelism_threads(16)
    tf.config.threading.set_intra_op_parallelism_threads(1)
