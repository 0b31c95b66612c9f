# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.tensorflow.mpi_ops import *
