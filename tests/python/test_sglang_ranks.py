"""SGLang's data-parallel attention with experts over ranks, between which Switchyard exchanges tokens: SGLang's own MoE
blocks of Qwen3, Qwen2, GLM and DeepSeek in processes, with its groups over gloo, on the CPU engine, where SGLang (0.5.16,
0.5.23) can be imported. No GPU is used, and no server is started. What needs no SGLang always runs."""

import functools
import importlib.util
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import switchyard.sglang as plugin
from conftest import ROOT, launched
from switchyard import Unsupported
from switchyard._serving import Options
from switchyard._sglang_setup import Fused, capacity_of_rank


def deployment(**changes):
    ranks = dict(expert_ranks=2, tensor_ranks=2, attention_ranks=2)
    return plugin.Deployment(device="cpu", ranks=2, fused=Fused(**ranks | changes))


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"attention_ranks": 1}, "1 of data-parallel attention and 2 of expert parallelism.*--enable-dp-attention"),
        ({"expert_ranks": 1}, "a batch of its own: pass the same number"),
        ({"architecture": "GptOssForCausalLM"}, "the model is a GptOssForCausalLM"),
        ({"speculative": True}, "speculative decoding"),
        ({"moves_experts": True}, "EPLB"),
        ({"shared_experts": True}, "pass --disable-shared-experts-fusion"),
    ],
)
def test_what_cannot_be_fused_is_refused(changes, text):
    plugin.refuse(Options(), deployment())
    plugin.refuse(Options(), deployment(architecture="Qwen3MoeForCausalLM"))
    with pytest.raises(Unsupported, match=text):
        plugin.refuse(Options(), deployment(**changes))


def test_room_for_tokens_of_a_rank():
    assert capacity_of_rank(8192, 16384) == 8192
    assert capacity_of_rank(256, 16384) == 4096  # decoding batches
    assert capacity_of_rank(-1, 16384) == 16384


@pytest.fixture
def run(tmp_path):
    """Ranks of sglang_ranks.py."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed: see docs/frameworks/sglang.md for how these tests were run")

    def start(what, ranks=2, **more):
        return launched(ranks, ROOT / "tests/python/sglang_ranks.py", tmp_path, what, **more)

    return start


def values(lines, key):
    return [line[key] for line in lines if key in line]


def test_blocks_over_ranks(run):
    """A rank without tokens takes part, and nobody adds up what ranks computed for tokens of their own."""
    for lines in run("passes"):
        assert values(lines, "stays") == [True]
        # Qwen3's block in bf16 and FP8, Qwen2's, GLM's, and DeepSeek's in FP8 and bf16, these with their shared experts.
        assert values(lines, "shard") == 6 * [[4, 256, 256]] and values(lines, "most") == 6 * [4096]
        errors = values(lines, "error")  # as parts of what they may be
        assert len(errors) > 25 and max(errors) < 1, lines
        assert sum(values(lines, "sure")) > 0.8 * sum(values(lines, "tokens"))
        assert values(lines, "promise") == 6 * [4, 2]
        assert values(lines, "error_of_zeros")[0] > 0.5
        assert values(lines, "epoch") == [32]  # of 4 x 8 passes in bf16, in one memory
        assert "set the option max_tokens" in values(lines, "too_many")[0]


def test_what_a_server_cannot_have_is_refused(run):
    texts = ["--ep-size is 1", "EPLB", "speculative", "EPLB", "MixtralForCausalLM", "two-batch-overlap", "adds its"]
    for lines in run("refusals"):
        refusals = values(lines, "refusal")
        assert len(refusals) == len(texts)
        assert all(text in refusal for text, refusal in zip(texts, refusals)), refusals
        assert values(lines, "architecture") == ["Qwen3MoeForCausalLM"]


@pytest.mark.parametrize("where", ["pass", "agreement", "requests"])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_fails_is_named(run, how, where):
    ranks = run(f"{how}-{where}", failing=1)
    assert values(ranks[0], "kind") in (["Timeout"], ["Aborted"])
    assert "rank 1" in values(ranks[0], "failure")[0]


def test_a_failed_pass_is_raised_before_its_tokens_are_used(run, monkeypatch):
    """SGLang's method is decorated, and every layer asks for it to be watched."""
    from switchyard import _sglang_ranks

    seen = []

    class Scheduler:
        @functools.wraps(print)
        def process_batch_result(self, batch, result):
            seen.append("used")

    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", SimpleNamespace(Scheduler=Scheduler))
    monkeypatch.setattr(_sglang_ranks, "check_passes", lambda: seen.append("checked"))
    for _ in range(2):
        _sglang_ranks.watch_results()
    there = SimpleNamespace(synchronize=lambda: seen.append("there"))
    Scheduler().process_batch_result(None, SimpleNamespace(copy_done=there))
    Scheduler().process_batch_result(None, SimpleNamespace())
    with pytest.raises(Unsupported, match="no sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo"):
        monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler_components.dp_attn", SimpleNamespace())
        _sglang_ranks.watch_schedulers(None)
    assert seen == ["there", "checked", "used", "checked", "used"]
