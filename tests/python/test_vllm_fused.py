"""Expert parallelism in vLLM with Switchyard's own exchange: what needs no vLLM, always; vLLM's layers on processes
over gloo where vLLM can be imported (vllm_fused.py), in 0.26 and 0.33. No GPU is used.

SWITCHYARD_VLLM_STEPS=10000 makes the soak long (default 60).
"""

import importlib.util
import os
import re
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import switchyard.vllm as plugin
from conftest import ROOT, python, started
from switchyard import Unsupported
from switchyard._serving import Options

FUSED = Options(expert_parallel="fused")
SOAK = os.environ.get("SWITCHYARD_VLLM_STEPS", "60")

# ----------------------------------------------------------------------------- without vLLM


def configs(**changes):
    """What refuse() reads of a VllmConfig and a FusedMoEConfig: expert parallelism over two processors."""
    parallel = SimpleNamespace(
        use_ubatching=False, enable_elastic_ep=False, tensor_parallel_size=1, pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
    )
    moe_parallel = SimpleNamespace(
        dp_size=2, ep_size=2, tp_size=1, sp_size=1, use_ep=True, use_all2all_kernels=True,
        use_ag_rs_all2all_kernels=True, all2all_backend="allgather_reducescatter",
    )
    moe = SimpleNamespace(
        is_lora_enabled=False, max_num_tokens=100, moe_parallel_config=moe_parallel, moe_backend="auto",
        skip_final_all_reduce=False,
    )
    vllm = SimpleNamespace(
        parallel_config=parallel,
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=100),
        weight_transfer_config=None,
    )
    for name, value in changes.items():
        (holder,) = (holder for holder in (parallel, moe_parallel, moe, vllm) if hasattr(holder, name))
        setattr(holder, name, value)
    return vllm, moe


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"use_ep": False, "ep_size": 1}, "--enable-expert-parallel"),
        ({"skip_final_all_reduce": True}, "skip_final_all_reduce"),
        ({"weight_transfer_config": object()}, "weights are transferred"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism over 2 ranks"),
        ({"prefill_context_parallel_size": 4}, "prefill context parallelism over 4 ranks"),
        ({"all2all_backend": "deepep_low_latency"}, "'deepep_low_latency': Switchyard exchanges"),
        ({"all2all_backend": "passthrough"}, "'passthrough': Switchyard exchanges"),
        ({"use_ubatching": True}, "two-batch overlap"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"enable_elastic_ep": True}, "elastic"),
    ],
)
def test_what_ranks_cannot_share_is_refused(changes, text):
    plugin.refuse(FUSED, *configs())
    with pytest.raises(Unsupported, match=text):
        plugin.refuse(FUSED, *configs(**changes))


def test_room_for_a_ranks_own_tokens():
    assert plugin.capacity(*configs()) == 200  # vLLM gathers those of all
    assert plugin.capacity(*configs(), fused_over=1) == 100
    assert plugin.capacity(*configs(max_num_tokens=101), fused_over=4) == 26


# -------------------------------------------------------------------------------- with vLLM


def fused(*words):
    """The cases of vllm_fused.py, in processes of their own."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: see docs/frameworks/vllm.md for how these tests were run")
    return started(sys.executable, ROOT / "tests/python/vllm_fused.py", *words, timeout=3600)


ALL = ["bf16", "bias", "fp8", "mxfp4", "int4", "input", "shared", "eplb", "eplb_bias", "eplb_fp8"]


@pytest.mark.parametrize(
    "words",
    [
        [*ALL, "refusals"],
        [*ALL, "--zeroed"],
        ["bf16", "fp8", "shared", "refusals", "--dp", "1", "--tp", "2"],
        ["bf16", "bias", "shared", "split", "--dp", "2", "--tp", "2"],
        ["soak", "--steps", SOAK],
    ],
    ids=" ".join,
)
def test_ranks(words):
    done = fused(*words)
    assert done.returncode == 0 and "agrees" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("how,at_once", [("kill", True), ("stop", False), ("halt", False)])
def test_a_rank_that_fails_is_named_and_ends_the_others(how, at_once):
    """By the deadline, which is 3 s there, and a killed one long before it."""
    done = fused(how, "--dp", "2")
    found = re.search(r"step 5 named (-?\d+) in ([\d.]+) s", done.stdout)
    assert found is not None, done.stdout[-2000:] + done.stderr[-4000:]
    assert int(found[1]) == 1
    assert float(found[2]) < (1 if at_once else 4)
    # The error is what the process ends with: in a server, its engine.
    assert "ended with [1]" in done.stdout and "rank 1" in done.stderr
    assert re.search(r"switchyard.errors.(Timeout|Aborted): rank 1", done.stderr)


def test_a_worker_ends_with_what_it_waited_for():
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: see docs/frameworks/vllm.md for how these tests were run")
    script = """
import sys, types
from vllm_ranks import on_cpus
on_cpus()
import switchyard
from switchyard import _serving, _vllm_ranks

class Later:
    def get_output(self):
        return "tokens"

class Worker:
    def execute_model(self, wanted):
        return Later() if wanted == "later" else wanted

    def sample_tokens(self):
        return "tokens"

    execute_dummy_batch = sample_tokens

    def compile_or_warm_up_model(self):
        met.append("warm")
        dp_utils._run_ar(0)

met = []
class World:
    def barrier(self):
        met.append("barrier")

dp_utils = types.SimpleNamespace(_run_ar=met.append)
sys.modules["vllm.v1.worker.dp_utils"] = dp_utils
ranks = _serving.Ranks(World(), None)
ranks._met = True
failed, asked = [], []
def check():
    asked.append(1)
    for error in failed:
        raise error
_vllm_ranks.check_passes = check
sys.modules["vllm.v1.worker.gpu_worker"] = types.SimpleNamespace(Worker=Worker)
_vllm_ranks.watch_steps(ranks)
_vllm_ranks.watch_steps(ranks)
worker = Worker()
dp_utils._run_ar(1)
worker.compile_or_warm_up_model()
dp_utils._run_ar(2)
# Ranks may come minutes apart until they serve.
assert met == [1, "warm", 0, "barrier", 2], met
later = worker.execute_model("later")
assert not asked and later.get_output() == "tokens" and len(asked) == 1
assert worker.execute_model(None) is None and len(asked) == 1  # sample_tokens() follows
assert worker.execute_model("now") == "now" and len(asked) == 2
failed.append(switchyard.Timeout("rank 1 did not do its part"))
for step in (worker.sample_tokens, worker.execute_dummy_batch, later.get_output, lambda: worker.execute_model("now")):
    try:
        step()
    except switchyard.Timeout:
        continue
    raise AssertionError(step)
"""
    python("-c", script, path=[ROOT / "tests/python"])
