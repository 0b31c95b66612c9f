"""Spark for tests: sessions on real components, all of which come from pyspark's wheel.

One process has one SparkContext at a time, and one JVM for all of them. A session takes seconds to start, so the next
module that asks for the same kind gets the one that is there; ``tests/spark/conftest.py`` has the fixtures.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil

from tests.support.pages import ROOT

STARTUP_S = 300.0
"""Seconds that a start may take on a busy machine with cold disks."""

LOCAL = "local[2]"
CLUSTER = "local-cluster[2,1,1024]"
"""Two executors that are JVMs of their own, with one core each."""

COMPILER_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""The JVM's compiler threads take from two cores more than they give in so short a life."""

ARCHIVE = Path(sys.prefix, "share", "spark.jsa")
"""Classes as a JVM has them in memory, if ``spark_archive`` has made it in this environment."""

_ARCHIVED = ARCHIVE.exists() and " " not in str(ARCHIVE)  # it would be two options
JVM_OPTIONS = f"{COMPILER_OPTIONS} -XX:SharedArchiveFile={ARCHIVE}" if _ARCHIVED else COMPILER_OPTIONS
"""Options that make Spark's JVMs cheap in tests."""

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.executor.memory": "700m",
    "spark.sql.shuffle.partitions": "2",
    # What Spark would collect at most: results are not to go that way.
    "spark.driver.maxResultSize": "16m",
    "spark.driver.extraJavaOptions": JVM_OPTIONS,
    "spark.executor.extraJavaOptions": JVM_OPTIONS,
}

DEFAULT_JVM = {"spark.driver.extraJavaOptions": "", "spark.executor.extraJavaOptions": ""}
"""Settings for sessions in which something is measured: the JVM compiles as it does by default."""


def missing() -> str:
    """Return Spark's missing requirements; empty if there are none."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed"
    home = os.environ.get("JAVA_HOME")
    if shutil.which("java") is None and not (home and os.access(f"{home}/bin/java", os.X_OK)):
        return "there is no java"
    return ""


class Sessions:
    """The sessions of this process, of which one is there at a time.

    Args:
        home: where Spark is; a folder that goes with the sessions, if nothing is given.
    """

    def __init__(self, home: Path | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hvdgloo-spark-"))
        self._home = home or spark_home(self._folder)
        self._kind: tuple[str, Mapping[str, str]] | None = None
        self._session: Any = None

    def get(self, master: str, settings: Mapping[str, str] | None = None) -> Any:
        """A session on ``master``: the one that is there if it is of that kind and works, else a new one."""
        kind = (master, dict(settings or {}))
        if self._kind == kind and _works(self._session):
            return self._session
        self.stop()
        self._prepare()
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.master(master).appName("hvdgloo-tests")
        for name, value in {**_SETTINGS, "spark.local.dir": str(self._folder / "local"), **kind[1]}.items():
            builder = builder.config(name, value)
        self._session, self._kind = builder.getOrCreate(), kind
        self._session.sparkContext.setLogLevel("OFF")
        return self._session

    def _prepare(self) -> None:
        """Set the environment that the JVM reads at its start."""
        os.environ["SPARK_HOME"] = str(self._home)
        os.environ["PYSPARK_PYTHON"] = sys.executable
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(ROOT) not in path:  # executors start in folders of their own
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), *path]))

    def stop(self) -> None:
        """End the session that is there, with its executors. The JVM stays for the next one."""
        if self._session is not None:
            self._session.stop()
        self._session = self._kind = None

    def close(self) -> None:
        """Nothing is left after this: no JVM, no file."""
        self.stop()
        pyspark: Any = sys.modules.get("pyspark")
        gateway = pyspark and pyspark.SparkContext._gateway
        if gateway:
            gateway.shutdown()
            gateway.proc.stdin.close()
            try:
                gateway.proc.wait(STARTUP_S)
            except subprocess.TimeoutExpired:
                gateway.proc.kill()
                gateway.proc.wait()
            pyspark.SparkContext._gateway = pyspark.SparkContext._jvm = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _works(session: Any) -> bool:
    context = session and session.sparkContext
    return bool(context and context._jsc is not None and not context._jsc.sc().isStopped())


def spark_home(folder: Path) -> Path:
    """The wheel's Spark under a folder of ours: workers keep their files there, and not among installed packages."""
    import pyspark

    home = folder / "home"
    if not home.exists():
        home.mkdir()
        for entry in Path(pyspark.__file__).parent.iterdir():
            if entry.name in ("bin", "jars", "sbin", "python", "data"):
                (home / entry.name).symlink_to(entry)
    return home


class Standalone:
    """A master and workers of Spark's own cluster manager, started as its scripts start them.

    Each worker offers a core and a GPU, whose address is the worker's number.

    Attributes:
        master: its URL.
        settings: of a session whose tasks take a GPU each.
    """

    settings: ClassVar[Mapping[str, str]] = {
        "spark.executor.resource.gpu.amount": "1",
        "spark.task.resource.gpu.amount": "1",
    }

    def __init__(self, workers: int, folder: Path) -> None:
        self._folder = folder
        self._home = spark_home(folder)
        self._environ = {
            **os.environ,
            "SPARK_HOME": str(self._home),
            "SPARK_PID_DIR": str(folder / "pids"),
            "SPARK_LOG_DIR": str(folder / "logs"),
            "SPARK_WORKER_DIR": str(folder / "work"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_JAVA_OPTS": JVM_OPTIONS,
        }
        self._environ.pop("SPARK_NO_DAEMONIZE", None)
        gpus = folder / "gpus"
        gpus.write_text("""#!/bin/sh\nprintf '{"name": "gpu", "addresses": ["%s"]}' "$NUMBER_OF_WORKER"\n""")
        gpus.chmod(0o755)
        self._environ["SPARK_WORKER_OPTS"] = (
            f"-Dspark.worker.resource.gpu.amount=1 -Dspark.worker.resource.gpu.discoveryScript={gpus}"
        )
        port = _free_port()
        self.master = f"spark://127.0.0.1:{port}"
        self._started: list[tuple[str, int]] = []
        try:
            address = ["--host", "127.0.0.1"]
            self._start("master.Master", 1, [*address, "--port", str(port), "--webui-port", "0"])
            for number in range(1, workers + 1):
                self._start(
                    "worker.Worker", number, [*address, "--webui-port", "0", "-c", "1", "-m", "1g", self.master]
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Standalone:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, name: str, number: int, arguments: Sequence[str]) -> None:
        self._started.append((name, number))
        self._daemon("start", name, number, arguments)

    def _daemon(self, action: str, name: str, number: int, arguments: Sequence[str] = ()) -> None:
        script = self._home / "sbin/spark-daemon.sh"
        command = ["bash", str(script), action, f"org.apache.spark.deploy.{name}", str(number), *arguments]
        environ = {**self._environ, "NUMBER_OF_WORKER": str(number)}
        subprocess.run(
            command, env=environ, check=True, timeout=STARTUP_S, stdin=subprocess.DEVNULL, capture_output=True
        )

    def close(self) -> None:
        running = []
        for file in (self._folder / "pids").glob("*.pid"):
            try:
                running.append(psutil.Process(int(file.read_text())))
            except psutil.NoSuchProcess:
                pass  # it has ended by itself
        for name, number in reversed(self._started):
            self._daemon("stop", name, number)
        for process in psutil.wait_procs(running, STARTUP_S)[1]:
            process.kill()


def _free_port() -> int:
    """Below those that the kernel gives out by itself, so that no connection gets it before it is used."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
