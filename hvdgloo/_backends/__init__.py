"""Data planes: how bytes move between ranks, by Gloo, NCCL, shared memory, or threads of one process."""
