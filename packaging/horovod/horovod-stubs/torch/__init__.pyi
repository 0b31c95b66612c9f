# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.torch import *
from hvdgloo.torch import compression as compression
from hvdgloo.torch import elastic as elastic
from hvdgloo.torch import functions as functions
from hvdgloo.torch import mpi_ops as mpi_ops
from hvdgloo.torch import optimizer as optimizer
from hvdgloo.torch import sync_batch_norm as sync_batch_norm
