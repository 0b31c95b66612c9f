# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.keras import *
from hvdgloo.keras import elastic as elastic
