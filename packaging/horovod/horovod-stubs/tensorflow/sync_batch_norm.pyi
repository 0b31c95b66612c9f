# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.tensorflow.sync_batch_norm import *
