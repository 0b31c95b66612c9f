"""The process that holds a bed up, and the first process of each of its hosts. Run with ``python -I keeper.py``.

It imports nothing of ours, and is given the plan as JSON on its standard input. It stands in network and mount
namespaces of its own, which hold the switches and all files of the bed (a tmpfs on /run), and forks a first process
for each host, in namespaces of that host's own. Nothing of a bed has a name outside of it: when the keeper ends, in
whatever way, its hosts end, and with them every process, network card and file.

It ends when its standard input does, that is: when the tests close it or are killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_MOVE = 0x1000, 0x4000, 0x40000, 0x2000
PR_SET_PDEATHSIG = 1

LIBC = ctypes.CDLL(None, use_errno=True)
BED = "/run/bed"

SSHD_CONFIG = """\
{options}
HostKey {home}/host_key
AuthorizedKeysFile {home}/.ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PidFile none
LogLevel VERBOSE
SetEnv OPENBLAS_NUM_THREADS=1
"""
# OpenSSH's usual key exchange, sntrup761, takes 0.07 s of processor time, and tests connect hundreds of times.
SSH_CONFIG = """\
Host *
    KexAlgorithms curve25519-sha256
    IdentityFile {home}/.ssh/id_ed25519
    UserKnownHostsFile {home}/.ssh/known_hosts
    StrictHostKeyChecking yes
    BatchMode yes
"""


def main() -> None:
    plan = json.loads(sys.stdin.readline())
    die_with_parent()
    unshare(CLONE_NEWNET | CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", "/run", "tmpfs", 0)
    os.makedirs(BED)
    os.makedirs("/run/sshd", mode=0o755)
    write("/proc/sys/net/ipv4/ip_forward", "1" if plan["routed"] else "0")
    write("/proc/sys/net/ipv6/conf/all/forwarding", "1" if plan["routed"] else "0")
    make_files(plan["hosts"])
    hosts = [start_host(host) for host in plan["hosts"]]
    await_all(hosts)
    tell({"inits": [host.init for host in hosts]})
    ip_batch(json.loads(sys.stdin.readline())["switches"])
    for host in hosts:
        os.write(host.go, b"\0")
    await_all(hosts)
    tell({"ready": True})
    sys.stdin.read()
    for host in hosts:
        try:
            os.kill(host.init, signal.SIGKILL)
        except ProcessLookupError:
            pass  # powered off
    for host in hosts:
        os.waitpid(host.parent, 0)


class Started:
    """A host's first process, as seen from here, and the process between."""

    def __init__(self, name: str, parent: int, init: int, go: int, ready: int) -> None:
        self.name, self.parent, self.init, self.go, self.ready = name, parent, init, go, ready


def await_all(hosts: list[Started]) -> None:
    for host in hosts:
        if not os.read(host.ready, 1):
            sys.exit(f"host {host.name} did not come up")


def start_host(host: dict[str, Any]) -> Started:
    """Fork a process whose child is process 1 of the host; the one in between waits for that."""
    go_read, go = os.pipe()
    ready, ready_write = os.pipe()
    pid_read, pid_write = os.pipe()
    parent = os.fork()
    if parent == 0:
        die_with_parent()
        os.close(0)
        unshare(CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC)
        child = os.fork()
        if child == 0:
            be_init(host, go_read, ready_write)
        os.write(pid_write, str(child).encode())
        for fd in (pid_write, ready_write, go_read):
            os.close(fd)
        os.waitpid(child, 0)
        os._exit(0)
    for fd in (pid_write, ready_write, go_read):
        os.close(fd)
    init = int(os.read(pid_read, 32) or sys.exit(f"no namespaces for host {host['name']}"))
    os.close(pid_read)
    return Started(host["name"], parent, init, go, ready)


def be_init(host: dict[str, Any], go: int, ready: int) -> NoReturn:
    """Set the host up, start its sshd, and then reap what ends."""
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        folder = f"{BED}/{host['name']}"
        name = host["name"].encode()
        check(LIBC.sethostname(name, len(name)), "sethostname")
        mount_own(host, folder)
        write("/proc/sys/net/ipv6/conf/default/accept_dad", "0")
        write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647")
        private = list(host["private"])
        if host["private_first"]:
            ip_batch(private)
        os.write(ready, b"\0")
        if not os.read(go, 1):
            os._exit(1)
        ip_batch((private if not host["private_first"] else []) + host["own"])
        sshd = ["/usr/sbin/sshd", "-D", "-f", f"{folder}/sshd_config", "-E", f"{folder}/sshd.log"]
        spawn(sshd, folder)
        wait_for_port_22()
        os.write(ready, b"\0")
        for fd in (go, ready):
            os.close(fd)
    except BaseException as error:  # a forked process must not go on with its parent's code
        os.write(2, f"host {host['name']}: {error!r}\n".encode())
        os._exit(1)
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.1)  # sshd was ended, too; orphans may still come


def mount_own(host: dict[str, Any], folder: str) -> None:
    """Mount the host's own parts of the file system: /proc, /sys, /dev/shm, some of /etc, its boot id."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", 0)
    if os.path.isdir("/sys/fs/cgroup"):
        groups = f"{folder}/cgroup"
        os.mkdir(groups)
        mount("/sys/fs/cgroup", groups, None, MS_BIND | MS_REC)
        mount("sysfs", "/sys", "sysfs", 0)
        mount(groups, "/sys/fs/cgroup", None, MS_MOVE)
    mount("tmpfs", "/dev/shm", "tmpfs", 0)
    if host["private_tmp"]:
        # The program and its tests may themselves have been put into /tmp.
        kept = {path: f"{folder}/kept{index}" for index, path in enumerate(host["below_tmp"])}
        for path, place in kept.items():
            os.mkdir(place)
            mount(path, place, None, MS_BIND | MS_REC)
        mount("tmpfs", "/tmp", "tmpfs", 0)
        for path, place in kept.items():
            os.makedirs(path)
            mount(place, path, None, MS_MOVE)
    for own, path in (
        ("hosts", "/etc/hosts"),
        ("passwd", "/etc/passwd"),
        ("nsswitch.conf", "/etc/nsswitch.conf"),
        ("boot_id", "/proc/sys/kernel/random/boot_id"),
    ):
        mount(f"{folder}/{own}", path, None, MS_BIND)


def make_files(hosts: list[dict[str, Any]]) -> None:
    """Keys, configuration and home folders of all hosts."""
    key = f"{BED}/id_ed25519"
    makers = [key_maker(key)]
    for host in hosts:
        folder = f"{BED}/{host['name']}"
        os.makedirs(f"{folder}/.ssh", mode=0o700)
        makers.append(key_maker(f"{folder}/host_key"))
    for maker in makers:
        if maker.wait() != 0:
            sys.exit("ssh-keygen failed")
    private, public = read(key), read(f"{key}.pub")
    known = "".join(known_host(host) for host in hosts)
    with open("/etc/passwd", encoding="utf-8") as file:
        others = [line for line in file if not line.startswith("root:")]
    for host in hosts:
        folder = f"{BED}/{host['name']}"
        for path, text in {
            ".ssh/id_ed25519": private,
            ".ssh/authorized_keys": public,
            ".ssh/known_hosts": known,
            ".ssh/config": SSH_CONFIG.format(home=folder),
            ".bashrc": host["bashrc"],
            "sshd_config": SSHD_CONFIG.format(home=folder, options="\n".join(host["sshd_options"])),
            "hosts": host["hosts_file"],
            "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
            "boot_id": read("/proc/sys/kernel/random/uuid"),
            # ssh and sshd take the home folder from here, and not from HOME.
            "passwd": "".join(
                [f"{user}:x:0:0:root:{folder}:/bin/bash\n" for user in ("root", *host["users"])] + others
            ),
        }.items():
            write(f"{folder}/{path}", text)
            os.chmod(f"{folder}/{path}", 0o600 if path.startswith(".ssh/") else 0o644)


def key_maker(path: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test bed", "-f", path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def known_host(host: dict[str, Any]) -> str:
    key = " ".join(read(f"{BED}/{host['name']}/host_key.pub").split()[:2])
    return f"{','.join([host['name'], *host['addresses']])} {key}\n"


def wait_for_port_22() -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for table in ("tcp", "tcp6"):
            for line in read(f"/proc/net/{table}").splitlines()[1:]:
                words = line.split()
                if words[1].endswith(":0016") and words[3] == "0A":
                    return
        time.sleep(0.004)
    raise TimeoutError("sshd does not listen")


def ip_batch(lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(["ip", "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip: {done.stderr.strip()} in\n{text}")


def spawn(argv: list[str], home: str) -> None:
    """Start a process whose end is not waited for by name."""
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.execve(argv[0], argv, {"PATH": os.defpath + ":/usr/sbin:/sbin", "HOME": home})


def tell(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def die_with_parent() -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def unshare(flags: int) -> None:
    check(LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    done = LIBC.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, None)
    check(done, f"mount {target}")


def check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()
