"""A program that is no worker itself, and imports ``horovod``: a driver of Spark or Ray, say.

::

    python -m hvdgloo.as_horovod keras_spark_mnist.py --num-proc 2
    PYTHONPATH=$(python -m hvdgloo.as_horovod) spark-submit keras_spark_mnist.py

Workers that it starts with ``horovod.spark.run`` import hvdgloo under that name, too.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from hvdgloo.as_horovod import VARIABLE, environment


def main() -> NoReturn:
    """Become Python with these arguments; without any, print the directory for PYTHONPATH."""
    environ = {**os.environ, VARIABLE: "1"}
    environ.update(environment(environ))
    if len(sys.argv) == 1:
        sys.stdout.write(environ["PYTHONPATH"] + "\n")
        sys.exit(0)
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environ)


if __name__ == "__main__":
    main()
