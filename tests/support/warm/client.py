# The stand-in for an interpreter: it asks the server of warm ones for a fork, passes signals on, and ends as that ends.
# Two lines before this say which PYTHON it stands in for, and at which SOCKET the server listens. Imports only what is
# compiled into the interpreter, to start in a hundredth of a second.
import _signal
import _socket
import marshal
import os
import sys


def main():
    inherited = []  # before this opens any itself
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fd > 2 and os.get_inheritable(fd):
                inherited.append(fd)
        except OSError:  # the folder's own descriptor
            pass
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(SOCKET)  # noqa: F821
    except OSError:  # a host that does not see it
        os.execv(PYTHON, [PYTHON, *sys.argv[1:]])  # noqa: F821
    paths = [".", *(f"/proc/self/ns/{name}" for name in ("mnt", "uts", "ipc", "net", "pid"))]
    fds = [0, 1, 2, *(os.open(path, os.O_RDONLY) for path in paths), *inherited]
    packed = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
    data = marshal.dumps({"arguments": sys.argv[1:], "environ": dict(os.environ), "inherited": inherited})
    data = len(data).to_bytes(8, "big") + data

    def pass_on(number, frame):
        try:
            connection.send(bytes([number]))
        except BrokenPipeError:  # it has just ended; its code is there to be received
            pass

    for number in (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGTERM, _signal.SIGUSR1, _signal.SIGUSR2):
        _signal.signal(number, pass_on)
    sent = connection.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])
    if sent < len(data):  # to send nothing is an error, too, once the program has ended, which may be by now
        connection.sendall(data[sent:])
    for fd in fds[3:]:
        os.close(fd)
    connection.recv(4, _socket.MSG_WAITALL)
    code = int.from_bytes(connection.recv(4, _socket.MSG_WAITALL) or b"\0\0\0\xff", "big", signed=True)
    if code < 0:
        if -code not in (_signal.SIGKILL, _signal.SIGSTOP):
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
