# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.mxnet import *
from hvdgloo.mxnet import compression as compression
from hvdgloo.mxnet import elastic as elastic
from hvdgloo.mxnet import functions as functions
from hvdgloo.mxnet import mpi_ops as mpi_ops
