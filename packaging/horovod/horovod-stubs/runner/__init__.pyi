# Written by docs/generate_stubs.py; do not edit.

from hvdgloo import run as run
from hvdgloo.runner import *
