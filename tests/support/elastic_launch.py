"""An elastic job on this host, by the real launcher."""

from __future__ import annotations

import subprocess

from tests.support.elastic_program import DEADLINE, TRAIN, Training
from tests.support.launching import Launcher


class Job(Training):
    """An elastic job of ``TRAIN``, or of another program.

    Args:
        python: the workers' interpreter, such as ``warm.python`` gives; by default one of their own.
    """

    def __init__(self, launcher: Launcher, python: str = "") -> None:
        super().__init__(launcher.folder)
        self.launcher = launcher
        self._python = [python] if python else []
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self, *flags: str, program: str = TRAIN, env: dict[str, str] | None = None, fresh: bool = False
    ) -> subprocess.Popen[bytes]:
        """Launch.

        Args:
            flags: what comes before the program; an interpreter may be the last of them.
            fresh: each worker has an interpreter of its own all the same: for tests of signals, orphans and sweeps.
        """
        self.launcher.script(program)
        python = [] if fresh else self._python
        with open(self.folder / "out", "wb") as out, open(self.folder / "err", "wb") as err:
            self.process = self.launcher.start(*flags, *python, "worker.py", stdout=out, stderr=err, env=env)
        return self.process

    def discovers(self, *lines: str) -> list[str]:
        """The script lists these hosts from now on; returns its flags."""
        script = self.folder / "hosts.sh"
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{line}\n" for line in lines))
        new.rename(self.folder / "hosts")
        if not script.exists():
            script.write_text(f"#!/bin/sh\ncat {self.folder}/hosts\n")
            script.chmod(0o755)
        return ["--host-discovery-script", str(script), "--discovery-interval", "0.1"]

    def end(self) -> int:
        """The launcher's exit status; nothing is left then."""
        assert self.process is not None
        status = self.process.wait(DEADLINE)
        self.launcher.assert_nothing_left()
        return status
