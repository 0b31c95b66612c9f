# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.tensorflow.gradient_aggregation import *
