"""open_clip's trainer with ``--horovod``: the contrastive loss gathers features from all ranks, with gradients.

A small model that is described here is trained on synthetic pictures, without anything that has to be fetched.
"""

import json
import os
import sys
from pathlib import Path

import torch

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


def train() -> None:
    import horovod.torch as hvd

    hvd.init()
    folder = Path(f"configs-{hvd.rank()}")
    folder.mkdir(exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(MODEL))
    open_clip.add_model_config(folder)
    arguments = "--model tiny --horovod --dataset-type synthetic --train-num-samples 32 --batch-size 8 --epochs 2 "
    arguments += "--workers 0 --device cpu --precision fp32 --warmup 1 --logs logs --name run --save-frequency 1"
    main(arguments.split())
    saved = torch.load("logs/run/checkpoints/epoch_2.pt", weights_only=False, map_location="cpu")
    assert saved["epoch"] == 2
    assert saved["optimizer"]["state"], "no step was taken"
    assert len(set(hvd.allgather_object(os.getpid()))) == 2
    print("as it should be", flush=True)


if __name__ == "__main__":
    sys.exit(train())
