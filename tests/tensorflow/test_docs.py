"""What the pages say about TensorFlow and Keras is so."""

from __future__ import annotations

import importlib.util
import re

import pytest

from tests.architecture.source import ROOT


def test_the_api_page_is_what_the_docstrings_say() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate_api_tensorflow.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs/api-tensorflow.md").read_text(encoding="utf-8")
    assert written == module.text(), "run: python docs/generate_api_tensorflow.py"


@pytest.mark.parametrize("containing", ["DistributedGradientTape", "model.fit"])
def test_the_readmes_programs_train(capsys: pytest.CaptureFixture[str], containing: str) -> None:
    """Alone, in this process, which has TensorFlow loaded; on several ranks the examples do the same."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (program,) = [block for block in blocks if containing in block]
    code = compile(program, "README.md", "exec")
    module: dict[str, object] = {"__name__": "readme"}
    try:
        exec(code, module)
    finally:
        module["hvd"].shutdown()  # type: ignore[attr-defined]
    assert re.search(r"1 workers, loss 0\.0\d+", capsys.readouterr().out)
