# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.common.elastic import *
