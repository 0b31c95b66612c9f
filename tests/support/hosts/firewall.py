"""One-way firewalls between hosts of a bed: who may not open connections to whom. Pure.

There is no iptables on most machines that run tests, but ``tc`` comes with ``ip``, and the system can run a small
filter of the classic BPF kind on what comes out of a host's port. It picks the first packet of a connection (SYN
without ACK), so connections in the other direction are none of its business.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

_ACCEPT, _PICK = 0, 0xFFFFFFFF

_LOAD_BYTE, _LOAD_HALF, _LOAD_WORD = 0x30, 0x28, 0x20
_LOAD_BYTE_INDEXED, _LOAD_INDEX_FROM_HEADER = 0x50, 0xB1
_AND, _JUMP_EQUAL, _RETURN = 0x54, 0x15, 0x06

_SYN, _SYN_OR_ACK = 0x02, 0x12
_TCP = 6


def opening_connections_to(address: str) -> str:
    """A program, as ``tc ... bpf bytecode`` takes it, that picks the first packets of connections to ``address``."""
    target = ipaddress.ip_address(address).packed
    words = [int.from_bytes(target[at : at + 4], "big") for at in range(0, len(target), 4)]
    if len(target) == 4:
        tests = [(_LOAD_HALF, 12, 0x0800), (_LOAD_BYTE, 23, _TCP), (_LOAD_WORD, 30, words[0])]
        flags = [(_LOAD_INDEX_FROM_HEADER, 0, 0, 14), (_LOAD_BYTE_INDEXED, 0, 0, 14 + 13)]
    else:
        tests = [(_LOAD_HALF, 12, 0x86DD), (_LOAD_BYTE, 20, _TCP)]
        tests += [(_LOAD_WORD, 38 + 4 * number, word) for number, word in enumerate(words)]
        flags = [(_LOAD_BYTE, 0, 0, 54 + 13)]
    return _picking(tests, [*flags, (_AND, 0, 0, _SYN_OR_ACK), (_JUMP_EQUAL, 0, 1, _SYN)])


def _picking(tests: Sequence[tuple[int, int, int]], last: Sequence[tuple[int, int, int, int]]) -> str:
    """A program that picks what passes all tests.

    Args:
        tests: how to load a part of the packet, from where, and what it must be.
        last: instructions of one more test, which skip the next instruction where it is not passed.
    """
    length = 2 * len(tests) + len(last) + 2
    program: list[tuple[int, int, int, int]] = []
    for load, offset, wanted in tests:
        program.append((load, 0, 0, offset))
        program.append((_JUMP_EQUAL, 0, _to_last(length, len(program)), wanted))
    program += [*last, (_RETURN, 0, 0, _PICK), (_RETURN, 0, 0, _ACCEPT)]
    return f"{len(program)}," + ",".join(" ".join(map(str, instruction)) for instruction in program)


def everything_to(address: str) -> str:
    """The same for all that goes to ``address``."""
    target = ipaddress.ip_address(address).packed
    words = [int.from_bytes(target[at : at + 4], "big") for at in range(0, len(target), 4)]
    kind, at = (0x0800, 30) if len(target) == 4 else (0x86DD, 38)
    tests = [(_LOAD_HALF, 12, kind), *((_LOAD_WORD, at + 4 * number, word) for number, word in enumerate(words))]
    return _picking(tests, [])


def _to_last(length: int, position: int) -> int:
    """Return how far a jump at ``position`` skips, to reach the last instruction."""
    return length - 1 - (position + 1)
