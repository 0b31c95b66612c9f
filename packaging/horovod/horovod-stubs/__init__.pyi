# Written by docs/generate_stubs.py; do not edit.

from hvdgloo import *
from hvdgloo import run as run

__version__: str
