"""``hvdgloo-run --as-horovod``: a program written the way Horovod's documentation teaches runs without an edit."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from hvdgloo import as_horovod
from tests.support import warm
from tests.support.launching import Launcher, run_command
from tests.support.pages import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the program is one for torch")

PROGRAM = """
import multiprocessing
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import horovod
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import env, gloo_built, mpi_built, split_list
from horovod.torch.mpi_ops import Average, allreduce, poll, synchronize
from horovod.torch.functions import broadcast_object
from horovod.torch.compression import Compression
from horovod.torch.elastic import ElasticSampler


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        import horovod.torch as hvd  # in DataLoader workers, too

        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, generator=generator)
        return x, x.sum(dim=0, keepdim=True)


def in_a_child(queue):
    import horovod.torch as child

    queue.put((child.__name__, child.is_initialized()))


def main():
    hvd.init()
    torch.manual_seed(42)
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
    torch.set_num_threads(1)
    sampler = DistributedSampler(Numbers(), num_replicas=hvd.size(), rank=hvd.rank())
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.none,
        op=hvd.Average,
        gradient_predivide_factor=1.0,
    )
    assert "horovod" in str(type(optimizer))
    # Each way to start a child once, on one rank or the other: each costs an import of torch.
    for epoch, way in enumerate(["fork", "forkserver" if hvd.rank() == 1 else "fork"]):
        sampler.set_epoch(epoch)
        loader = DataLoader(Numbers(), batch_size=8, sampler=sampler, num_workers=1, multiprocessing_context=way)
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(data), target)
            loss.backward()
            optimizer.step()
    averaged = hvd.allreduce(loss.detach(), name="avg_loss").item()
    if hvd.rank() == 0:
        queue = multiprocessing.get_context("spawn").Queue()
        child = multiprocessing.get_context("spawn").Process(target=in_a_child, args=(queue,))
        child.start()
        name, initialised = queue.get(timeout=40)
        child.join()
    out = subprocess.run([sys.executable, "-c", "import horovod; print(horovod.__version__)"], capture_output=True)
    handle = hvd.allreduce_async(torch.ones(2), name="x", op=hvd.Sum)
    total = synchronize(handle)[0].item()
    words = broadcast_object("words")
    with env(A_VARIABLE="set"):
        known = gloo_built(), mpi_built(), split_list([1, 2, 3], 2), ProcessSet is hvd.ProcessSet
    assert known == (True, False, [[1, 2], [3]], True) and global_process_set is hvd.global_process_set
    if hvd.rank() == 0:
        print("child", name, initialised, out.stdout.decode().strip() == horovod.__version__ >= "0.19")
        print("total", total, words, averaged < 1.0, issubclass(HorovodInternalError, RuntimeError))
        try:
            from horovod.nothing import Anything
        except ImportError as error:
            print(error)


if __name__ == "__main__":
    main()
"""


def test_a_program_of_horovods_runs_without_an_edit(launcher: Launcher) -> None:
    program = launcher.script(PROGRAM, "train.py")
    done = launcher.run("-np", "2", "--as-horovod", warm.python(), program, timeout=55)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "[0]<stdout>:child hvdgloo.torch False True\n"
        "[0]<stdout>:total 2.0 words True True\n"
        "[0]<stdout>:hvdgloo, which replaces Horovod here, has no hvdgloo.nothing\n"
    )


def test_the_modules_are_the_very_same(launcher: Launcher) -> None:
    program = """
    import importlib, pickle, sys
    import horovod, hvdgloo
    import horovod.torch, horovod.torch.mpi_ops, horovod.common.exceptions
    import hvdgloo.torch, hvdgloo.torch.mpi_ops, hvdgloo.errors
    assert horovod.torch is hvdgloo.torch and sys.modules["horovod.torch"] is hvdgloo.torch
    assert hvdgloo.torch.__name__ == hvdgloo.torch.__spec__.name == "hvdgloo.torch"
    assert horovod.torch.mpi_ops.allreduce.__self__ is hvdgloo.torch.allreduce.__self__
    assert pickle.loads(pickle.dumps(horovod.torch.allreduce)).__self__ is hvdgloo.torch.allreduce.__self__
    assert horovod.run is hvdgloo.run and callable(horovod.run)
    from horovod.runner import run
    assert run is horovod.run and run.run is horovod.run.run
    try:
        horovod.torch.size()
    except RuntimeError as error:
        assert str(error).startswith("Horovod has not been initialized"), error
    importlib.reload(hvdgloo.errors)
    print("same")
    """
    done = launcher.run("-np", "1", "--as-horovod", launcher.script(program))
    assert "[0]<stdout>:same" in done.stdout, done.stderr


def test_without_the_flag_there_is_no_horovod(launcher: Launcher) -> None:
    done = launcher.run("-np", "1", launcher.script("import horovod"))
    assert "No module named 'horovod'" in done.stderr


@pytest.mark.parametrize("module", ["horovod.runner", "horovod.runner.launch"])
def test_commands_that_are_modules_run_under_horovods_name(module: str) -> None:
    folder = Path(as_horovod.__file__).parent
    done = run_command(
        [sys.executable, "-m", module, "--help"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert "hvdgloo-run" in done.stdout


def test_a_driver_that_is_started_by_plain_python_imports_horovod(tmp_path: Path) -> None:
    program = tmp_path / "driver.py"
    program.write_text("import sys, horovod.spark\nsys.stdout.write(f'{horovod.spark.__name__} {sys.argv[1:]}')")
    command = [sys.executable, "-m", "hvdgloo.as_horovod"]
    ran = run_command([*command, str(program), "--rows", "5"])
    assert ran.stdout == "hvdgloo.spark ['--rows', '5']", ran.stderr
    folder = run_command(command, check=True).stdout.strip()
    assert folder.split(os.pathsep)[0] == str(Path(as_horovod.__file__).parent)
    ran = run_command([sys.executable, str(program)], env={**os.environ, "PYTHONPATH": folder})
    assert ran.stdout == "hvdgloo.spark []", ran.stderr
