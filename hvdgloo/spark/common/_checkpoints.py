"""Checkpoints: one file for each run, replaced atomically after every epoch.

The file is in the framework's own format (a ``.keras`` archive, the output of ``torch.save``), so that it can be loaded
without this library. Both formats are zip archives, to which a member with the run's progress is added. A process that
reads the file while it is replaced gets either epoch, complete.
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
    """State of a run after some whole epochs.

    Attributes:
        epoch: number of these epochs.
        archive: content of the file: model and optimizer, in the framework's format.
        history: metrics of these epochs.
        size: number of ranks that trained the last one.
        seed: the run's seed.
        signature: the model's signature; None if it is unknown.
    """

    epoch: int
    archive: bytes
    history: Any
    size: int
    seed: int
    signature: Signature | None


def save(store: RemoteStore, name: str, checkpoint: Checkpoint) -> None:
    """Write the run's checkpoint.

    Raises:
        StoreError: it cannot be written; the previous one is intact.
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
    """Return the run's checkpoint; None if there is none.

    Raises:
        ConfigError: a file of this name exists but is not a checkpoint.
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
            f"{path} is not a checkpoint of an estimator: give another run_id, or remove the file to start over"
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
    """Return the path of our member, next to the first one: torch rejects files outside its own directory."""
    return posixpath.join(posixpath.dirname(archive.namelist()[0]), _MEMBER)


def _path(store: RemoteStore, name: str) -> str:
    return posixpath.join(store.checkpoint_path or store.run_path, name)


def check(checkpoint: Checkpoint, signature: Signature | None, run_id: str) -> None:
    """Check that a checkpoint fits the model.

    Raises:
        ConfigError: it is of another model; the text names the first parameter that differs.
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
        f"the checkpoint of run {run_id!r} is of another model: {difference}. Give another run_id to start over"
    )
