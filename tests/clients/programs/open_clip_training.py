"""open_clip's trainer with ``--horovod``: the contrastive loss gathers features from all ranks, with gradients.

A small model that is described here is trained on pictures that are made here, without anything that has to be
fetched. They lie in tar files, as open_clip's own way to read others (``--dataset-type synthetic`` or ``csv``) asks
torch.distributed for its ranks, which a job of Horovod's has not initialised.
"""

import io
import json
import os
import tarfile
from pathlib import Path

import torch
from PIL import Image

# torchvision's wheels for CUDA beside torch's for the CPU: its operators cannot be loaded, and open_clip uses none.
if not torch.cuda.is_available():
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import open_clip
from open_clip_train.main import main

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 1, "layers": 1},
}


SHARDS, PICTURES = 4, 16


def make_shards(folder: Path) -> None:
    """Pictures of one colour, and what they show in words."""
    folder.mkdir()
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(PICTURES):
                picture = io.BytesIO()
                Image.new("RGB", (32, 32), (16 * number, 60 * shard, 0)).save(picture, "PNG")
                for kind, content in (("png", picture.getvalue()), ("txt", f"shade {number} of {shard}".encode())):
                    member = tarfile.TarInfo(f"{shard}-{number}.{kind}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))


def train() -> None:
    import horovod.torch as hvd

    hvd.init()
    if hvd.rank() == 0:
        make_shards(Path("shards"))
    folder = Path(f"configs-{hvd.rank()}")
    folder.mkdir()
    (folder / "tiny.json").write_text(json.dumps(MODEL))
    open_clip.add_model_config(folder)
    hvd.barrier()
    arguments = f"--model tiny --horovod --train-data shards/{{0..{SHARDS - 1}}}.tar --dataset-type webdataset "
    arguments += f"--train-num-samples {SHARDS * PICTURES} --batch-size 8 --epochs 2 --workers 1 --device cpu "
    arguments += "--precision fp32 --warmup 1 --logs logs --name run --save-frequency 1"
    main(arguments.split())
    if hvd.rank() == 0:
        saved = torch.load("logs/run/checkpoints/epoch_2.pt", weights_only=False, map_location="cpu")
        assert saved["epoch"] == 2
        assert saved["optimizer"]["state"], "no step was taken"
    assert len(set(hvd.allgather_object(os.getpid()))) == 2
    print("as it should be", flush=True)


if __name__ == "__main__":
    train()
