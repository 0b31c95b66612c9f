# Written by docs/generate_stubs.py; do not edit.

from hvdgloo.torch.sync_batch_norm import *
