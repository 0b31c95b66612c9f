"""``python -m hvdgloo.rendezvous`` is ``hvdgloo-rendezvous``."""

import sys

from hvdgloo._commands import rendezvous

if __name__ == "__main__":
    sys.exit(rendezvous())
