"""MXNet, once for all tests of this folder; they are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import os

from tests.support.frameworks import need

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("mxnet") is not None:
    need("mxnet")
elif "mxnet" in os.environ.get("HVDGLOO_TEST_FRONTENDS", "").split(","):
    raise RuntimeError("HVDGLOO_TEST_FRONTENDS names mxnet, which is not installed")
else:
    collect_ignore_glob = ["test_*.py"]
