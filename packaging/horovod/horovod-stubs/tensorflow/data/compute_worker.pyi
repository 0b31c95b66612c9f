# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.tensorflow.data.compute_worker import *
