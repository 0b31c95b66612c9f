"""``python -m hvdgloo.rendezvous`` is ``hvdgloo-rendezvous``."""

import sys

from hvdgloo.rendezvous._cli import main

if __name__ == "__main__":
    sys.exit(main())
