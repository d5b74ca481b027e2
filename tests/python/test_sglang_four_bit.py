"""SGLang's FusedMoE with experts in MXFP4, of gpt-oss and DeepSeek-V4, and in INT4 on the CPU engine,
where SGLang (0.5.16, 0.5.23) can be imported: loaded by SGLang's own loaders, beside fp64. No GPU is used, and no
server is started.
"""

import importlib.util
import os

import pytest

pytest.importorskip("torch")

from conftest import ROOT, python


@pytest.mark.parametrize("what", ["gpt-oss", "gpt-oss-tp", "deepseek-v4", "int4", "int4-128", "refusals"])
def test_experts_of_four_bits(what):
    if importlib.util.find_spec("sglang") is None:
        pytest.skip(
            "SGLang is not installed: see docs/frameworks/sglang.md for how these tests were run"
        )
    path = [os.environ["PYTHONPATH"], ROOT / "tests/python"]
    assert "agrees" in python(ROOT / "tests/python/sglang_layers.py", what, path=path).stdout
