"""One rank of SGLang's data-parallel attention with experts over all ranks, which Switchyard exchanges tokens for, as a
server on CPUs makes its blocks: for test_sglang_ranks.py. torchrun's variables say which rank.

    sglang_ranks.py DIRECTORY passes|refusals|HOW-WHERE

HOW is the signal by which the last rank fails, SIGKILL or SIGSTOP, and WHERE is pass, agreement or requests.

It says what it saw in lines of JSON.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
from types import SimpleNamespace

import torch

import switchyard
from four_bit_cases import E, H, I, K
from reference import error, experts, fp8_experts, fp8_values, routing
from sglang_layers import CONFIG, load, serve
from switchyard import _serving

DEADLINE = 4.0


def say(**what):
    print(json.dumps(what), flush=True)


BF16_ERROR = 1e-2


def filled(block, fp8=False):
    """A block with seeded weights of every rank, and the experts' three matrices."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    shapes = ((E, I, H), (E, I, H), (E, H, I))
    if fp8:
        codes, scales, matrices = zip(*map(fp8_values, shapes), strict=True)
        stored = {"weight": codes, "weight_scale_inv": scales}
    else:
        matrices = [random(*shape).bfloat16() for shape in shapes]
        stored = {"weight": matrices}
    layer = block.experts
    for suffix, tensors in stored.items():
        for (shard, name), tensor in zip((("w1", "w13"), ("w3", "w13"), ("w2", "w2")), tensors, strict=True):
            for e in range(E):
                load(getattr(layer, f"{name}_{suffix}"), tensor[e], f"{name}_{suffix}", shard, e, ranks=None)
    method = layer.quant_method
    if not fp8:
        method.forward = method.forward_cuda  # on CPUs SGLang would compute in torch
    method.process_weights_after_loading(layer)
    for name, parameter in sorted(block.named_parameters()):
        if not name.startswith("experts."):
            parameter.data.copy_(random(*parameter.shape))
    return block, matrices


def fp8_config():
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    return Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])


def in_bf16(block):
    """Except the experts, which have their own types."""
    for name, part in block.named_children():
        if name != "experts":
            part.bfloat16()
    return block


def qwen3(quantised=None):
    from sglang.srt.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    config = SimpleNamespace(**CONFIG, norm_topk_prob=True)
    return filled(in_bf16(Qwen3MoeSparseMoeBlock(0, config, quantised, prefix="mlp")), quantised is not None)


def qwen3_fp8():
    return qwen3(fp8_config())


def qwen2():
    """With a shared expert, which each rank computes for its own tokens."""
    from sglang.srt.models import qwen2_moe
    from sglang.srt.models.qwen2_moe import Qwen2MoeSparseMoeBlock

    def gated(x, weight, shared, out):
        """SGLang has Triton's for GPUs."""
        out += torch.sigmoid(x @ weight[:, None]) * shared

    qwen2_moe.fused_gate_sigmoid_mul_add = gated
    more = dict(norm_topk_prob=True, shared_expert_intermediate_size=64, hidden_act="silu")
    return filled(in_bf16(Qwen2MoeSparseMoeBlock(0, SimpleNamespace(**CONFIG | more), prefix="mlp")))


FACTOR = 2.5
# Blocks that multiply routed outputs by a factor themselves.
SCALED = CONFIG | dict(
    n_routed_experts=E, n_shared_experts=1, routed_scaling_factor=FACTOR, hidden_act="silu", norm_topk_prob=True,
    n_group=1, topk_group=1,
)  # fmt: skip


@contextlib.contextmanager
def serving(architecture):
    """A server of a model of this class, as far as the plugin asks."""
    from switchyard import _sglang_runner

    named = _sglang_runner.architecture
    _sglang_runner.architecture = lambda: architecture
    try:
        yield
    finally:
        _sglang_runner.architecture = named


def without_balancing(module):
    """A module of SGLang whose blocks ask where experts are: None in a server without EPLB, and here nobody to ask."""
    module.ExpertLocationDispatchInfo = SimpleNamespace(init_new=lambda layer_id: None)
    return module


def deepseek(quantised=None):
    """With a shared expert, always in bf16."""
    from sglang.srt.models import deepseek_v2

    config = SimpleNamespace(
        **SCALED, topk_method="noaux_tc", scoring_func="sigmoid", quantization_config=None
    )  # fmt: skip
    make = without_balancing(deepseek_v2).DeepseekV2MoE
    with serving("DeepseekV3ForCausalLM"):
        block = make(config, 0, quantised, prefix="mlp")
        if quantised:  # SGLang has no FP8 of dense layers for every processor
            block.shared_experts = make(config, 1, prefix="mlp").shared_experts
    return filled(in_bf16(block), quantised is not None)


def deepseek_fp8():
    return deepseek(fp8_config())


def glm4():
    """With a shared expert, and a gate in fp32."""
    from sglang.srt.models import glm4_moe

    with serving("Glm4MoeForCausalLM"):
        block = without_balancing(glm4_moe).Glm4MoeSparseMoeBlock(SimpleNamespace(**SCALED), 0, prefix="mlp")
    block.shared_experts.bfloat16()
    return filled(block)


def expected_of(block, matrices, x):
    """In fp64, how far off it an output may be, and which tokens' experts no rounding of the router decides."""
    logits = torch.nn.functional.linear(x.to(block.gate.weight.dtype), block.gate.weight)
    xs, factor, gated = x.double(), 1.0, 1.0
    shared = getattr(block, "shared_expert", getattr(block, "shared_experts", None))
    if hasattr(block, "routed_scaling_factor"):
        scores = logits.float().sigmoid()
        chosen = scores + block.gate.e_score_correction_bias.float()
        ids = chosen.topk(K).indices
        weights, factor = scores.gather(1, ids), FACTOR
    else:
        chosen = logits.float().softmax(-1)
        weights, ids = chosen.topk(K)
        if shared is not None:
            gated = torch.sigmoid(xs @ block.shared_expert_gate.weight.double().T)
    weights = weights / weights.sum(-1, keepdim=True)
    out, bound = factor * experts(x, *matrices, ids, weights, switchyard.Activation()), BF16_ERROR
    if matrices[0].dtype != torch.bfloat16 and len(x):
        # Twice what the rounding of activations to e4m3, simulated, costs.
        bound = 2 * error(factor * fp8_experts(x, *matrices, ids, weights), out)
    if shared is not None:
        gate, up = (xs @ shared.gate_up_proj.weight.double().T).chunk(2, 1)
        out += gated * (torch.nn.functional.silu(gate) * up @ shared.down_proj.weight.double().T)
    best = chosen.topk(K + 1).values
    return out, bound, best[:, K - 1] - best[:, K] > 0.02 * best[:, K].abs()


def tokens_stay():
    """Whether SGLang leaves tokens where attention has them."""
    from sglang.srt.layers.moe import utils

    if hasattr(utils, "is_moe_input_scattered_across_dp_ranks"):
        return utils.is_moe_input_scattered_across_dp_ranks()
    from sglang.srt.layers.communicator import LayerScatterModes, ScatterMode  # SGLang 0.5.16

    sparse = dict.fromkeys(("is_layer_sparse", "is_previous_layer_sparse", "is_next_layer_sparse"), True)
    return LayerScatterModes.init_new(layer_id=0, num_layers=2, **sparse).mlp_mode == ScatterMode.SCATTERED


def agreed(counts, rank, ranks):
    """Let SGLang's ranks know how many tokens each has, and return what a layer makes of it."""
    from sglang.srt.layers.dp_attention import set_dp_buffer_len
    from switchyard import _sglang_ranks

    set_dp_buffer_len(sum(counts or []), counts[rank] if counts else 0, False, counts)
    return _sglang_ranks.most_rows(torch.empty(counts[rank] if counts else 0, H, dtype=torch.bfloat16), ranks)


@torch.no_grad()
def passes(rank, ranks):
    from switchyard import _sglang_ranks

    say(stays=tokens_stay())
    batch = SimpleNamespace(num_token_non_padded=None, attn_cp_metadata=None)
    for make in (qwen3_fp8, deepseek_fp8, qwen3, qwen2, glm4, deepseek):
        block, matrices = make()
        binding = block.experts.quant_method.runner.binding
        say(shard=list(block.experts.w13_weight.shape), most=binding.max_tokens)
        for step in range(8):
            counts = [0 if step % 3 == r else 1 + (7 * step + 5 * r) % 40 for r in range(ranks)]
            if step > 5:
                counts = [(step + 3 * r) % 5 for r in range(ranks)]
                say(promise=agreed(counts, rank, binding.ranks))
            tokens = counts[rank]
            x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
            out = block(x, batch)
            assert out.shape == x.shape
            if tokens:
                wanted, bound, sure = expected_of(block, matrices, x)
                if sure.any():
                    say(tokens=tokens, sure=int(sure.sum()), error=error(out[sure], wanted[sure]) / bound)
            agreed(None, rank, binding.ranks)
    # A layer that returns zeros is told from a right one.
    experts_of = binding.experts
    binding.bind = lambda *given, **named: lambda x, *more, **rest: torch.zeros_like(x)
    x = torch.randn(5, H).bfloat16()
    say(error_of_zeros=error(block(x, batch), expected_of(block, matrices, x)[0]))
    del binding.bind
    assert binding.experts is experts_of
    say(epoch=experts_of.stats().epoch)
    try:
        block.experts.quant_method.runner.binding.bind(
            block.experts.w13_weight, block.experts.w2_weight, tokens=binding.max_tokens + 1
        )
    except switchyard.CapacityExceeded as refusal:
        say(too_many=str(refusal))
    assert _sglang_ranks.is_fused()


def refusals(rank, ranks):
    """Of layers, on each rank alike."""
    from sglang.srt import runtime_context
    from switchyard import _sglang_ranks, _sglang_runner

    def refused(make):
        try:
            make()
        except switchyard.Unsupported as refusal:
            say(refusal=str(refusal))

    refused(lambda: _sglang_ranks.stand_in(_sglang_runner.options_of(), 1, ranks))
    setting = _sglang_runner.setting
    for name, value in (("enable_eplb", True), ("speculative_algorithm", "EAGLE"), ("ep_num_redundant_experts", 2)):
        _sglang_runner.setting = lambda asked, default=None: value if asked == name else setting(asked, default)
        refused(qwen3)
    _sglang_runner.setting = setting
    with serving("MixtralForCausalLM"):
        refused(qwen3)
    say(architecture=_sglang_runner.architecture())
    flags = runtime_context.get_flags().moe
    flags.tbo_enabled = True
    refused(qwen3)
    flags.tbo_enabled = False
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    refused(
        lambda: FusedMoE(
            num_experts=E, hidden_size=H, intermediate_size=I, layer_id=0, top_k=K,
            params_dtype=torch.bfloat16, reduce_results=True,
        )
    )  # fmt: skip


@torch.no_grad()
def who_failed(rank, ranks, how, where):
    """The last rank ends, or stops, before its third pass, or before what schedulers wait in for their third step."""
    from sglang.srt import runtime_context
    from sglang.srt.managers.scheduler_components import request_receiver
    from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo

    block, _ = qwen3()
    x = torch.randn(9, H).bfloat16()
    counts = [name for name, field in MLPSyncBatchInfo.__dataclass_fields__.items() if field.default is dataclasses.MISSING]
    sizes = {"dp_size": ranks, "num_dp_ranks": ranks, "tp_size": 1, "cp_size": 1}

    group = runtime_context.get_parallel().tp_group

    def agree():
        info = MLPSyncBatchInfo(**{name: sizes.get(name, rank) for name in counts})
        info.all_gather("cpu", group.cpu_group)
        assert info.global_num_tokens == list(range(ranks))

    def hand_on():
        given = [["a request"] if rank == 0 else [], group.rank, group.cpu_group]
        assert request_receiver.broadcast_pyobj(*given, src=group.ranks[0]) == ["a request"]

    def compute():
        block(x)
        _serving.check_passes()

    try:
        for step in range(5):
            if step == 2 and rank == ranks - 1:
                os.kill(os.getpid(), getattr(signal, how))
            {"pass": compute, "agreement": agree, "requests": hand_on}[where]()
    except switchyard.Error as failure:
        say(failure=str(failure), kind=type(failure).__name__)
    os._exit(0)  # groups end with all ranks


def main():
    directory, what = sys.argv[1:]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    # SGLang compiles DeepSeek's choice of experts at its first tokens, which the other rank waits for.
    deadline = DEADLINE if what.startswith("SIG") else 300
    options = {"expert_parallel": "fused", "num_threads": 1, "deadline": deadline}
    os.environ["SWITCHYARD_SGLANG_OPTIONS"] = json.dumps(options)
    serve(rank, ranks, directory, disable_shared_experts_fusion=True)
    if what.startswith("SIG"):
        who_failed(rank, ranks, *what.split("-"))
    {"passes": passes, "refusals": refusals}[what](rank, ranks)
    torch.distributed.barrier()
    os._exit(0)


main()
