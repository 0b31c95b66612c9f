"""Collectives of ranks on one host, through memory: no socket carries a tensor's bytes.

Ranks copy through a shared segment (``segment``), piece by piece, so that it is small whatever the payload
(``segment_collectives``). Tensors that live in it are read where they are (``zero_copy``).

Ranks tell each other how far they are by counters (``signals``); each reduces a slice of its own (``fold``), and every
element in order of ranks: sums depend neither on fusion nor on timing. ``backend`` is what the engine sees of it.
"""
