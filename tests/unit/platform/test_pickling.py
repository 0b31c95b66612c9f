"""Functions keep the name of their file on their way to another process, so that a traceback there says where."""

from __future__ import annotations

import pickle
import sys
import traceback

import cloudpickle
import numpy as np
import pytest

from hvdgloo._platform import pickling


def _failing() -> None:
    def inner() -> None:
        raise ValueError("as planned")  # this very line

    inner()


@pytest.mark.parametrize("again", [False, True], ids=["sent", "and sent on"])
def test_a_traceback_names_the_file_and_shows_the_lines(again: bool) -> None:
    # By value, as a function of a notebook or of __main__ is.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        data = pickling.dumps(_failing)
        if again:
            data = pickling.dumps(pickle.loads(data))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    function = pickle.loads(data)
    assert function is not _failing
    with pytest.raises(ValueError, match="as planned") as caught:
        function()
    frames = traceback.extract_tb(caught.value.__traceback__)[1:]
    assert [frame.filename for frame in frames] == [__file__] * 2
    assert [frame.line for frame in frames] == ["inner()", 'raise ValueError("as planned")  # this very line']


def test_what_is_not_code_is_pickled_as_cloudpickle_does() -> None:
    for value in (1, "text", [np.arange(5.0)], {"a": int}, np.dot):
        assert pickling.dumps(value) == cloudpickle.dumps(value)


def test_large_buffers_can_be_left_out() -> None:
    array = np.arange(1000.0)
    buffers: list[pickle.PickleBuffer] = []
    data = pickling.dumps(array, buffer_callback=buffers.append)
    assert len(data) < 1000
    assert pickle.loads(data, buffers=buffers).sum() == array.sum()
