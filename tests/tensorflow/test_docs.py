"""Statements of the pages about TensorFlow and Keras, tested."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import api_examples, warm
from tests.support.frameworks import need_installed
from tests.support.launching import Launcher
from tests.support.pages import outdated, program, run_program
from tests.support.tutorials import follow

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def test_the_api_pages_are_what_the_docstrings_say() -> None:
    assert outdated("api_tensorflow") == [], "run: python docs/generate_api_tensorflow.py"


@pytest.mark.parametrize(
    ("page", "containing"),
    [
        ("README.md", "DistributedGradientTape"),
        ("README.md", "model.fit"),
        ("docs/elastic.md", "KerasState(model, batch=0"),
        ("docs/elastic.md", "TensorFlowKerasState"),
    ],
)
def test_the_programs_of_the_pages_train(capsys: pytest.CaptureFixture[str], page: str, containing: str) -> None:
    """Alone; on several ranks the examples do the same."""
    run_program(page, containing)
    assert re.search(r"1 workers, loss 0\.0\d+", capsys.readouterr().out)


@pytest.mark.parametrize("containing", ["KerasState(model, batch", "TensorFlowKerasState"])
def test_the_elastic_programs_train(capsys: pytest.CaptureFixture[str], containing: str) -> None:
    run_program("docs/elastic.md", containing)
    assert re.search(r"trained by 1 workers, loss 0\.0\d+", capsys.readouterr().out)


def test_a_new_schedule_needs_a_new_train_function_as_the_page_about_elastic_jobs_says() -> None:
    import keras
    import numpy as np

    import hvdgloo.keras as hvd

    def schedule(rate: float) -> Any:
        return keras.optimizers.schedules.PiecewiseConstantDecay([1000], [rate, 0.0])

    def step() -> float:
        """The change of a weight whose gradient is -1."""
        before = model.get_weights()[0].item()
        model.fit(np.ones((4, 1)), np.full((4, 1), 100.0), batch_size=4, verbose=0)
        return float(model.get_weights()[0].item() - before)

    hvd.init()
    try:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(schedule(0.25))), loss="mae")
        assert step() == pytest.approx(0.25, rel=1e-3)
        model.optimizer.learning_rate = schedule(0.5)
        assert step() == pytest.approx(0.25, rel=1e-3)
        model.make_train_function(force=True)
        assert step() == pytest.approx(0.5, rel=1e-3)
    finally:
        hvd.shutdown()


@pytest.mark.timeout(300)  # several jobs, one after the other; mostly a tenth of it
def test_the_tutorial_of_tensorflow(tmp_path: Path) -> None:
    follow("docs/tutorial-tensorflow.md", tmp_path, warm.python(*warm.TENSORFLOW, **QUIET), QUIET)


@pytest.mark.timeout(300)
def test_the_tutorial_of_keras(tmp_path: Path) -> None:
    follow("docs/tutorial-keras.md", tmp_path, warm.python(*warm.TENSORFLOW, **QUIET), QUIET)


def test_the_recipe_for_jax_s_own_processes(launcher: Launcher) -> None:
    need_installed("jax")
    check = """
from jax.experimental import multihost_utils
total = multihost_utils.process_allgather(jax.numpy.array([jax.process_index() + 1.0])).sum()
assert (jax.process_count(), jax.device_count(), float(total)) == (2, 2, 3.0)
"""
    script = launcher.script(program("docs/launching.md", "jax.distributed.initialize") + check)
    done = launcher.run("-np", "2", script, env={"JAX_PLATFORMS": "cpu"}, timeout=60)
    assert done.returncode == 0, done.stderr
    said = sorted(line.partition(">:")[2] for line in done.stdout.splitlines() if "devices" in line)
    assert said == [f"process {rank} of 2, 2 devices" for rank in range(2)]


@pytest.mark.timeout(300)  # mostly a tenth of it
def test_every_example_of_tensorflow_prints_what_the_page_says(launcher: Launcher, tmp_path: Path) -> None:
    """Beside a compute job, which one of them uses and ends."""
    python = warm.python(*warm.TENSORFLOW, **QUIET)
    compute = ("-m", "hvdgloo.tensorflow.data.compute_worker", "service.json", "--timeout", "200")
    job = launcher.start("-np", "1", "--", python, *compute, env=QUIET)
    api_examples.run("tensorflow", tmp_path, python, QUIET, timeout=200)
    output, errors = job.communicate(timeout=50)
    assert job.returncode == 0, output + errors


@pytest.mark.timeout(300)
def test_every_example_of_keras_prints_what_the_page_says(tmp_path: Path) -> None:
    api_examples.run("keras", tmp_path, warm.python(*warm.TENSORFLOW, **QUIET), QUIET, timeout=200)
