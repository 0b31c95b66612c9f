"""The libraries that ``make clients`` tries: written elsewhere, for Horovod or for torch.distributed."""

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
        bare: what pip installs without its dependencies, because they pin another torch or TensorFlow, or bring much
            that the program does not import.
        tensorflow: it needs TensorFlow, which is taken from ``.venv-tf``.
        horovod: it imports Horovod; otherwise it uses torch.distributed, and is run on gloo and on hvdgloo.
        named: its program takes the name of a backend of torch.distributed as its argument.
        launches: without a launcher, it starts two ranks itself.
        environment: variables for its program, each as ``NAME=VALUE``.
        hosts: its program is run on two hosts as well, with a worker on each.
    """

    name: str
    version: str
    program: str
    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()
    tensorflow: bool = False
    horovod: bool = True
    named: bool = False
    launches: bool = False
    environment: tuple[str, ...] = ()
    hosts: bool = False


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
    Client(
        "itwinai",
        "0.4.2",
        "itwinai_strategy",
        ("pydantic", "typer", "omegaconf", "jsonargparse[signatures]", "hydra-core", "tabulate"),
        bare=("itwinai==0.4.2",),
        environment=("ITWINAI_FORCE_DIST=1",),
    ),
    Client(
        "determined",
        "0.38.1",
        "determined_context",
        (
            "requests",
            "pyzmq",
            "lomond",
            "filelock",
            "pathspec",
            "termcolor",
            "ruamel.yaml",
            "tqdm",
            "appdirs",
            "tabulate",
        ),
        bare=("determined==0.38.1",),
    ),
    Client("tensorpack", "0.11", "tensorpack_training", ("tensorpack==0.11",), tensorflow=True),
    Client(
        "tensorflow-recommenders-addons",
        "0.8.1",
        "tfra_embedding",
        # Its library needs symbols of CUDA's runtime, which tensorflow-cpu does not have.
        ("--no-compile", "tensorflow==2.16.2", "tf-keras==2.16.0"),
        bare=("tensorflow-recommenders-addons==0.8.1",),
    ),
    Client(
        "accelerate",
        "1.15.0",
        "accelerate_training",
        ("accelerate==1.15.0",),
        horovod=False,
        named=True,
        environment=("ACCELERATE_USE_CPU=1",),
    ),
    Client(
        "transformers",
        "5.24.0",
        "transformers_trainer",
        ("transformers==5.24.0", "accelerate==1.15.0"),
        horovod=False,
        named=True,
    ),
    Client(
        "lightning",
        "2.6.6",
        "lightning_ddp",
        ("lightning==2.6.6",),
        horovod=False,
        named=True,
        launches=True,
        hosts=True,
    ),
    Client("torchmetrics", "1.9.0", "torchmetrics_sync", ("torchmetrics==1.9.0",), horovod=False),
    Client("webdataset", "1.0.2", "webdataset_nodes", ("webdataset==1.0.2",), horovod=False),
    Client("torch", "2.13.0", "torch_fsdp2", ("torch==2.13.0",), horovod=False, named=True),
    Client("deepspeed", "0.19.8", "deepspeed_init", ("deepspeed==0.19.8",), horovod=False),
    Client(
        "mosaicml",
        "0.32.1",
        "composer_trainer",
        (
            "mosaicml-cli<0.8",
            "torchmetrics<1.7.5",
            "torch_optimizer<0.4",
            "coolname<3",
            "importlib-metadata<9",
            "pillow<12",
            "py-cpuinfo",
            "requests",
            "tabulate==0.9.0",
        ),
        # It asks for torch < 2.7.1.
        bare=("mosaicml==0.32.1", "torchvision==0.28.0"),
        horovod=False,
    ),
)
