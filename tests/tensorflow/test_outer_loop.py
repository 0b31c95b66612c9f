"""OuterOptimizer over TensorFlow's variables."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")

from hvdgloo._collectives.frontend import Frontend  # noqa: E402
from hvdgloo._job.context import Context  # noqa: E402
from hvdgloo.numpy._adapter import NumpyAdapter  # noqa: E402
from hvdgloo.numpy._outer import OuterOptimizer  # noqa: E402
from tests.support.world import World  # noqa: E402


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_variables_of_a_loop_are_averaged_every_so_many_steps(dtype: str) -> None:
    def rank_body(context: Context) -> bytes:
        class Own(OuterOptimizer):
            frontend = Frontend(NumpyAdapter(), lambda: context)

        matrix, scalar = tf.Variable(tf.ones((2, 3), dtype)), tf.Variable(tf.constant(2, dtype))
        outer = Own([matrix, scalar], 2)
        for _ in range(4):
            matrix.assign_add(tf.ones((2, 3), dtype) * context.rank)
            scalar.assign_sub(tf.constant(context.rank, dtype))
            outer.step()
        assert matrix.numpy().astype(float).tolist() == [[3.0] * 3] * 2
        assert float(scalar.numpy()) == 0.0
        return bytes(matrix.numpy().tobytes())

    with World(2) as made:
        assert len(set(made.run(rank_body))) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_variables_of_a_loop_are_averaged_in_fragments_while_it_goes_on(dtype: str) -> None:
    def rank_body(context: Context) -> bytes:
        class Own(OuterOptimizer):
            frontend = Frontend(NumpyAdapter(), lambda: context)

        matrix, scalar = tf.Variable(tf.zeros((2, 3), dtype)), tf.Variable(tf.zeros((6,), dtype))
        outer = Own([matrix, scalar], 4, fragments=2, overlap=1)
        for done in range(1, 6):
            matrix.assign_add(tf.ones((2, 3), dtype) * context.rank)
            scalar.assign_add(tf.ones((6,), dtype) * context.rank)
            outer.step()
            own = done * context.rank
            assert float(matrix.numpy()[0, 0]) == (own if done < 3 else 1 + (done - 2) * context.rank)
            assert float(scalar.numpy()[0]) == (own if done < 5 else 2 + context.rank)
        outer.finish()
        assert scalar.numpy().astype(float).tolist() == [2.5] * 6
        return bytes(matrix.numpy().tobytes())

    with World(2) as made:
        assert len(set(made.run(rank_body))) == 1
