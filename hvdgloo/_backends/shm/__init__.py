"""Collectives of ranks on one host, through memory: no socket carries a tensor's bytes.

Two ways to a peer's data, agreed by all members when they meet (``exchange``):

* **direct** (``direct``): a rank reads its peers' tensors where they lie, by process_vm_readv(2). One copy, no packing;
* **segment** (``rounds``): where the kernel forbids that, and for small payloads always, ranks copy through a shared
  segment (``segment``), piece by piece, so that the segment is small whatever the payload.

Ranks tell each other how far they are by counters (``signals``); each reduces a slice of its own (``fold``), and every
element in order of ranks: sums depend neither on fusion nor on timing. ``backend`` is what the engine sees of it.
"""
