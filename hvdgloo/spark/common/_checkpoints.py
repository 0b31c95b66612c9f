"""Checkpoints: one file for each run, replaced in one step after every epoch.

The file is the framework's own (a ``.keras`` archive, what ``torch.save`` writes), so that it can be loaded without
this library. Both are zip archives, to which a member is added that says how far the run is. Whoever reads the file
while it is replaced has the one or the other epoch, whole.
"""

from __future__ import annotations

import dataclasses
import io
import json
import posixpath
import zipfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hvdgloo.errors import ConfigError

if TYPE_CHECKING:
    from hvdgloo.spark.common.store import RemoteStore

Signature = Sequence[tuple[str, tuple[int, ...]]]
"""Name and shape of each of a model's parameters."""

_MEMBER = "hvdgloo.json"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A run after some whole epochs.

    Attributes:
        epoch: how many.
        archive: the file: model and optimizer, in the framework's format.
        history: of these epochs.
        size: number of ranks that trained the last one.
        seed: of the run.
        signature: of its model; None if that is not known.
    """

    epoch: int
    archive: bytes
    history: Any
    size: int
    seed: int
    signature: Signature | None


def save(store: RemoteStore, name: str, checkpoint: Checkpoint) -> None:
    """Raises:
    StoreError: it cannot be written; the last one is intact.
    """
    facts = {
        "format": 1,
        "epoch": checkpoint.epoch,
        "history": checkpoint.history,
        "size": checkpoint.size,
        "seed": checkpoint.seed,
        "signature": checkpoint.signature,
    }
    buffer = io.BytesIO(checkpoint.archive)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(_member(archive), json.dumps(facts))
    store.write_bytes(_path(store, name), buffer.getvalue())


def load(store: RemoteStore, name: str) -> Checkpoint | None:
    """The run's checkpoint; None if there is none.

    Raises:
        ConfigError: there is a file of this name that is no checkpoint.
        StoreError: it cannot be read.
    """
    path = _path(store, name)
    if not store.exists(path):
        return None
    data = store.read(path)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            facts = json.loads(archive.read(_member(archive)))
    except (zipfile.BadZipFile, LookupError, ValueError):
        raise ConfigError(
            f"{path} is no checkpoint of an estimator: give another run_id, or remove the file to train anew"
        ) from None
    signature = facts["signature"]
    return Checkpoint(
        epoch=facts["epoch"],
        archive=data,
        history=facts["history"],
        size=facts["size"],
        seed=facts["seed"],
        signature=None if signature is None else [(name, tuple(shape)) for name, shape in signature],
    )


def _member(archive: zipfile.ZipFile) -> str:
    """Beside the archive's first member: torch reads no archive with files outside of the folder that it made."""
    return posixpath.join(posixpath.dirname(archive.namelist()[0]), _MEMBER)


def _path(store: RemoteStore, name: str) -> str:
    return posixpath.join(store.checkpoint_path or store.run_path, name)


def check(checkpoint: Checkpoint, signature: Signature | None, run_id: str) -> None:
    """Raises:
    ConfigError: the checkpoint is of another model; the text names the first parameter that differs.
    """
    if checkpoint.signature is None or signature is None:
        return
    for (name, shape), (own_name, own_shape) in zip(checkpoint.signature, signature, strict=False):
        if name != own_name:
            difference = f"it has a parameter {name!r} where the model has {own_name!r}"
        elif shape != own_shape:
            difference = f"its parameter {name!r} is of shape {shape}, the model's of {own_shape}"
        else:
            continue
        break
    else:
        if len(checkpoint.signature) == len(signature):
            return
        difference = f"it has {len(checkpoint.signature)} parameters, the model {len(signature)}"
    raise ConfigError(
        f"the checkpoint of run {run_id!r} is of another model: {difference}. Give another run_id to train anew"
    )
