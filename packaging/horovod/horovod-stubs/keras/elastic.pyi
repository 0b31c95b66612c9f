# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.keras.elastic import *
