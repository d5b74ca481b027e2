"""Expert parallelism of transformers in one kernel: a model over processes beside the same model in one."""

import importlib.util
import json
import pathlib
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.17")

from conftest import launched
import switchyard
from switchyard import _hf_parallel

NEW = importlib.util.find_spec("transformers.distributed.expert_parallel") is not None
SCRIPT = pathlib.Path(__file__).parent / "hf_ranks.py"
# Topology, models, ranks. Before 5.24 all ranks have one batch. Starting ranks takes longer than what they compute.
RUNS = [("tp", ["qwen3_moe", "gpt_oss", "fp8"], 2)]
if NEW:
    RUNS += [("dp", ["gpt_oss"], 2), ("tp_dp", ["qwen3_moe"], 4), ("copies", ["qwen3_moe"], 4)]


def values(lines, key):
    return [line[key] for line in lines if key in line]


def by_model(lines):
    found = {}
    for line in lines:
        if "model" in line:
            of_model = found[line["model"]] = []
        of_model.append(line)
    return found


@pytest.mark.parametrize("topology,models,ranks", RUNS)
def test_models_over_ranks(topology, models, ranks):
    """Logits as of one process, whose experts are eager, though numbers of tokens differ between ranks."""
    for of_rank in launched(ranks, SCRIPT, topology, ",".join(models)):
        found = by_model(of_rank)
        assert list(found) == models
        for model, lines in found.items():
            # Attention over ranks rounds differently, and e4m3 turns some of that into another of its numbers.
            bound = 5e-3 if model == "fp8" else 1e-5
            shard = values(lines, "shard")[0]
            assert values(lines, "experts") == [8 // (ranks // 2 if topology == "copies" else ranks)]
            assert shard[0] == 8 // ranks
            errors = values(lines, "error")
            assert len(errors) == 6 and max(errors) < bound, lines
            assert values(lines, "error_of_zeros")[0] > 0.05
            assert values(lines, "error_of_another_activation")[0] < bound
            assert values(lines, "error_with_gradients")[0] < bound
            assert "no backward pass" in values(lines, "gradient")[0]
            if topology == "tp":
                assert values(lines, "same_words") == [True]
                assert values(lines, "compiled")[0] < bound
            else:
                assert "; pass a larger max_tokens to register_with_transformers()" in values(lines, "too_many")[0]


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_fails_is_named(how):
    ranks = launched(2, SCRIPT, "tp", "qwen3_moe", how, failing=1)
    assert values(ranks[0], "kind") in (["Timeout"], ["Aborted"])
    assert "rank 1" in values(ranks[0], "failure")[0]


def test_the_comparison_with_transformers_own_parallelism(tmp_path):
    """bench/transformers_e2e.py, which fails if outputs set to zero pass for right. Rows say how many ranks there were."""
    few = "--model tiny --prompt 32 --decode-prompt 8 --batches 1,5 --steps 2 --repeats 1 --words 12 --prompts 3".split()
    command = [pathlib.Path(__file__).parents[2] / "bench/transformers_e2e.py", *few, "--json", tmp_path / "rows.json"]
    launched(2, *command, "--implementations", "grouped_mm,switchyard,grouped_mm+tp,zeroed")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {row["implementation"] for row in rows} == {"grouped_mm", "switchyard", "grouped_mm+tp"}
    assert len(rows) == 9 and all(row["topology"] == "ep2" and row["error"] < 0.05 for row in rows)
    assert all(row["machine"] == "2 x cpu" and len(row["times_ms"]) in (1, 2) for row in rows)


def test_a_module_without_the_interface_is_refused():
    with pytest.raises(switchyard.Unsupported, match="Linear does not go through.*ep_implementation='auto'"):
        _hf_parallel.FusedExperts(torch.nn.Linear(2, 2), None, None)


def test_too_few_sms_beside_nccl_are_refused(monkeypatch):
    """Where ranks have batches of their own, FSDP's all-gathers run at the same time."""
    fused = object.__new__(_hf_parallel.FusedExperts)
    fused._group, fused._shares_batch = None, False
    on_gpu = types.SimpleNamespace(parameters=lambda: iter([types.SimpleNamespace(device=torch.device("cuda"))]))
    monkeypatch.setattr(_hf_parallel, "_world_of", lambda group: types.SimpleNamespace(size=2))
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    with pytest.raises(switchyard.Unsupported, match=r"reserved_sms of register_with_transformers\(\) is 0.*to 32"):
        fused._make(on_gpu, 8, 2)
