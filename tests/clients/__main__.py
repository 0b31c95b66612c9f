"""Try libraries that were written for Horovod: ``python -m tests.clients [NAME ...]``, or ``make clients``.

Each has an environment of its own under ``.venv-clients``, which sees the torch of this one (and the TensorFlow of
``.venv-tf``). Its program is run by two workers in both ways in which ``import horovod`` is hvdgloo: under
``hvdgloo-run --as-horovod``, and by ``horovodrun`` in an environment that has ``hvdgloo-horovod``. It checks its own
results. The exit status is 0 if all passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from tests.clients.table import CLIENTS, Client
from tests.support import install
from tests.support.pages import ROOT

ENVIRONMENTS = ROOT / ".venv-clients"
TENSORFLOW = ROOT / ".venv-tf"
PROGRAMS = Path(__file__).with_name("programs")
LIMIT_S = 300.0
SIGN = "as it should be"
"""What each rank of a program prints when all of its checks have passed."""


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
        for what in (client.packages, ("--no-deps", "--editable", "."), ("--no-deps", "packaging/horovod")):
            status = install.install(python, [str(each) for each in what], sys.stdout)
            if status:
                raise SystemExit(f"{client.name}: what it needs could not be installed")
        (folder / ".ready").touch()
    return folder / "bin"


def attempt(client: Client, command: list[str | Path]) -> bool:
    """Run its program with two workers; whether both found all as it should be."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # Horovod's name must come from what is tried, not from what this process was started with.
        environment = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HVDGLOO_AS_HOROVOD")
        }
        environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    passed = done.returncode == 0 and done.stdout.count(SIGN) == 2
    if not passed:
        print(done.stdout)
    way = Path(command[0]).name + (" --as-horovod" if "--as-horovod" in command else "")
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
        passed.append(attempt(client, [programs / "hvdgloo-run", "--as-horovod", "-np", "2", program]))
        passed.append(attempt(client, [programs / "horovodrun", "-np", "2", programs / "python", program]))
    print(f"{passed.count(True)} passed, {passed.count(False)} failed")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
