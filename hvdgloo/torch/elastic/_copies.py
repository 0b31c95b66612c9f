"""Copies of a state dict's tensors: made into memory that is kept, and only of those that have changed.

torch counts writes into a tensor (``_version``), but not all of them: writes of fused optimizers, batch normalisation
and CUDA graphs, or by way of ``tensor.data``, are not counted. A tensor is therefore taken for unchanged only if

- its memory and its count are the last copy's,
- no optimizer that has it has begun a step since (a hook that all of torch's optimizers run says so),
- it is a parameter or an optimizer's, not a module's buffer: these are small, and are always copied,
- a sample of its elements is what it was (if one tensor's is not, all are copied), and
- it is on the CPU: a GPU copies in less time than it takes to wait for a sample.

What remains unseen is a write to a few elements by way of ``tensor.data``, outside of any optimizer's step;
``torch.autograd.graph.increment_version(tensor)`` makes it known.

The copies of two successive saves lie in different memory, so that a save that is interrupted leaves the last one as it
was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvdgloo._backends import gpu
from hvdgloo.torch._buckets import is_dense
from hvdgloo.torch.elastic import _steps

Tensor = torch.Tensor
Path = tuple[object, ...]

_SAMPLE = 64
"""Elements of each tensor that are compared, spread evenly."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Element size in bytes to the type by which elements are compared: a NaN is to be equal to itself."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Slot:
    """Stands for the n-th tensor in a structure that is kept without its tensors."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(slots=True)
class Copy:
    """One tensor's copy.

    Attributes:
        live: an alias of the tensor that was copied; it keeps the memory from being used for another one.
        version: its count of writes at the time.
        kept: the copy.
        sample: a view of a few of the live tensor's elements, in one dimension; None if they cannot be viewed so, or
            should not.
        place: where the tensor's elements were, and how; empty if they do not fill a piece of memory.
        is_later: the contents are copied later.
    """

    live: Tensor
    version: int
    kept: Tensor
    sample: Tensor | None
    place: tuple[object, ...]
    is_later: bool = False


@dataclass
class Samples:
    """A few elements of each of some tensors.

    Attributes:
        indices: which tensors' they are.
        views: of the elements, for each of these.
        bits: what they were, one behind the other.
    """

    indices: list[int]
    views: list[Tensor]
    bits: Tensor

    def differing(self) -> set[int]:
        """Return the indices of tensors whose samples have changed."""
        now = torch.cat(self.views)
        if torch.equal(now, self.bits):
            return set()
        starts = np.cumsum([0, *(view.numel() for view in self.views)])
        places = torch.nonzero(now != self.bits).flatten().numpy()
        which = np.unique(np.searchsorted(starts, places, side="right") - 1)
        return {self.indices[i] for i in which.tolist()}


@dataclass
class Saved:
    """Copies saved of one structure.

    Attributes:
        skeleton: the structure with slots for its tensors, and copies of everything else.
        paths: where in the structure each tensor is.
        copies: of the tensors.
        steps: the number of steps that optimizers had begun at the time.
        samples: of the tensors then, by element type.
    """

    skeleton: Any
    paths: list[Path]
    copies: list[Copy]
    steps: int
    samples: list[Samples]

    @property
    def later(self) -> list[Copy]:
        """Return the copies whose contents follow later."""
        return [each for each in self.copies if each.is_later]

    def has_its_samples(self) -> bool:
        """Tell whether the copies hold the tensors' contents at the time of preparation, as far as samples show."""
        for samples in self.samples:
            kept = [_sample(self.copies[i].kept) for i in samples.indices]
            if not torch.equal(torch.cat([view for view in kept if view is not None]), samples.bits):
                return False
        return True

    def structure(self) -> Any:
        """Return a structure like the one that was saved, of copies of its own."""
        return filled(self.skeleton, [each.kept.clone() for each in self.copies])


def taken_apart(structure: Any) -> tuple[Any, list[Path], list[Tensor]]:
    """Take apart a structure of dicts, lists and tuples: return it with slots for tensors, their paths, and them."""
    paths: list[Path] = []
    tensors: list[Tensor] = []

    def emptied(value: Any, path: Path) -> Any:
        if isinstance(value, Tensor):
            paths.append(path)
            tensors.append(value)
            return Slot(len(tensors) - 1)
        if isinstance(value, dict):
            return {key: emptied(each, (*path, key)) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(emptied(each, (*path, i)) for i, each in enumerate(value))
        return value if type(value) in (int, float, str, bool, type(None)) else copy.deepcopy(value)

    return emptied(structure, ()), paths, tensors


def filled(skeleton: Any, tensors: Sequence[Any]) -> Any:
    """Return the structure that a skeleton is of, with other values in the slots."""
    if isinstance(skeleton, Slot):
        return tensors[skeleton.index]
    if isinstance(skeleton, dict):
        return {key: filled(each, tensors) for key, each in skeleton.items()}
    if type(skeleton) in (list, tuple):
        return type(skeleton)(filled(each, tensors) for each in skeleton)
    return copy.deepcopy(skeleton)


class Copies:
    """The copies of one value's state, from save to save.

    Args:
        is_steady: whether only steps of optimizers write into a tensor.
        stepped: of tensors, and since a ``Saved.steps``: the indices of those that optimizers may have written.
    """

    def __init__(
        self, is_steady: Callable[[Tensor], bool], stepped: Callable[[Sequence[Tensor], int], Collection[int]]
    ) -> None:
        self._is_steady = is_steady
        self._stepped = stepped
        self._saved: Saved | None = None
        self._spares: list[Tensor | None] = []

    @property
    def saved(self) -> Saved:
        """The last save, which must exist."""
        assert self._saved is not None
        return self._saved

    def take(self, structure: Any, *, later: bool = False) -> Saved:
        """Copy what has changed since the last save.

        Args:
            structure: dicts, lists and tuples, with tensors and other values in them.
            later: do not copy into what only steps of optimizers write; a GPU's is to get into page-locked memory.

        Returns:
            what ``adopt`` makes the last save; until then the one before is.
        """
        steps = _steps.so_far()
        skeleton, paths, tensors = taken_apart(structure)
        before, places = self._saved, list(map(_place, tensors))
        if before is None or before.paths != paths:
            self._spares = [None] * len(tensors)
            known: Sequence[Copy | None] = [None] * len(tensors)
            same: Collection[int] = ()
        else:
            known = before.copies
            same = self._unchanged(tensors, places)
            if len(same) == len(tensors):
                return Saved(skeleton, paths, before.copies, steps, before.samples)
        copies = [
            old if old is not None and i in same else self._prepared(i, tensor, old, places[i], later)
            for i, (tensor, old) in enumerate(zip(tensors, known, strict=True))
        ]
        transfer([(each.kept, each.live) for i, each in enumerate(copies) if i not in same and not each.is_later])
        return Saved(skeleton, paths, copies, steps, _sampled(copies))

    def adopt(self, saved: Saved) -> None:
        """Make it the last save. The copies of the one before, where there are newer ones, are written next time."""
        before, self._saved = self._saved, saved
        if before is not None and before.paths == saved.paths:
            for i, (old, new) in enumerate(zip(before.copies, saved.copies, strict=True)):
                if old.kept is not new.kept:
                    self._spares[i] = old.kept

    def is_unchanged(self, structure: Any) -> bool:
        """Tell whether all tensors of a structure have the contents that were saved last."""
        _, paths, tensors = taken_apart(structure)
        if paths != self.saved.paths:
            return False
        same = self._unchanged(tensors, list(map(_place, tensors)))
        others = [i for i in range(len(tensors)) if i not in same]
        return all(torch.equal(tensors[i], self.saved.copies[i].kept.to(tensors[i].device)) for i in others)

    def put_back(self, structure: Any) -> Any:
        """Write what was saved last into the tensors from which it was copied, where they have changed.

        Args:
            structure: the one that would be saved now; no other values than tensors are written.

        Returns:
            the structure that was saved, with these tensors in it; None, and nothing is written, if they are not the
            same tensors any more.
        """
        saved, steps = self.saved, _steps.so_far()
        _, paths, tensors = taken_apart(structure)
        places = list(map(_place, tensors))
        if paths != saved.paths or () in places or places != [each.place for each in saved.copies]:
            return None
        same = self._unchanged(tensors, places)
        changed = [i for i in range(len(tensors)) if i not in same]
        transfer([(tensors[i].detach(), saved.copies[i].kept) for i in changed])
        for i in changed:
            saved.copies[i].version = tensors[i]._version
        saved.steps = steps
        return filled(saved.skeleton, tensors)

    def _unchanged(self, tensors: Sequence[Tensor], places: Sequence[tuple[object, ...]]) -> set[int]:
        """Return the indices of tensors that have not changed since the last save."""
        saved = self.saved
        stepped = self._stepped(tensors, saved.steps)
        if len(stepped) == len(tensors):
            return set()
        same = {
            i
            for i, (each, tensor, place) in enumerate(zip(saved.copies, tensors, places, strict=True))
            if each.version == tensor._version
            and each.sample is not None
            and each.place == place
            and i not in stepped
            and self._is_steady(tensor)
        }
        if same and any(not same.isdisjoint(samples.differing()) for samples in saved.samples):
            return set()
        return same

    def _prepared(
        self, index: int, tensor: Tensor, before: Copy | None, place: tuple[object, ...], later: bool
    ) -> Copy:
        """Prepare a copy that has the place, but not yet the contents."""
        live, spare, version = tensor.detach(), self._spares[index], tensor._version
        if before is not None and place and before.place == place:
            sample = before.sample
        elif place and is_dense(live):
            sample = _sample(live)
        else:
            return Copy(live, version, live.clone(), None, ())
        later = later and self._is_steady(tensor)
        pinned = later and gpu.of(live) is not None
        fits = (
            spare is not None
            and spare.shape == live.shape
            and spare.dtype is live.dtype
            and spare.stride() == live.stride()
            and (spare.device.type == "cpu" if pinned else spare.device == live.device)
        )
        if not fits:
            spare = _page_locked(live) if pinned else torch.empty_like(live)
        assert spare is not None
        return Copy(live, version, spare, sample, place, later)


def transfer(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write each pair's second tensor into the first. What is given to a GPU for it is not waited for."""
    on_host = [pair for pair in pairs if gpu.of(pair[0]) is None and gpu.of(pair[1]) is None]
    with torch.no_grad():
        if on_host:
            targets, sources = zip(*on_host, strict=True)
            torch._foreach_copy_(targets, sources)
        for target, source in pairs:
            if gpu.of(target) is not None or gpu.of(source) is not None:
                gpu.copy(target, source)


def _page_locked(tensor: Tensor) -> Tensor:
    """Memory of the host for a GPU's tensor."""
    flat = gpu.pinned(max(1, tensor.numel()) * tensor.element_size()).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return the place and layout of a tensor's elements; nothing for a tensor that is not a piece of memory."""
    # Subclasses may consist of other tensors.
    if tensor.layout is not torch.strided or tensor.is_meta or not (type(tensor) in _PLAIN or gpu.of(tensor)):
        return ()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _sample(tensor: Tensor) -> Tensor | None:
    """Return a view of some elements' bits of an ordinary tensor on the CPU."""
    bits = _BITS.get(tensor.element_size())
    if bits is None or gpu.of(tensor) is not None:
        return None
    step = max(1, -(-tensor.numel() // _SAMPLE))
    return tensor.detach().as_strided((-(-tensor.numel() // step),), (step,)).view(bits)


def _sampled(copies: Iterable[Copy]) -> list[Samples]:
    """Take the samples as they are now."""
    indices: dict[torch.dtype, list[int]] = {}
    views: dict[torch.dtype, list[Tensor]] = {}
    for i, each in enumerate(copies):
        if each.sample is not None:
            indices.setdefault(each.sample.dtype, []).append(i)
            views.setdefault(each.sample.dtype, []).append(each.sample)
    return [Samples(indices[kind], views[kind], torch.cat(views[kind])) for kind in views]
