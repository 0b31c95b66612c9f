"""``hvdgloo-rendezvous``: the rendezvous server on its own, where something else (Kubernetes, Slurm, ...) starts the
workers.

It prints the settings for workers, then a line whenever a worker arrives or leaves. It ends by itself only with
``--once``: when all workers have arrived and left again (they keep a connection while they live, so one that dies
counts as gone), or when a start or an elastic job has failed. Otherwise SIGINT or SIGTERM ends it, since only their
sender can know whether workers will be started again. Nothing that workers do can keep it from ending.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import queue
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import psutil

from hvdgloo._net.tls import Tls
from hvdgloo._platform.files import PRIVATE, create
from hvdgloo._platform.spelling import suggestions
from hvdgloo.config import Config, format_endpoint, parse_listener, parse_value, read_secret_file, settings
from hvdgloo.errors import ConfigError, MissingDependencyError
from hvdgloo.rendezvous._auth import generate_secret, status_token
from hvdgloo.rendezvous._console import PROGRAM, complain, say, watch_elastic, watch_fixed
from hvdgloo.rendezvous._elastic.events import Action, Join, Rules
from hvdgloo.rendezvous._elastic.job import RETURN_TIME
from hvdgloo.rendezvous._server.elastic import ElasticEpochs
from hvdgloo.rendezvous._server.server import RendezvousServer
from hvdgloo.version import __version__

if TYPE_CHECKING:  # a server without a page does not need it
    from hvdgloo.rendezvous._job_observer import JobObserver

_TLS = ("tls", "tls_cert", "tls_key", "tls_ca")  # settings that are options here, too

_DESCRIPTION = """\
Hands out ranks to the workers of one job, wherever and by whatever they are started, and keeps the store through which
they find each other. Workers need two variables, which are printed at the start: HVDGLOO_RENDEZVOUS and
HVDGLOO_SECRET_FILE (or HVDGLOO_SECRET, the contents of that file).
"""
_EPILOG = """\
The secret is taken from --secret-file, else from HVDGLOO_SECRET or HVDGLOO_SECRET_FILE, else a new one is made.
Exit status: 0 after SIGINT or SIGTERM, or with --once when the job is over; 1 with --once if not all workers came, or
if an elastic job has failed; 2 if an option cannot be used or the port is taken.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    try:
        options = _parse(argv)
        with _stopped_by_signals() as stopped:
            try:
                with ExitStack() as stack:
                    return _run(options, stack)
            except stopped:
                say("stopped by a signal")
                return 0
    except (ConfigError, MissingDependencyError) as error:
        hint = _own_addresses(error) if isinstance(error, ConfigError) else ""
        complain(f"error: {error}{hint}")
        return 2


def _own_addresses(error: ConfigError) -> str:
    """Suggest addresses to bind instead of another host's."""
    if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRNOTAVAIL:
        return ""
    own = ", ".join(endpoint.rpartition(":")[0] for endpoint in _reachable("0.0.0.0:0"))
    return f"; --bind takes one of {own}, or 0.0.0.0 for all"


def _run(options: argparse.Namespace, stack: ExitStack) -> int:
    secret, secret_place = _secret(options, stack)
    if options.status_token:
        say(status_token(secret))
        return 0
    addresses, port = _addresses(options.bind)
    if port and options.port_range:
        raise ConfigError("--bind gives a port and --port-range others; give only one of them")
    actions: queue.SimpleQueue[Action] = queue.SimpleQueue()
    elastic = None if options.rules is None else ElasticEpochs(options.rules, act=actions.put, hold=RETURN_TIME)
    tls = None if options.tls_files is None else Tls(*options.tls_files)
    observer = None
    if options.page is not None:
        from hvdgloo.rendezvous._job_observer import JobObserver

        where, its_port = options.page
        title = f"{PROGRAM}, {_workers(options)}"
        observer = JobObserver(title, secret=secret, address=where, port=its_port, rules=options.rules, tls=tls)
    server = RendezvousServer(
        secret=secret,
        size=options.np if elastic is None else None,
        elastic=elastic,
        bind=addresses,
        port=port,
        port_range=options.port_range,
        start_timeout=options.start_timeout or Config.start_timeout,
        tls=tls,
        observed=None if observer is None else observer.observed,
        page=None if observer is None else observer.link,
    )
    if observer is not None:
        stack.enter_context(observer)
    stack.enter_context(server)
    _announce(server, options, secret_place, observer)
    if elastic is None:
        status = watch_fixed(server, options.once, observer)
    else:
        status = watch_elastic(server, actions, options.once, observer)
    if observer is not None:
        observer.ended(status, server.last_failure)
    return status


class _Stopped(BaseException):
    """SIGINT or SIGTERM has arrived. Not an Exception, so that no handler on the way takes it for an error."""


@contextmanager
def _stopped_by_signals() -> Iterator[type[BaseException]]:
    """Raise ``_Stopped`` at the first SIGINT or SIGTERM; further ones change nothing, as stopping takes a second."""

    def stop(_number: int, _frame: Any) -> NoReturn:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise _Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield _Stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Options.


class _Parser(argparse.ArgumentParser):
    """A parser that suggests the option that was probably meant before it complains of a missing one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [name for action in self._actions for name in action.option_strings]
            close = suggestions(unknown[0].partition("=")[0], known, limit=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            self.error(f"unknown argument {unknown[0]}{hint}")
        if options.np is None and not options.status_token:
            self.error("the number of workers is missing: give -np N")
        return options


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-np", "--np", "--num-proc", dest="np", type=_positive_int, metavar="N", help="number of workers"
    )
    parser.add_argument(
        "--bind",
        action="append",
        metavar="ADDR[:PORT]",
        help="address to listen on, [ADDR]:PORT for IPv6; may be repeated. By default 127.0.0.1, which only this host "
        "can reach, and any free port",
    )
    parser.add_argument(
        "--port-range", type=_of_setting("port_range"), metavar="FIRST-LAST", help="choose a port from this range"
    )
    parser.add_argument(
        "--secret-file",
        metavar="PATH",
        help="the job's secret in hexadecimal digits; created (mode 0600) if it does not exist",
    )
    parser.add_argument(
        "--start-timeout",
        type=_of_setting("start_timeout"),
        metavar="SECONDS",
        help="time without a further worker after which those that wait are told who is missing (default: "
        f"{Config.start_timeout:g})",
    )
    _add_elastic(parser)
    for name in _TLS:
        setting = settings()[name]
        parser.add_argument(
            setting.flag or "",
            type=_of_setting(name),
            metavar="PATH" if name != "tls" else "{auto,off,required}",
            help=f"{setting.help} ({setting.env})",
        )
    parser.add_argument(
        "--page",
        nargs="?",
        const=("127.0.0.1", 0),
        type=_listener,
        metavar="ADDR[:PORT]",
        help="serve a page that shows the job live, and print a link to it, which works for one browser; / of this "
        "server leads there, too. By default it is at 127.0.0.1 and any free port",
    )
    parser.add_argument(
        "--once", action="store_true", help="end when all workers have arrived and left, or did not arrive"
    )
    parser.add_argument(
        "--status-token",
        action="store_true",
        help="print the token that reads /v1/status and /metrics, and leads from / to the job's page (as bearer token, "
        "or as the password that a browser asks for), and quit",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    options = parser.parse_args(argv)
    given = {name: value for name in _TLS if (value := getattr(options, name)) is not None}
    options.rules = None if options.status_token else _rules(options)
    options.tls_files = replace(Config.from_env(only=_TLS), **given).tls_files
    return options  # type: ignore[no-any-return]


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "elastic jobs, whose workers may change", "Either of --min-np and --max-np makes a job elastic."
    )
    group.add_argument(
        "--min-np",
        "--min-num-proc",
        dest="min_np",
        type=_positive_int,
        metavar="N",
        help="with fewer workers the job waits for others; it starts with -np (default: as many)",
    )
    group.add_argument(
        "--max-np",
        "--max-num-proc",
        dest="max_np",
        type=_positive_int,
        metavar="N",
        help="further workers wait until there is room (default: no limit)",
    )
    group.add_argument(
        "--elastic-timeout",
        type=_of_setting("elastic_timeout"),
        metavar="SECONDS",
        help=f"how long it waits for --min-np workers (default: {Config.elastic_timeout:g})",
    )
    group.add_argument(
        "--reset-limit",
        type=_whole,
        metavar="N",
        help="number of times that the workers may change (default: no limit)",
    )
    group.add_argument(
        "--join",
        choices=[join.value for join in Join],
        help="when training stops for a new worker: ready, once it is at elastic.run; now, once it arrives "
        "(default: ready)",
    )


def _rules(options: argparse.Namespace) -> Rules | None:
    """Return the options of an elastic job; None if the number of workers is fixed."""
    if options.min_np is None and options.max_np is None:
        for name in ("elastic_timeout", "reset_limit", "join"):
            if getattr(options, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is for elastic jobs: give --min-np, too, or --max-np")
        return None
    if options.start_timeout is not None:
        raise ConfigError("--start-timeout is for a fixed number of workers: elastic jobs have --elastic-timeout")
    return Rules(
        size=options.np,
        smallest=options.min_np or options.np,
        largest=options.max_np,
        elastic_timeout=options.elastic_timeout or Config.elastic_timeout,
        reset_limit=options.reset_limit,
        join=Join(options.join or Join.READY.value),
        launched=False,
    )


def _listener(text: str) -> tuple[str, int]:
    try:
        return parse_listener(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _whole(text: str) -> int:
    if not text.strip().isdigit():
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 0, not {text!r}")
    return int(text)


def _positive_int(text: str) -> int:
    value = int(text) if text.strip().isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of workers: expected a whole number, at least 1")
    return value


def _of_setting(name: str) -> Any:
    """Return the parser of a Config field, for an option of the same meaning."""

    def parse(text: str) -> Any:
        try:
            return parse_value(settings()[name], text, name)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None

    return parse


def _addresses(binds: Sequence[str] | None) -> tuple[list[str], int]:
    """Return the addresses to listen on, and their port."""
    addresses, ports = [], set()
    for text in binds or ["127.0.0.1"]:
        try:
            address, port = parse_listener(text)
        except ValueError as error:
            raise ConfigError(f"--bind {text}: {error}") from None
        addresses.append(address)
        ports.add(port)
    if len(ports) > 1:
        raise ConfigError(f"--bind: all addresses have one port, not {' and '.join(map(str, sorted(ports)))}")
    return addresses, ports.pop()


# The secret.


def _secret(options: argparse.Namespace, stack: ExitStack) -> tuple[bytes, str]:
    """Return the job's secret, and a text that says where workers find it."""
    if options.secret_file:
        path = os.path.abspath(options.secret_file)
        if os.path.exists(path):
            return _existing(path), path
        return _write_secret(path), path
    config = Config.from_env()
    if config.secret_file and config.secret:
        return config.secret, os.path.abspath(config.secret_file)
    if config.secret:
        return config.secret, ""
    if options.status_token:
        raise ConfigError("--status-token needs the job's secret: give --secret-file")
    folder = tempfile.mkdtemp(prefix="hvdgloo-rendezvous-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    path = os.path.join(folder, "secret")
    return _write_secret(path), path


def _existing(path: str) -> bytes:
    try:
        secret = read_secret_file(path)
        mode = stat.S_IMODE(os.stat(path).st_mode)
    except (ConfigError, OSError) as error:
        raise ConfigError(str(error).replace("HVDGLOO_SECRET_FILE=", "--secret-file ")) from None
    if mode & 0o077:
        complain(f"warning: others may read {path} (mode {mode:04o}); chmod 600 keeps it secret")
    return secret


def _write_secret(path: str) -> bytes:
    secret = generate_secret()
    try:
        with os.fdopen(create(path, PRIVATE), "w", encoding="ascii") as file:
            file.write(secret.hex() + "\n")
    except OSError as error:
        raise ConfigError(f"--secret-file {path}: {error.strerror}") from None
    return secret


# What it prints.


def _announce(
    server: RendezvousServer, options: argparse.Namespace, secret_place: str, observer: JobObserver | None
) -> None:
    endpoints = [reachable for endpoint in server.endpoints for reachable in _reachable(endpoint)]
    secret = f"HVDGLOO_SECRET_FILE={secret_place}" if secret_place else "HVDGLOO_SECRET, as this process has it"
    say(f"{PROGRAM} {__version__} waits for {_workers(options)} on {', '.join(endpoints)}")
    if secret_place:
        say(f"The secret is in {secret_place}")
    say("Workers need:")
    say(f"  HVDGLOO_RENDEZVOUS={endpoints[0]}")
    say(f"  {secret}")
    if options.tls_files is not None:
        say("  HVDGLOO_TLS=required")
    if all(_is_loopback(endpoint) for endpoint in server.endpoints):
        say("Only this host can reach that address; --bind ADDR:PORT chooses one for others.")
    how = f"{PROGRAM} --status-token"
    scheme = "http" if options.tls_files is None else "https"
    where = f"{scheme}://{endpoints[0]}/"
    password = f"(password: {how}{f' --secret-file {secret_place}' if secret_place else ''})"
    if observer is None:
        say(f"State: {where}v1/status {password}")
    else:
        say(f"Page: {observer.link()}")
        say(f"That link works for one browser; others find the page by {where} {password}")


def _workers(options: argparse.Namespace) -> str:
    some = f"{options.np} worker{'s' * (options.np > 1)}"
    if options.rules is None:
        return some
    least, most = options.rules.smallest, options.rules.largest
    return f"{some}, then goes on with {least} {'or more' if most is None else f'to {most}'}"


def _is_loopback(endpoint: str) -> bool:
    host = endpoint.rpartition(":")[0].strip("[]")
    return ipaddress.ip_address(host).is_loopback


def _reachable(endpoint: str) -> list[str]:
    """Return an endpoint as others may use it: all of this host's addresses, if it listens on any."""
    host, _, port = endpoint.rpartition(":")
    address = ipaddress.ip_address(host.strip("[]"))
    if not address.is_unspecified:
        return [endpoint]
    families = (socket.AF_INET,) if address.version == 4 else (socket.AF_INET6, socket.AF_INET)
    found = [
        format_endpoint(entry.address, int(port))
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in families and "%" not in entry.address
    ]
    return sorted(found, key=_is_loopback) or [endpoint]
