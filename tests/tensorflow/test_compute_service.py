"""A compute job prepares datasets for a training job: real processes of both, and what each does without the other."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import hvdgloo.tensorflow as hvd
from hvdgloo.errors import ConfigError, DataServiceError, InvalidArgumentError, WaitTimeoutError
from hvdgloo.rendezvous import RendezvousServer, generate_secret
from hvdgloo.tensorflow.data import (
    TfDataServiceConfig,
    compute_worker,
    compute_worker_fn,
    send_to_data_service,
    tf_data_service,
)
from hvdgloo.tensorflow.data import _reader as readers
from tests.support import warm
from tests.support.launching import Launcher
from tests.support.threads import at_once

TRAINING = """
import sys
import tensorflow as tf
import horovod.tensorflow as hvd
from horovod.tensorflow.data.compute_service import TfDataServiceConfig, tf_data_service

hvd.init()
rank, size = hvd.rank(), hvd.size()
config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
try:
    with tf_data_service(config, rank) as address:
        once = tf.data.Dataset.range(40).map(lambda x: 2 * x).send_to_data_service(
            config, rank, size, "distributed_epoch", reuse_dataset=True
        )
        parts = hvd.allgather_object([int(x) for x in once])
        for dispatcher in range(config.dispatchers):
            seen = sum(parts[dispatcher :: config.dispatchers], [])
            assert sorted(seen) == list(range(0, 80, 2)), (dispatcher, parts)

        numbers = tf.data.Dataset.range(1000)
        distributed = tf.data.experimental.service.distribute("distributed_epoch", address)
        assert sorted(int(x) for x in numbers.apply(distributed)) == list(range(1000))

        turns = numbers.repeat().send_to_data_service(config, rank, size, round_robin=True).take(4)
        parts = hvd.allgather_object([int(x) for x in turns])
        assert parts == [[0, 1, 2, 3]] * 2, parts
        hvd.barrier()

        print("done", rank, flush=True)
finally:
    config.compute_client(verbose=2).shutdown()
"""
COMPUTE = ("-np", "2", "--as-horovod", "--")
WORKER = ("-m", "horovod.tensorflow.data.compute_worker", "service.json")  # as Horovod's documentation starts it
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


def test_dispatchers_of_the_compute_job_until_the_training_job_shuts_it_down(launcher: Launcher) -> None:
    python = warm.python(*warm.TENSORFLOW, **QUIET)
    compute = launcher.start(*COMPUTE, python, *WORKER, "--dispatchers", "2", env=QUIET)
    training = ("-np", "2", "--as-horovod", python, launcher.script(TRAINING), "service.json")
    done = launcher.run(*training, env=QUIET, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line.partition(">:")[2] for line in done.stdout.splitlines()) == ["done 0", "done 1"]
    out, err = compute.communicate(timeout=15)
    assert compute.returncode == 0, out + err
    assert not (launcher.folder / "service.json").exists()


def shut_down(service: Service) -> None:
    """As the training job does, and the compute job on it, whose registry ends a little later."""
    service.client.shutdown()
    service.worker.stop()
    service.dispatcher.stop()


class Service:
    """A registry, a dispatcher and a worker in this process: what a compute job is made of, to be taken away."""

    def __init__(self, stack: ExitStack, timeout: float) -> None:
        key = generate_secret()
        self.registry = stack.enter_context(RendezvousServer(secret=key, size=1))
        self.config = TfDataServiceConfig(1, 1, "compute", self.registry.endpoints, key, timeout)
        self.client = self.config.compute_client()
        service = tf.data.experimental.service
        self.dispatcher = service.DispatchServer()
        address = self.dispatcher.target.partition("://")[2].replace("localhost", "127.0.0.1")
        self.worker = service.WorkerServer(service.WorkerConfig(address, worker_address="127.0.0.1:%port%"))
        stack.callback(self.end)
        self.client.register_dispatcher(0, address)
        self.client.register_worker_for_dispatcher(0, 0)

    def end(self) -> None:
        self.client.close()
        self.registry.stop()
        self.worker.stop()
        self.dispatcher.stop()


@pytest.fixture
def service() -> Iterator[Service]:
    with ExitStack() as stack:
        made = Service(stack, timeout=2.0)
        yield made
        readers.of(made.config).close()


def _numbers(service: Service, **options: Any) -> Any:
    return tf.data.Dataset.range(10**12).send_to_data_service(service.config, 0, 1, **options)


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (Service.end, "the data service is lost, see what the compute job printed: rendezvous server"),
        (shut_down, "the data service was shut down, and has no more data"),
    ],
    ids=["lost", "shut down"],
)
def test_a_reader_whose_service_is_gone_does_not_wait_for_ever(service: Service, end: Any, text: str) -> None:
    def read() -> None:
        with tf_data_service(service.config, 0):
            numbers = iter(_numbers(service))
            assert int(next(numbers)) == 0
            end(service)
            for _ in numbers:
                pass

    with pytest.raises(DataServiceError, match=text):
        read()
    with pytest.raises(DataServiceError, match=text):
        _numbers(service)


def test_ranks_of_a_dispatcher_take_turns(service: Service) -> None:
    """Two ranks would be two processes; here each is a dataset, and they count as one call each."""
    datasets = []
    for rank in range(2):
        readers.of(service.config).shared_jobs = 0
        numbers = tf.data.Dataset.range(10).repeat()
        datasets.append(send_to_data_service(numbers, service.config, rank, 2, round_robin=True).take(4))
    taken = at_once(*(lambda dataset=dataset: [int(x) for x in dataset] for dataset in datasets))
    assert taken == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_dispatcher_of_the_training_job_stays_for_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers.process, "is_initialized", lambda: True)
    monkeypatch.setattr(readers.process, "current", lambda: SimpleNamespace(size=2))
    key = generate_secret()
    with RendezvousServer(secret=key, size=1) as registry:
        config = TfDataServiceConfig(1, 1, "training", registry.endpoints, key, 20)
        client = config.compute_client()
        client.register_worker_for_dispatcher(0, 0)
        inside, leave = threading.Event(), threading.Event()

        def use() -> None:
            with tf_data_service(config, 0):
                inside.set()
                leave.wait(20)

        user = threading.Thread(target=use)
        user.start()
        assert inside.wait(20)
        port = int(client.wait_for_dispatcher_registration(0).rpartition(":")[2])
        leave.set()
        client.wait_for_leaving([0])
        with socket.create_connection(("127.0.0.1", port)):
            assert user.is_alive()
        client.say_left(1)
        user.join(timeout=20)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with pytest.raises(InvalidArgumentError, match="can be entered once"), tf_data_service(config, 0):
            pass
        client.close()
        readers.of(config).close()


def test_errors_of_the_programs_own_stay_as_they_are(service: Service) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError), tf_data_service(service.config, 0):
        tf.debugging.assert_equal(1, 2)


def test_a_compute_job_ends_when_it_is_not_read_any_more() -> None:
    key = generate_secret()
    with RendezvousServer(secret=key, size=1) as registry:
        client = TfDataServiceConfig(1, 1, "training", registry.endpoints, key, 0.4).compute_client()
        client.say_present(1.0)
        began = time.monotonic()
        with pytest.raises(DataServiceError, match=r"no rank of the training job has used the data service for 0\.4 s"):
            client.wait_for_shutdown_or_silence()
        assert time.monotonic() - began >= 0.4
        with pytest.raises(DataServiceError, match=r"dispatcher 3 of the data service did not start within 0\.1 s"):
            client.wait_for_dispatcher_registration(3, timeout=0.1)
        client.register_worker_for_dispatcher(0, 1)
        with pytest.raises(DataServiceError, match="the 2 workers of dispatcher 0 did not all start"):
            client.wait_for_dispatcher_worker_registration(0, 2, timeout=0.1)
        client.shutdown()
        client.wait_for_shutdown_or_silence()
        client.wait_for_shutdown()
        client.close()


def test_processes_of_a_compute_job_that_cannot_work_say_so() -> None:
    key = generate_secret()
    try:
        with RendezvousServer(secret=key, size=1) as registry:
            config = TfDataServiceConfig(1, 1, "training", registry.endpoints, key, 1.0)
            client = config.compute_client()
            client.register_dispatcher(0, "127.0.0.1:1")
            client.close()
            with pytest.raises(
                DataServiceError, match=r"127\.0\.0\.1 has not reached its dispatcher at 127\.0\.0\.1:1 "
            ):
                compute_worker_fn(config)
        with pytest.raises(ConfigError, match="needs a compute job of 6 processes, and this one has 1"):
            compute_worker_fn(replace(config, dispatchers=2, workers_per_dispatcher=3))
        with pytest.raises(ConfigError, match="1 processes, which cannot be divided evenly among 2 dispatchers"):
            compute_worker.main(2, "compute", "nowhere.json", 1.0)
    finally:
        hvd.shutdown()


def test_the_first_address_that_answers_is_used() -> None:
    key = generate_secret()
    with RendezvousServer(secret=key, size=1) as registry:
        addresses = ["127.0.0.1:1", registry.endpoint]
        client = TfDataServiceConfig(1, 1, "compute", addresses, key, 0.5).compute_client()
        client.register_dispatcher(0, "10.0.0.1:7")
        assert client.wait_for_dispatcher_registration(0) == "10.0.0.1:7"
        client.close()


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = TfDataServiceConfig(2, 3, "training", ["127.0.0.1:4711", "[::1]:4711"], b"\x00\xff" * 16, 7.5)
    path = tmp_path / "service.json"
    writer = threading.Timer(0.2, config.write, [path])
    writer.start()
    assert TfDataServiceConfig.read(path, wait_for_file_creation=True, timeout=10) == config
    writer.join()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    config.write(path)
    assert os.listdir(tmp_path) == ["service.json"]
    assert TfDataServiceConfig.from_dict(config.to_dict()) == config
    assert config.key.hex() not in repr(config)
    assert str(config.key) not in repr(config)


GOOD: dict[str, Any] = {
    "dispatchers": 1,
    "workers_per_dispatcher": 1,
    "dispatcher_side": "compute",
    "addresses": ["h:1"],
    "key": "ab",
    "timeout": 60,
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dispatchers": 0}, "dispatchers of a data service must be a whole number from 1, not 0"),
        ({"dispatchers": True}, "dispatchers of a data service must be a whole number from 1, not True"),
        ({"workers_per_dispatcher": 1.5}, "workers_per_dispatcher of a data service must be a whole number"),
        ({"dispatcher_side": "both"}, "dispatcher_side must be 'compute' or 'training', not 'both'"),
        ({"addresses": "h:1"}, "addresses must be a list of at least one host:port"),
        ({"addresses": []}, "addresses must be a list of at least one host:port"),
        ({"addresses": ["h"]}, "'h' in addresses of a data service is not host:port"),
        ({"addresses": [1]}, "1 in addresses of a data service is not host:port"),
        ({"key": ""}, "key of a data service must be bytes, and not empty"),
        ({"key": "xy"}, "this is not the configuration of a data service"),
        ({"timeout": 0}, "timeout of a data service must be a number of seconds above 0, not 0"),
        ({"timeout": float("nan")}, "timeout of a data service must be a number of seconds above 0, not nan"),
        ({"other": 1}, "this is not the configuration of a data service"),
    ],
)
def test_values_that_cannot_be_used_are_refused(change: dict[str, Any], text: str) -> None:
    assert TfDataServiceConfig.from_dict(GOOD).timeout == 60
    with pytest.raises(ConfigError, match=text):
        TfDataServiceConfig.from_dict({**GOOD, **change})


def test_files_that_hold_something_else_or_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    with pytest.raises(ConfigError, match="No such file or directory; the compute job writes it on its rank 0"):
        TfDataServiceConfig.read(path)
    with pytest.raises(WaitTimeoutError, match=r"was not there within 0\.1 s"):
        TfDataServiceConfig.read(path, wait_for_file_creation=True, timeout=0.1)
    for text in ("[]", "{"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="does not hold the configuration of a data service"):
            TfDataServiceConfig.read(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="this is not the configuration of a data service: 'key'"):
        TfDataServiceConfig.read(path)


def test_the_processing_mode_is_the_fifth_parameter(service: Service) -> None:
    readers.of(service.config).shared_jobs = 0
    numbers = tf.data.Dataset.range(4)
    taken = [int(x) for x in send_to_data_service(numbers, service.config, 0, 1, "parallel_epochs")]
    workers = service.config.workers_per_dispatcher
    assert sorted(taken) == sorted([*range(4)] * workers)


def test_calls_that_cannot_work_are_refused() -> None:
    config = TfDataServiceConfig(1, 1, "training", ["127.0.0.1:1"], b"key", 60)
    with pytest.raises(InvalidArgumentError, match="round_robin=True needs size"):
        send_to_data_service(tf.data.Dataset.range(2), config, 0, round_robin=True)
    with pytest.raises(InvalidArgumentError, match=r"inside `with tf_data_service"):
        send_to_data_service(tf.data.Dataset.range(2), config, 0)
    readers.of(config).close()
