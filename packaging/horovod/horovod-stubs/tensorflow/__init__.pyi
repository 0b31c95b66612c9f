# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.tensorflow import *
from hvdgloo.tensorflow import compression as compression
from hvdgloo.tensorflow import elastic as elastic
from hvdgloo.tensorflow import functions as functions
from hvdgloo.tensorflow import mpi_ops as mpi_ops
from hvdgloo.tensorflow import sync_batch_norm as sync_batch_norm
