"""Whole programs with a KerasEstimator on ranks in Spark's tasks: the example, one written for Horovod, and a service.

The latter two are processes of their own: they need Keras on TensorFlow, and other tests have it on torch.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from hvdgloo.errors import ConfigError
from hvdgloo.spark.keras._library import Library
from tests.support import spark as support
from tests.support.estimators import write_mnist
from tests.support.launching import clean_environment, run_command, wait_for
from tests.support.pages import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras about numpy


def test_the_example_recognises_digits(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "keras" not in sys.modules:
        Library("keras", "torch").use()  # the one that is imported fastest
    monkeypatch.setattr(SparkSession, "stop", lambda self: None)  # other tests go on with it
    program = ROOT / "examples/spark_keras_digits.py"
    monkeypatch.setattr(sys, "argv", [str(program), "--num-proc", "2", "--work-dir", str(tmp_path)])
    runpy.run_path(str(program), run_name="__main__")
    output = capsys.readouterr().out
    found = re.search(r"test accuracy with 2 ranks: ([0-9.]+)%", output)
    assert found, output
    assert float(found[1]) >= 96


def environment(*, horovod: bool) -> dict[str, str]:
    """Of a program that is a driver of Spark's, without what other tests have set."""
    path = [str(ROOT / "hvdgloo/as_horovod")] * horovod + [str(ROOT)]
    return {
        **{name: value for name, value in clean_environment().items() if name != "KERAS_BACKEND"},
        "PYTHONPATH": os.pathsep.join(path),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JDK_JAVA_OPTIONS": support.JVM_OPTIONS,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }


@pytest.mark.xdist_group("keras_spark_mnist")
def test_horovod_s_program_runs_unchanged(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist.bz2", 400)
    done = run_command(
        [
            sys.executable,
            str(ROOT / "tests/spark/programs/keras_spark_mnist.py"),
            "--num-proc",
            "2",
            "--batch-size",
            "32",
            "--epochs",
            "2",
            "--work-dir",
            str(tmp_path / "work"),
            "--data-dir",
            str(tmp_path),
        ],
        env=environment(horovod=True),
        cwd=tmp_path,
        timeout=2 * support.STARTUP_S,
    )
    found = re.search(r"Test accuracy: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert 0 <= float(found[1]) <= 1
    assert re.search(r"\[0\]<stdout>:.*Epoch 2/2", done.stdout), done.stdout
    (run,) = (tmp_path / "work" / "runs").iterdir()
    assert (run / "checkpoint.keras").exists()
    logs = {path.relative_to(run).parts[:2] for path in run.rglob("events.out.tfevents.*")}
    assert logs == {("logs", "train")}


TRAINING = """
import sys
import tensorflow as tf
import hvdgloo.tensorflow as hvd
from hvdgloo.tensorflow.data import TfDataServiceConfig, tf_data_service

hvd.init()
config = TfDataServiceConfig.read(sys.argv[1])
try:
    with tf_data_service(config, hvd.rank()):
        numbers = tf.data.Dataset.range(40).map(lambda x: 2 * x).send_to_data_service(config, hvd.rank(), hvd.size())
        assert sorted(int(x) for x in numbers) == list(range(0, 80, 2))
finally:
    config.compute_client().shutdown()
"""


@pytest.mark.xdist_group("tf_data_service")
def test_spark_s_tasks_prepare_the_data_of_a_training_job(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    file, env = tmp_path / "service.json", environment(horovod=False)
    options = "--master local[2] --conf spark.driver.host=127.0.0.1 --conf spark.ui.enabled=false pyspark-shell"
    compute = subprocess.Popen(
        [sys.executable, "-m", "hvdgloo.spark.tensorflow.compute_worker", str(file), "--dispatchers", "2",
         "--timeout", str(support.STARTUP_S)],
        env={**env, "PYSPARK_SUBMIT_ARGS": options}, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: file.exists() or compute.poll() is not None, support.STARTUP_S, "the service's file")
        assert compute.poll() is None, compute.communicate()[0]
        training = run_command(
            [sys.executable, "training.py", str(file)], env=env, cwd=tmp_path, timeout=support.STARTUP_S
        )
        assert training.returncode == 0, training.stdout + training.stderr
        output, _ = compute.communicate(timeout=support.STARTUP_S)
        assert compute.returncode == 0, output
        assert not file.exists()
    finally:
        compute.kill()
        compute.communicate()


def test_tasks_that_cannot_be_divided_among_dispatchers_are_refused(spark: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    from hvdgloo.spark.tensorflow.compute_worker import main

    with pytest.raises(ConfigError, match=r"has 2 processes, .* 3 dispatchers"):
        main(3, "compute", str(tmp_path / "service.json"), 60)
    assert not (tmp_path / "service.json").exists()
