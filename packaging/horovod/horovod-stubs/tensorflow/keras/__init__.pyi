# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.tensorflow.keras import *
from hvdgloo.tensorflow.keras import elastic as elastic
