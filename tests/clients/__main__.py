"""Try libraries that were written elsewhere: ``python -m tests.clients [NAME ...]``, or ``make clients``.

Each has an environment of its own under ``.venv-clients``, which sees the torch of this one (and the TensorFlow of
``.venv-tf``). If it was written for Horovod, its program is run by two workers in both ways in which ``import horovod``
is hvdgloo: under ``hvdgloo-run --as-horovod``, and by ``horovodrun`` in an environment that has ``hvdgloo-horovod``.
Libraries that use torch.distributed are run under ``hvdgloo-run`` on gloo, unchanged on hvdgloo (``--as-gloo``), and
some with hvdgloo by name, by a launcher of their own, and on two hosts in network namespaces, which needs root. Each
program checks its own results; those that it prints must be the same with gloo and with hvdgloo. The exit status is 0
if all passed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from tests.clients.table import CLIENTS, Client
from tests.support import hosts, install
from tests.support.launching import clean_environment
from tests.support.pages import ROOT

ENVIRONMENTS = ROOT / ".venv-clients"
TENSORFLOW = ROOT / ".venv-tf"
PROGRAMS = Path(__file__).with_name("programs")
LIMIT_S = 300.0
NAME = "hvdgloo"
"""Name of torch.distributed's backend."""
SIGN = "as it should be"
"""Text that each rank of a program prints once all of its checks have passed."""
RESULT = re.compile(r"^(?:\[0\]<stdout>:)?result (.*)$", re.MULTILINE)
"""Line in which rank 0 prints numbers that do not depend on what carries its tensors."""


def packages_of(environment: Path) -> Path:
    return environment / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def make_environment(client: Client) -> Path:
    """The client's environment, made if it is not there; returns its folder of programs.

    Raises:
        SystemExit: something cannot be installed.
    """
    folder = ENVIRONMENTS / client.name
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        shared = [Path(sysconfig.get_path("purelib")), *([packages_of(TENSORFLOW)] if client.tensorflow else [])]
        lines = [f"import site; site.addsitedir({str(path)!r})" for path in shared]
        (packages_of(folder) / "shared.pth").write_text("\n".join(lines) + "\n")
        python = folder / "bin/python"
        wanted = [client.packages, ("--no-deps", *client.bare, "--editable", ".")]
        if client.horovod:
            wanted.append(("--no-deps", "packaging/horovod"))
        for what in wanted:
            status = install.install(python, [str(each) for each in what], sys.stdout)
            if status:
                raise SystemExit(f"{client.name}: what it needs could not be installed")
        (folder / ".ready").touch()
    return folder / "bin"


def attempt(
    client: Client, command: list[str | Path], host: hosts.Host | None = None, results: set[str] | None = None
) -> bool:
    """Run its program with two workers; returns whether both passed their checks.

    Args:
        host: where to run the command; by default on this machine.
        results: of the client's earlier attempts, with which this one's must agree; this one's are added.
    """
    began = time.monotonic()
    # Horovod's name must come from what is tried, not from what this process was started with.
    environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    environment.update(setting.split("=", 1) for setting in client.environment)
    with tempfile.TemporaryDirectory() as folder:
        if host is None:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        else:
            done = host.run([str(each) for each in command], env=environment, cwd=folder, timeout=LIMIT_S)
    passed = done.returncode == 0 and done.stdout.count(SIGN) == 2
    if results is not None:
        results.update(RESULT.findall(done.stdout))
        passed = passed and len(results) <= 1
    if not passed:
        print(done.stdout, done.stderr, sep="")
    flags = [str(each) for each in command if each in ("--as-horovod", "--as-gloo", NAME)]
    way = " ".join([Path(command[0]).name, *flags])
    way += " on two hosts" if host else ""
    outcome = "passed" if passed else f"FAILED with status {done.returncode}"
    print(f"{client.name} {client.version}, {way}: {outcome}, {time.monotonic() - began:.0f} s", flush=True)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of clients; without, all")
    names = parser.parse_args().names
    unknown = set(names) - {client.name for client in CLIENTS}
    if unknown:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CLIENTS)}")
    passed = []
    for client in CLIENTS:
        if names and client.name not in names:
            continue
        if client.tensorflow and not TENSORFLOW.exists():
            print(f"{client.name}: skipped, for lack of {TENSORFLOW.name} (make test-tensorflow makes it)")
            continue
        programs = make_environment(client)
        program = PROGRAMS / f"{client.program}.py"
        if client.horovod:
            passed.append(attempt(client, [programs / "hvdgloo-run", "--as-horovod", "-np", "2", program]))
            passed.append(attempt(client, [programs / "horovodrun", "-np", "2", programs / "python", program]))
        else:
            results: set[str] = set()
            launcher: list[str | Path] = [programs / "hvdgloo-run", "-np", "2"]
            commands = [[*launcher, program], [*launcher, "--as-gloo", program]]
            if client.named:
                commands.append([*launcher, program, NAME])
            if client.launches:
                commands.append([programs / "python", program, NAME])
            passed += [attempt(client, command, results=results) for command in commands]
        if client.hosts and hosts.available():
            print(f"{client.name} on two hosts: skipped, {hosts.available()}")
        elif client.hosts:
            with hosts.Bed(["h1", "h2"]) as bed:
                command = [programs / "hvdgloo-run", "-H", "h1:1,h2:1", program]
                passed.append(attempt(client, command, bed["h1"]))
    print(f"{passed.count(True)} passed, {passed.count(False)} failed")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
