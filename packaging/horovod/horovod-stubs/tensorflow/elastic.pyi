# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.tensorflow.elastic import *
