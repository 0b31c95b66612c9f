"""tf.data's service for hvdgloo: a compute job prepares the datasets that a training job reads.

::

    hvdgloo-run -np 4 -- python -m hvdgloo.tensorflow.data.compute_worker service.json
    hvdgloo-run -np 2 -- python train.py service.json

In the training program::

    config = TfDataServiceConfig.read(sys.argv[1], wait_for_file_creation=True)
    with tf_data_service(config, hvd.rank()):
        dataset = dataset.send_to_data_service(config, hvd.rank(), hvd.size(), reuse_dataset=True)
        ...
    hvd.barrier()
    if hvd.rank() == 0:
        config.compute_client().shutdown()

Importing this package gives ``tf.data.Dataset`` the method ``send_to_data_service``.
"""

from __future__ import annotations

from hvdgloo.tensorflow.data.compute_service import (
    TfDataServiceConfig,
    compute_worker_fn,
    send_to_data_service,
    tf_data_service,
)

__all__ = ["TfDataServiceConfig", "compute_worker_fn", "send_to_data_service", "tf_data_service"]
