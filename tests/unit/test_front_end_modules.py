"""The results of ``import hvdgloo.<framework>``: values, answers, and a clear message if the framework is missing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import pytest

from hvdgloo._collectives.frontend import Frontend
from tests.support.frameworks import need
from tests.support.launching import run_command


@pytest.fixture(params=["numpy", "torch", "mxnet"])
def hvd(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    need(request.param)
    module = importlib.import_module(f"hvdgloo.{request.param}")
    yield module
    module.shutdown()


def test_constants(hvd: ModuleType) -> None:
    assert [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 3, 4, 5]


def test_a_job_of_one_process(hvd: ModuleType) -> None:
    assert not hvd.is_initialized()
    assert not hvd.gloo_enabled()
    with pytest.raises(ValueError, match=r"hvd\.init"):
        hvd.rank()
    hvd.init()
    hvd.init()
    assert hvd.is_initialized()
    assert hvd.gloo_enabled()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    assert hvd.allgather_object("x") == ["x"]
    first = hvd.allgather_async(_tensor(hvd))
    assert first == 1
    hvd.synchronize(first)
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(hvd.HorovodInternalError):
        hvd.barrier()
    hvd.init()
    assert hvd.allgather_async(_tensor(hvd)) == 1  # numbers restart


def _tensor(hvd: ModuleType) -> Any:
    make = {
        "numpy": np.ones,
        "torch": lambda n: __import__("torch").ones(n),
        "mxnet": lambda n: need("mxnet").nd.ones((n,)),
    }
    return make[hvd.__name__.rpartition(".")[2]](2)


def test_what_was_built(hvd: ModuleType) -> None:
    assert hvd.gloo_built() is True
    assert hvd.nccl_built() < 30000  # 0 without a torch for GPUs
    for name in ("mpi_enabled", "mpi_built", "ddl_built", "ccl_built", "rocm_built"):
        assert getattr(hvd, name)() is False
    with pytest.raises(ValueError, match="MPI"):
        hvd.mpi_threads_supported()


def test_functions_travel_by_reference(hvd: ModuleType) -> None:
    """``from hvdgloo.torch import allreduce_async`` in a function that hvdgloo.run sends to workers."""
    allreduce = hvd.allreduce_async

    def function() -> Any:
        return allreduce

    for copy in (pickle.loads(pickle.dumps(allreduce)), cloudpickle.loads(cloudpickle.dumps(function))()):
        assert copy.__self__ is hvd.allreduce_async.__self__
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(Frontend(allreduce.__self__.adapter, lambda: None))  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("torch", "hvdgloo.torch needs PyTorch: pip install 'hvdgloo[torch]'"),
        ("tensorflow", "hvdgloo.tensorflow needs TensorFlow: pip install 'hvdgloo[tensorflow]'"),
        (
            "keras",
            "hvdgloo.keras needs Keras 3: pip install 'hvdgloo[keras]'; and a backend for it: pip install one of "
            "tensorflow, torch and jax, and name it by KERAS_BACKEND unless it is tensorflow",
        ),
        (
            "mxnet",
            "hvdgloo.mxnet needs MXNet 1.9.1 and a numpy that it works with: pip install mxnet==1.9.1 numpy==1.23.5",
        ),
        (
            "torch.ignite",
            "hvdgloo.torch.ignite needs pytorch-ignite 0.5.3 or later: pip install 'pytorch-ignite>=0.5.3'",
        ),
        ("torch.lightning", "hvdgloo.torch.lightning needs Lightning: pip install lightning"),
    ],
)
def test_a_missing_framework_says_what_to_install(name: str, text: str) -> None:
    """Pain 2."""
    parent, _, package = name.rpartition(".")
    if parent:
        pytest.importorskip(parent)
    program = (
        f"import sys; sys.modules['{package}'] = sys.modules['pytorch_{package}'] = None\n"
        f"try:\n    import hvdgloo.{name}\n"
        "except ImportError as error:\n    print(type(error).__name__, error)\n"
        "import hvdgloo.numpy as hvd, numpy\n"
        "hvd.init(); print(hvd.allreduce(numpy.ones(2)))\n"
    )
    done = run_command([sys.executable, "-W", "error", "-c", program], timeout=50)
    assert f"MissingDependencyError {text}" in done.stdout, done.stderr
    assert "[1. 1.]" in done.stdout, done.stderr


def test_a_numpy_that_is_too_new_for_mxnet_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "mxnet.py").write_text("import numpy\ndel numpy.bool_\nnumpy.bool_\n")  # as MXNet does with others
    program = "try:\n    import hvdgloo.mxnet\nexcept ImportError as error:\n    print(type(error).__name__, error)"
    done = run_command(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        timeout=50,
        check=True,
    )
    assert re.search(r"MissingDependencyError .* numpy==1.23.5, on .* \(here is numpy [\d.]+: ", done.stdout)


def test_importing_the_numpy_front_end_imports_no_framework() -> None:
    program = "import sys, hvdgloo.numpy; print('torch' in sys.modules)"
    done = run_command([sys.executable, "-c", program], timeout=50, check=True)
    assert done.stdout == "False\n"


@pytest.mark.filterwarnings("ignore:num_groups:DeprecationWarning")
@pytest.mark.parametrize("wrong", [{"num_groups": 2, "groups": 2}, {"num_groups": -1}, {"op": 77}])
def test_distributed_optimizer_of_the_module(wrong: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    import hvdgloo.torch as hvd
    from hvdgloo.torch.compression import Compression

    assert hvd.Compression is Compression
    model = torch.nn.Linear(2, 2)

    def plain() -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(ValueError, match=r"hvd\.init"):
        hvd.DistributedOptimizer(plain())
    hvd.init()
    try:
        with pytest.warns(DeprecationWarning, match="use groups") as record:
            optimizer = hvd.DistributedOptimizer(plain(), model.named_parameters(), num_groups=2)
        assert record[0].filename == __file__
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=model)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.zero_grad()  # one process has nothing in flight
        optimizer.step()
        with pytest.raises(ValueError):  # noqa: PT011 - each says something else
            hvd.DistributedOptimizer(plain(), **wrong)
    finally:
        hvd.shutdown()
