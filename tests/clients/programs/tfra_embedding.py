"""tensorflow-recommenders-addons: an embedding that is spread over the ranks by alltoall, optimizer and checkpoint."""

import numpy as np
import tensorflow as tf
import tensorflow_recommenders_addons.dynamic_embedding as de
import tf_keras

IDS, WIDTH, STEPS = 40, 4, 60


def main() -> None:
    import horovod.tensorflow as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert size == 2
    tf.random.set_seed(rank)
    embedding = de.keras.layers.HvdAllToAllEmbedding(
        embedding_size=WIDTH,
        initializer=tf.constant_initializer(0.5),
        mpi_size=size,
        kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver(proc_size=size, proc_rank=rank)),
        name="embedding",
    )
    dense = tf_keras.layers.Dense(1, name="dense")
    plain = tf_keras.optimizers.Adam(0.05)
    optimizer = de.DynamicEmbeddingOptimizer(plain, synchronous=True)

    def forward(ids: tf.Tensor) -> tf.Tensor:
        return dense(embedding(ids))

    forward(tf.constant([0], tf.int64))
    hvd.broadcast_variables(dense.variables, root_rank=0)

    @tf.function
    def step(ids: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(forward(ids) - wanted))
        variables = [*embedding.trainable_variables, *dense.trainable_variables]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    random = np.random.default_rng(rank)
    losses = []
    for _ in range(STEPS):
        ids = random.integers(IDS, size=64)
        wanted = (ids % 3 - 1.0).astype(np.float32)[:, None]
        losses.append(float(step(tf.constant(ids), tf.constant(wanted))))
    assert losses[-1] < losses[0] / 4, losses
    weights = hvd.allgather_object([variable.numpy().tolist() for variable in dense.variables])
    assert weights[0] == weights[1], weights
    # Each rank keeps the rows of its own ids, and gets the others' by alltoall.
    rows = hvd.allgather_object(int(embedding.params.size()))
    assert sum(rows) == IDS, rows
    assert all(rows), rows
    everything = tf.range(IDS, dtype=tf.int64)
    looked_up = hvd.allgather_object(embedding(everything).numpy().tolist())
    assert looked_up[0] == looked_up[1]
    checkpoint = de.train.DECheckpoint(embedding=embedding, dense=dense)
    path = checkpoint.save("checkpoint/ranks")
    embedding.params.clear()
    checkpoint.restore(path)
    assert int(embedding.params.size()) == rows[rank]
    assert embedding(everything).numpy().tolist() == looked_up[rank]
    hvd.shutdown()
    print("as it should be", flush=True)


if __name__ == "__main__":
    main()
