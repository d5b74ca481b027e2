"""scripts/cuda_report.py: a kernel's code may not grow unseen."""

import json
import sys

import pytest

from conftest import ROOT

sys.path[:0] = [str(ROOT / "scripts")]

import cuda_report  # noqa: E402


def test_names_are_short():
    name = "void switchyard::gpu::layer_kernel<switchyard::gpu::FP8Policy, true, true>(switchyard::gpu::LayerParams)"
    assert cuda_report.short(name) == "layer_kernel<FP8Policy, true, true>"
    name = "switchyard::gpu::few_tokens<(switchyard::gpu::FewNumbers)2, true>(switchyard::gpu::FewParams)"
    assert cuda_report.short(name) == "few_tokens<(FewNumbers)2, true>"
    assert cuda_report.short("switchyard::gpu::(anonymous namespace)::find_powers(int const*)") == "find_powers"


@pytest.mark.parametrize("size, says", [(99000, None), (101500, None), (101600, "1.6 % more than recorded"),
                                        (177000, "77.0 % more than recorded")])
def test_a_kernel_may_not_grow(tmp_path, capsys, size, says):
    path = tmp_path / "sizes.json"
    cuda_report.record(path, "13.0.88", {"gate": 100000})
    failures = cuda_report.growth(path, "13.0.88", {"gate": size})
    assert [says in failure and "--record" in failure for failure in failures] == ([] if says is None else [True])
    assert cuda_report.growth(path, "13.1.5", {"gate": size}) == []
    assert "recorded for nvcc 13.0.88, this is 13.1.5" in capsys.readouterr().out


def test_a_kernel_without_a_size_is_named(tmp_path):
    path = tmp_path / "sizes.json"
    cuda_report.record(path, "13.0.88", {"gate": 1, "route": 2})
    assert cuda_report.growth(path, "13.0.88", {"gate": 1}) == []  # a build may have some of the kernels
    failures = cuda_report.growth(path, "13.0.88", {"combine": 5})
    assert [failure.startswith("combine: no size is recorded") for failure in failures] == [True]


def test_kernels_of_all_types_have_a_size():
    recorded = json.loads((ROOT / "scripts/kernel_sizes.json").read_text())["bytes"]
    for policy in ("BF16Policy", "FP8Policy", "MXFP4Policy", "MXFP4FP8Policy", "INT4Policy", "LowPass<MXFP4Policy, 16", "LowPass<INT4Policy, 32"):
        assert any(policy in name for name in recorded), policy
