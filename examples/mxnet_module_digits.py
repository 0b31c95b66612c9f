"""Train a small network on handwritten digits with MXNet's Module API, on as many processes as you like.

    hvdgloo-run -np 2 examples/mxnet_module_digits.py

The data are the 1,797 images of 8 x 8 pixels that scikit-learn ships, so nothing is downloaded; use version 1.3.2
of scikit-learn, the last one for MXNet's old numpy. What makes this program distributed is marked (1) to (5).
"""

from __future__ import annotations

import argparse
import hashlib
import logging
from typing import Any

import mxnet as mx
import numpy as np
from sklearn.datasets import load_digits

import hvdgloo.mxnet as hvd


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small network on scikit-learn's handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=20, help="how often each image is seen")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step of one process")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate of one process")
    parser.add_argument("--seed", type=int, default=42, help="seed of initial weights and the order of images")
    return parser.parse_args()


def load_data() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return training and test images with digits, the same in every process: every fifth image is for the test."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    digits = labels.astype(np.float32)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], digits[~is_test]), (images[is_test], digits[is_test])


def build_symbol() -> Any:
    """Two convolutions and two dense layers: 8 x 8 grey pixels to 10 digits."""
    x = mx.sym.Variable("data")
    x = mx.sym.Activation(mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=16), act_type="relu")
    x = mx.sym.Activation(mx.sym.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=32), act_type="relu")
    x = mx.sym.Flatten(mx.sym.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max"))
    x = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=64), act_type="relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=10), name="softmax")


def main() -> None:
    args = parse_arguments()

    # (1) Find the other processes and get a rank.
    hvd.init()
    if hvd.rank() == 0:
        logging.basicConfig(level=logging.INFO)  # show what fit() does
    mx.random.seed(args.seed + hvd.rank())
    np.random.seed(args.seed + hvd.rank())  # NDArrayIter shuffles with it

    # (2) Each rank trains and tests on its own part of the data; all take the same number of steps.
    (images, digits), (test_images, test_digits) = load_data()
    each = len(images) // hvd.size()
    mine = np.random.default_rng(args.seed).permutation(len(images))[hvd.rank() * each : (hvd.rank() + 1) * each]
    data = mx.io.NDArrayIter(images[mine], digits[mine], args.batch_size, shuffle=True, last_batch_handle="discard")

    # (3) All start with rank 0's weights.
    module = mx.mod.Module(build_symbol())
    module.bind(data_shapes=data.provide_data, label_shapes=data.provide_label)
    module.init_params(mx.init.Xavier())
    arg_params, aux_params = module.get_params()
    hvd.broadcast_parameters(arg_params, root_rank=0)
    hvd.broadcast_parameters(aux_params, root_rank=0)

    # (4) Gradients are averaged over all ranks. These together take larger batches, so the learning rate grows; the
    # division by the batch size is up to each rank. No kvstore is needed.
    rate = args.lr * hvd.size()
    optimizer = mx.optimizer.SGD(learning_rate=rate, momentum=0.9, rescale_grad=1 / args.batch_size)
    module.fit(
        data,
        kvstore=None,
        optimizer=hvd.DistributedOptimizer(optimizer),
        num_epoch=args.epochs,
        arg_params=arg_params,
        aux_params=aux_params,
        force_init=True,  # use these parameters
    )

    # (5) Counts are averaged, not percentages; and only one rank reports.
    share = slice(hvd.rank(), None, hvd.size())
    test = mx.io.NDArrayIter(test_images[share], batch_size=args.batch_size)
    hits = module.predict(test).asnumpy().argmax(axis=1) == test_digits[share]
    correct, total = hvd.allreduce(mx.nd.array([hits.sum(), len(hits)]), name="accuracy").asnumpy()
    arrays = [array.asnumpy() for _, array in sorted(module.get_params()[0].items())]
    weights = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    if len(set(hvd.allgather_object(weights))) != 1:
        raise SystemExit("ranks hold different parameters")
    if hvd.rank() == 0:
        print(f"test accuracy averaged over {hvd.size()} ranks: {correct / total:.2%}")
        print(f"all ranks hold identical parameters ({weights[:12]})")
    hvd.shutdown()


if __name__ == "__main__":
    main()
