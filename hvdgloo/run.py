"""``hvdgloo.run.run(func, np=4)``: run a Python function on several processes, and get its results.

In early Horovod, ``horovod.run`` is a package and ``horovod.run.run`` the function; later, ``horovod.run`` is the
function. This module is callable, so both spellings work.
"""

from __future__ import annotations

import html
import math
import os
import shlex
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, SupportsIndex, TypeVar

from hvdgloo._job import excepthook
from hvdgloo.config import Config, parse_listener, without_place
from hvdgloo.errors import ConfigError, LaunchError
from hvdgloo.rendezvous._auth import generate_secret
from hvdgloo.runner import call_arguments
from hvdgloo.runner.elastic.options import ElasticOptions
from hvdgloo.runner.function_results import ResultFiles, conclude
from hvdgloo.runner.job.environment import working_directory
from hvdgloo.runner.job.host_sources import take_inventory
from hvdgloo.runner.job.spec import Discovery, LaunchSpec, Output, Reach, Times, Views
from hvdgloo.runner.launch import launch
from hvdgloo.runner.signals import LIBRARY_SIGNALS
from hvdgloo.runner.surroundings import Surroundings
from hvdgloo.runner.transport.template import parse_template
from hvdgloo.runner.worker import function_task

__all__ = ["run"]

T = TypeVar("T")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    ssh_args: Sequence[str] = (),
    agent_command: str | None = None,
    remote_python: str | None = None,
    grace_period: float | None = None,
    heartbeat_timeout: float | None = None,
    prefix_output_with_timestamp: bool = False,
    elastic_timeout: float | None = None,
    host_discovery: Discovery | None = None,
    failures_per_host: int | None = None,
    max_restarts: int = 0,
    page: bool | str | None = None,
    page_control: bool = False,
    report: str | None = None,
) -> list[T]:
    """Call ``func(*args, **kwargs)`` in ``np`` worker processes at once, on this host or on several.

    With ``min_num_proc`` or host discovery, the job is elastic: workers may join and leave while ``func`` is in
    ``hvd.elastic.run``.

    The function is sent by cloudpickle, so it may come from a script, a notebook or a closure; workers find modules in
    the same places (``sys.path``) as this process. The workers' output appears in ``sys.stdout`` and ``sys.stderr``,
    prefixed with their ranks. Ctrl-C is passed on to the workers (if this is the main thread) and raises
    KeyboardInterrupt here when they have ended.

    Args:
        np, num_proc: number of processes; two names for the same argument. By default all slots of the hosts, or 1 if
            no hosts are given. An elastic job starts when there are slots for this many, by default ``min_num_proc``;
            where hosts are discovered, one of the two is required.
        min_np, min_num_proc: the fewest workers of an elastic job; by default as many as ``np``.
        max_np, max_num_proc: the most; by default there is no limit.
        host_discovery_script: an executable, or a command line, that prints the currently available hosts, one per
            line (``h1:4``).
        host_discovery: the same as an object: its ``find_available_hosts_and_slots()`` returns hosts and slots.
        slots: slots of hosts for which no number is given; by default one for each GPU, otherwise one.
        reset_limit: how often the workers of an elastic job may form a new epoch.
        cooldown_range: the shortest and the longest time in seconds for which a host is excluded after a failure; by
            default it is excluded for good.
        failures_per_host: the number of worker failures after which a host is excluded; by default 1, or 3 where no
            host or only one is given. With host discovery it is 1, even if only one host is found.
        elastic_timeout: seconds to wait for slots; by default 600.
        max_restarts: how often all workers of a job that is not elastic are restarted after a failure.
        hosts: ``host:slots,...``; by default this host, or the hosts of the surrounding Slurm allocation.
        hostfile: a file that lists the hosts.
        start_timeout: seconds that the hosts' agents, and then ``hvd.init()``, wait for others.
        ssh_port, ssh_identity_file, ssh_args: options of ssh for reaching other hosts.
        agent_command: a command used to reach them instead of ssh: ``"kubectl exec -i {host} --"``.
        remote_python: the Python interpreter on other hosts; by default the same path as here.
        network_interfaces: the addresses that hosts use for each other: names, networks and ``^`` exceptions.
        output_filename: a directory that also receives each rank's output.
        prefix_output_with_timestamp: begin every line with the time.
        verbose: report progress. By default only lost, new and restarted workers are reported; with False, nothing.
        executable: the Python interpreter of the workers; by default this one.
        env: variables set for the workers on all hosts, in addition to this process's own.
        grace_period: seconds between asking workers to end and killing them; by default 3 after a failure and 30 after
            Ctrl-C.
        heartbeat_timeout: seconds of silence between this process and another host after which each considers the
            other lost. By default a host is lost after 5 seconds, and this process after 60, since none of its threads
            runs while a library holds the interpreter in one long call. On this host silence does not count.
        page: serve a page that shows the job live: True, or ``address:port`` (by default 127.0.0.1 and any free port).
            A notebook shows a link to it; elsewhere its address is printed.
        page_control: let viewers of the page also have some steps traced.
        report: an .html file for the page's contents, written when the job has ended, even after a failure.
        network_interface: the old name of ``network_interfaces``; it gives a warning.
        use_gloo, use_mpi, mpi_args, disable_cache: accepted for Horovod's sake. There is only Gloo, and nothing is
            cached between jobs; ``use_mpi=True`` is rejected, the others have no effect.

    Returns:
        the results in the order of ranks; in an elastic job, the results of the workers present at the end.

    Raises:
        ConfigError: an argument cannot be used, is for MPI, or contradicts another one.
        InvalidArgumentError: the function or its arguments cannot be pickled.
        LaunchError: the workers could not be started.
        MissingDependencyError: ``HVDGLOO_TLS=required``, and no package that makes certificates is installed.
        JobFailedError: a worker was killed, exited, or returned a result that cannot be pickled; with rank, host and
            last lines.
        Exception: the exception that ``func`` raised on the first rank where it failed. Its cause is a
            ``RemoteTraceback`` with rank, host and the worker's traceback.
    """
    excepthook.install()  # errors in arguments are shown without our frames
    call_arguments.check_call("run", func, args, kwargs)
    if isinstance(min_num_proc, str):
        raise ConfigError("run(): the fifth argument is min_num_proc; give hosts by name: run(func, ..., hosts=...)")
    call_arguments.judge_controllers("run", use_gloo, use_mpi, "mpi_args", mpi_args)
    options = ElasticOptions(
        min_np=_whole("min_num_proc", _either("min_num_proc", min_num_proc, "min_np", min_np), 1),
        max_np=_whole("max_num_proc", _either("max_num_proc", max_num_proc, "max_np", max_np), 1),
        script=host_discovery_script,
        discovery=_discovery(host_discovery),
        slots_per_host=_whole("slots", slots, 1),
        reset_limit=_whole("reset_limit", reset_limit, 0),
        cooldown=_cooldown(cooldown_range),
        failures_per_host=_whole("failures_per_host", failures_per_host, 1),
        elastic_timeout=_seconds("elastic_timeout", elastic_timeout),
    )
    interfaces = call_arguments.renamed(
        "run", "network_interfaces", network_interfaces, "network_interface", network_interface
    )
    environ = without_place({**os.environ, **(env or {})})
    number = options.size(_number(num_proc, np))
    inventory = take_inventory(
        environ,
        hosts=hosts,
        hostfile=hostfile,
        np=1 if number is None and not (hosts or hostfile or options.discovered) else number,
        discovered=options.discovered,
    )
    python = executable or _own_interpreter()
    times = Times(
        _seconds("start_timeout", start_timeout),
        _seconds("grace_period", grace_period),
        _some_seconds("heartbeat_timeout", heartbeat_timeout),
    )
    reach = Reach(
        python=remote_python or python,
        connect_timeout=Config.from_env(environ, only={"connect_timeout"}).connect_timeout,
        silence=times.host_timeout,
        ssh_port=_port(ssh_port),
        ssh_identity_file=ssh_identity_file,
        ssh_args=_words("ssh_args", ssh_args),
        agent_command=parse_template(agent_command) if agent_command is not None else (),
    )
    secret = generate_secret()
    spec = LaunchSpec(
        command=function_task.command(python),
        remote_command=function_task.command(reach.python),
        hosts=inventory.hosts,
        np=inventory.np,
        cwd=working_directory(os.environ),
        environ=environ,
        exported=frozenset(env or ()),
        secret=secret,
        function=function_task.pack_function(func, args, kwargs or {}, secret),
        reach=inventory.completed(reach),
        network_interfaces=call_arguments.names(interfaces),
        times=times,
        output=Output(output_filename, timestamps=prefix_output_with_timestamp, verbose=bool(verbose)),
        elastic=options.spec(inventory, environ),
        max_restarts=_whole("max_restarts", max_restarts, 0) or 0,
        views=Views(
            title=f"hvdgloo.run.run({getattr(func, '__qualname__', type(func).__qualname__)})",
            page=_page(page),
            control=page_control,
            report=report,
            show_link=_notebook_link(),
        ),
    )
    with ResultFiles(secret) as results:
        quiet, news = not verbose, verbose is None or bool(verbose)
        around = Surroundings(sys.stdout, sys.stderr, quiet, news, signals=LIBRARY_SIGNALS, results=results)
        return conclude(launch(spec, around), results)


# Arguments.


def _either(name: str, value: T | None, other_name: str, other: T | None) -> T | None:
    """Return the value of an argument that has two names."""
    if value is not None and other is not None and value != other:
        raise ConfigError(f"run(): {name}={value} and {other_name}={other} are two names for one thing; give one")
    return other if value is None else value


def _number(num_proc: int | None, np: int | None) -> int | None:
    """Return the number of processes; None if it was not given."""
    number = _whole("np", _either("num_proc", num_proc, "np", np), 0)
    if number == 0:
        raise ConfigError("run(np=0): a job has at least one process")
    return number


def _whole(name: str, value: int | None, least: int) -> int | None:
    if value is None:
        return None
    if not isinstance(value, SupportsIndex):  # such as text from a file or a command line
        raise ConfigError(f"run({name}={value!r}): it is not a whole number")
    if value < least:
        raise ConfigError(f"run({name}={value}): it must be at least {least}")
    return value


def _cooldown(value: Sequence[float] | None) -> tuple[float, float] | None:
    if value is None:
        return None
    if not (isinstance(value, Sequence) and len(value) == 2 and all(isinstance(each, SupportsFloat) for each in value)):
        raise ConfigError(f"run(cooldown_range={value!r}): give two times in seconds, the shorter one first")
    return float(value[0]), float(value[1])


def _discovery(value: Discovery | None) -> Discovery | None:
    if value is not None and not callable(getattr(value, "find_available_hosts_and_slots", None)):
        raise ConfigError(f"run(host_discovery={value!r}): it has no method find_available_hosts_and_slots()")
    return value


def _seconds(name: str, value: float | None) -> float | None:
    if value is not None and not (isinstance(value, SupportsFloat) and 0 <= value < math.inf):
        raise ConfigError(f"run({name}={value!r}): it is not a number of seconds")
    return value


def _some_seconds(name: str, value: float | None) -> float | None:
    if value == 0:
        raise ConfigError(f"run({name}={value!r}): it must be greater than 0")
    return _seconds(name, value)


def _port(value: int | None) -> int | None:
    if value is not None and not (isinstance(value, SupportsIndex) and 0 < value < 65536):
        raise ConfigError(f"run(ssh_port={value!r}): it is not a port from 1 to 65535")
    return value


def _page(value: bool | str | None) -> tuple[str, int] | None:
    """Return the address at which to serve the page; None if it is not served."""
    if not value:
        return None
    try:
        return ("127.0.0.1", 0) if value is True else parse_listener(value)
    except (ValueError, AttributeError):
        raise ConfigError(f"run(page={value!r}): give True, or an address and a port: '127.0.0.1:8080'") from None


def _notebook_link() -> Callable[[str], None] | None:
    """Return a function that shows a link in a notebook; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None or not hasattr(shell, "kernel"):
        return None

    def show(link: str) -> None:
        from IPython.display import HTML, display

        display(HTML(f'<a href="{html.escape(link)}" target="_blank" rel="noopener">the page of this job</a>'))

    return show


def _words(name: str, value: Sequence[str]) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ConfigError(f"run({name}={value!r}): give a list of words, for example {shlex.split(value)}")
    return tuple(value)


def _own_interpreter() -> str:
    if not sys.executable:
        raise LaunchError("this program does not know its Python interpreter; give one: run(..., executable=...)")
    return sys.executable


class RunModule(types.ModuleType):
    """The type of this module: ``hvdgloo.run(func, np=4)`` is ``hvdgloo.run.run(func, np=4)``."""

    run = staticmethod(run)
    __call__ = staticmethod(run)


sys.modules[__name__].__class__ = RunModule
