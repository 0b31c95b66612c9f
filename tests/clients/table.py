"""The libraries that ``make clients`` tries: they were written for Horovod, and nobody here wrote them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A library, and a program that uses it.

    Attributes:
        name: its own name for itself.
        version: the release that is tried.
        program: in ``programs``, without its suffix.
        packages: what pip installs besides hvdgloo.
        tensorflow: it needs TensorFlow, which is taken from ``.venv-tf``.
    """

    name: str
    version: str
    program: str
    packages: tuple[str, ...]
    tensorflow: bool = False


CLIENTS = (
    Client(
        "open_clip",
        "3.3.0",
        "open_clip_training",
        # torchvision's release for torch 2.13; of webdataset the last that open_clip works with.
        (
            "open-clip-torch==3.3.0",
            "torchvision==0.28.0",
            "torch==2.13.0",
            "webdataset==0.2.86",
            "braceexpand",
            "pandas",
        ),
    ),
    Client("pytorch-ignite", "0.5.5", "ignite_backend", ("pytorch-ignite==0.5.5",)),
    # It imports pkg_resources, which later releases of setuptools do not have.
    Client("pytorch-lightning", "1.9.5", "lightning_strategy", ("pytorch-lightning==1.9.5", "setuptools<81")),
    Client("deepmd-kit", "3.2.0", "deepmd_training", ("deepmd-kit==3.2.0",), tensorflow=True),
)
