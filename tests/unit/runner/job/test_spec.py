"""Ranks on hosts and their slots: values in, values out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hvdgloo.runner.job.spec import HostEntry, assign


class TestSlots:
    def test_ranks_fill_hosts_in_order(self) -> None:
        slots = assign([HostEntry("a", 2), HostEntry("b", 3), HostEntry("c", 1)], 5)
        rows = [(s.rank, s.hostname, s.local_rank, s.local_size, s.cross_rank, s.cross_size) for s in slots]
        assert rows == [
            (0, "a", 0, 2, 0, 2),
            (1, "a", 1, 2, 0, 2),
            (2, "b", 0, 3, 1, 2),
            (3, "b", 1, 3, 1, 2),
            (4, "b", 2, 3, 0, 1),
        ]

    @given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
    def test_places_agree_with_each_other(self, sizes: list[int], data: st.DataObject) -> None:
        np = data.draw(st.integers(1, sum(sizes)))
        slots = assign([HostEntry(f"h{i}", n) for i, n in enumerate(sizes)], np)
        assert [slot.rank for slot in slots] == list(range(np))
        for slot in slots:
            local = [other for other in slots if other.host == slot.host]
            cross = [other for other in slots if other.local_rank == slot.local_rank]
            assert (slot.local_rank, slot.local_size) == (local.index(slot), len(local))
            assert (slot.cross_rank, slot.cross_size) == (cross.index(slot), len(cross))
        assert sorted({slot.host for slot in slots}) == list(range(slots[-1].host + 1))
