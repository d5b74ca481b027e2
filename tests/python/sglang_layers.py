"""SGLang's FusedMoE, as a server on CPUs makes it: for test_sglang.py and test_sglang_four_bit.py, which start this
in a process of its own, because SGLang's settings are made once a process. sglang_ranks.py starts SGLang as here.

    sglang_layers.py bf16|gpt-oss|gpt-oss-tp|deepseek-v4|int4|int4-128|refusals
"""

import dataclasses
import json
import math
import pathlib
import sys
import tempfile

import torch

import switchyard
import switchyard.sglang
from four_bit_cases import GPT_OSS, SEEN, Case, E, H, I, K, T, batch, expected_of
from four_bit_cases import require_as_exact_as_torch, require_mistakes_seen
from reference import Packed, as_words, error, experts, routing

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": H,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "vocab_size": 128, "num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": I,
    "intermediate_size": 256, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip
RANKS = dict.fromkeys(
    ("moe_ep_rank", "moe_tp_rank", "moe_dp_rank", "tp_rank", "attn_tp_rank", "attn_dp_rank"), 0
)


def serve(rank=0, ranks=1, directory=None, **more):
    """The plugin, and SGLang's settings and groups, as a process of its scheduler has them. With several ranks each
    has a batch of its own, and a share of the experts. directory: the same for all ranks."""
    from sglang.srt.plugins import hook_registry

    switchyard.sglang.register()
    hook_registry.HookRegistry.apply_hooks()
    from sglang.srt import runtime_context
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.server_args import ServerArgs

    newer = hasattr(runtime_context, "publish")  # than SGLang 0.5.16
    model = pathlib.Path(directory or tempfile.mkdtemp())
    (model / f"{rank}").mkdir()
    (model / f"{rank}/config.json").write_text(json.dumps(CONFIG))
    if ranks > 1:
        own = {"attn_dp_size": ranks} if newer else {"dp_size": ranks, "enable_dp_attention": True}
        more = {"tp_size": ranks, "ep_size": ranks} | own | more
    arguments = ServerArgs(
        model_path=str(model / f"{rank}"), device="cpu", moe_runner_backend="switchyard",
        skip_tokenizer_init=True,
        chunked_prefill_size=512, **more,
    )  # fmt: skip
    if newer:
        place = runtime_context.SpawnRanks(world_rank=rank) if ranks > 1 else None
        runtime_context.publish(arguments, role="scheduler", ranks=place)
        sizes = {}
    else:
        initialize_moe_config(arguments)  # first, as its scheduler does
        runtime_context.get_context().set_server_args(arguments)
        sizes = dict(
            tensor_model_parallel_size=ranks,
            expert_model_parallel_size=ranks,
            attention_data_parallel_size=ranks,
        )
    init_distributed_environment(
        world_size=ranks, rank=rank, distributed_init_method=f"file://{model}/rendezvous",
        local_rank=rank, backend="gloo",
    )
    initialize_model_parallel(**sizes)
    if ranks > 1:
        given = () if newer else (arguments.get_model_config(),)
        dp_attention.initialize_dp_attention(arguments, *given)
    if newer:
        initialize_moe_config()


def fused_moe(**given):
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": I, "layer_id": 0, "top_k": K}
    with runtime_context.get_parallel().override(**RANKS):
        return FusedMoE(**sizes | {"params_dtype": torch.bfloat16} | given)


def load(parameter, *given, ranks=RANKS, **named):
    """ranks: where SGLang was not told them."""
    from sglang.srt import runtime_context

    with runtime_context.get_parallel().override(**ranks or {}):
        parameter.weight_loader(parameter, *given, **named)


def in_bf16():
    """What SGLang is set up for is what the plugin reads, and its layer computes what it should."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from switchyard import _sglang_runner

    layer = fused_moe()
    method = layer.quant_method
    assert isinstance(method.runner, _sglang_runner.SwitchyardRunner)
    assert _sglang_runner.setting("chunked_prefill_size") == 512 and _sglang_runner.setting("device") == "cpu"
    assert _sglang_runner.setting("enable_eplb") is False and not _sglang_runner.setting("lora_paths")
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.1)
    method.process_weights_after_loading(layer)
    assert method.runner.binding.experts is not None and method.runner.binding.max_tokens == 512
    x, (ids, weights) = torch.randn(5, H).bfloat16(), routing(5, E, K)
    given = StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids.int(), None))
    out = method.forward_cuda(layer=layer, dispatch_output=given).hidden_states
    gate, up = layer.w13_weight.chunk(2, dim=1)
    assert error(out, experts(x, gate, up, layer.w2_weight, ids, weights, switchyard.Activation())) < 1e-2


def gpt_oss(columns=I, **more):
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

    layer = fused_moe(
        quant_config=Mxfp4Config(is_checkpoint_mxfp4_serialized=True), with_bias=True,
        intermediate_size=columns,
        gemm1_alpha=1.702, gemm1_clamp_limit=7.0, **more,
    )  # fmt: skip
    padded = -(-columns // 32) * 32  # what gpt-oss' loader gives a rank
    w13, w2 = Packed("mxfp4", 2 * padded, H, count=E), Packed("mxfp4", H, padded, count=E)
    b13, b2 = torch.randn(E, 2 * padded).bfloat16(), 3 * torch.randn(E, H).bfloat16()
    for name, tensor in {
        "w13_weight": w13.bytes, "w13_weight_scale": w13.scale, "w13_weight_bias": b13,
        "w2_weight": w2.bytes, "w2_weight_scale": w2.scale, "w2_weight_bias": b2,
    }.items():  # fmt: skip
        load(getattr(layer, name), tensor, weight_name=name, shard_id=None, expert_id=None)
    return Case(layer, w13, w2, (b13[:, 0::2], b13[:, 1::2], b2), GPT_OSS, interleaved=True)


def deepseek_v4(limit=10.0, **more):
    from sglang.srt.layers.quantization.fp8 import Fp8Config

    config = Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic",
        weight_block_size=[128, 128],
        is_fp4_experts=True,
    )  # fmt: skip
    layer = fused_moe(quant_config=config, swiglu_limit=limit, **more)
    w13, w2 = Packed("mxfp4", 2 * I, H, count=E), Packed("mxfp4", H, I, count=E)
    for suffix, first, second in (
        ("weight", w13.bytes.view(torch.int8), w2.bytes.view(torch.int8)),
        (
            "weight_scale_inv",
            w13.scale.view(torch.float8_e8m0fnu),
            w2.scale.view(torch.float8_e8m0fnu),
        ),
    ):
        gate, up = first.chunk(2, dim=1)
        for shard, name, tensor in (("w1", "w13", gate), ("w3", "w13", up), ("w2", "w2", second)):
            for e in range(E):
                name_of = f"{name}_{suffix}"
                load(getattr(layer, name_of), tensor[e], name_of, shard, e)
    return Case(layer, w13, w2, (None, None, None), switchyard.Activation(limit=limit))


def compressed(group=32, weights={}, **more):
    """compressed-tensors' pack-quantized INT4, as Kimi-K2-Thinking has it."""
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors

    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    groups = {"targets": ["Linear"], "weights": args | weights, "input_activations": None}
    config = compressed_tensors.CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [],
            "config_groups": {"group_0": groups},
        }
    )
    layer = fused_moe(quant_config=config, prefix="model.layers.0.mlp.experts", **more)
    w13, w2 = Packed("int4", 2 * I, H, group, count=E), Packed("int4", H, I, group, count=E)
    for suffix, first, second in (
        ("weight_packed", as_words(w13.bytes), as_words(w2.bytes)),
        ("weight_scale", w13.scale, w2.scale),
    ):
        gate, up = first.chunk(2, dim=1)
        for shard, name, tensor in (("w1", "w13", gate), ("w3", "w13", up), ("w2", "w2", second)):
            for e in range(E):
                name_of = f"{name}_{suffix}"
                load(getattr(layer, name_of), tensor[e], name_of, shard, e)
    return Case(layer, w13, w2, (None, None, None), switchyard.Activation())


def processed(case):
    case.layer.quant_method.process_weights_after_loading(case.layer)
    return case


def run(case, x, ids, weights):
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    given = StandardDispatchOutput(x, None, StandardTopKOutput(weights, ids.int(), None))
    out = case.layer.quant_method.apply(layer=case.layer, dispatch_output=given).hidden_states
    layer = case.layer.quant_method.runner.binding.experts
    poisoned = torch.full_like(out, math.nan)
    layer(x, ids.int(), weights, out=poisoned)
    assert torch.equal(out, poisoned)
    return out


def check(make):
    case = make()
    layer = case.layer
    before = {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in layer.named_parameters()}
    processed(case)
    after = {name: (tensor.data_ptr(), tensor.dtype) for name, tensor in layer.named_parameters()}
    assert before == after, (before, after)
    if case.w13.form == "int4":
        weight = layer.w13_weight_packed.data.transpose(1, 2)
        scale = layer.w2_weight_scale.data.transpose(1, 2)
    else:
        fp8 = hasattr(layer, "w2_weight_scale_inv")
        weight = layer.w13_weight.data
        scale = (layer.w2_weight_scale_inv if fp8 else layer.w2_weight_scale).data
    assert torch.equal(weight.view(torch.uint8), case.w13.bytes)
    stored = case.w2.scale.flatten().view(torch.uint8)
    assert torch.equal(scale.flatten().view(torch.uint8), stored)
    assert weight.data_ptr() == layer.quant_method.runner.binding._addresses[0]
    given = batch()
    require_as_exact_as_torch(case, run(case, *given), *given)
    if case.biases[0] is not None:
        given = (given[0] / 5, *given[1:])  # so that biases matter, too; limits still do
    first = run(case, *given)
    require_mistakes_seen(case, first, *given)

    other = make()
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(getattr(other.layer, name).data)
    from switchyard._serving import refresh_all

    refresh_all()  # what the hook on SGLang's WeightUpdater does
    case.w13, case.w2, case.biases = other.w13, other.w2, other.biases
    expected = expected_of(case, *given)
    assert error(run(case, *given), expected) < 1e-2 < SEEN < error(first, expected)


def refused(kind, text, make):
    try:
        make()
    except kind as failure:
        assert text in str(failure), str(failure)
        return
    raise AssertionError(f"was not refused: {text}")


def refusals():
    from switchyard import InvalidArgument, Unsupported, _sglang_runner

    # SGLang's own, which asks for whole blocks of FP8 also of experts in MXFP4.
    refused(
        ValueError,
        "80 is not divisible by weight quantization",
        lambda: deepseek_v4(intermediate_size=80),
    )
    case = deepseek_v4()
    case.layer.w2_weight_scale_inv.data.view(torch.uint8)[1, 3, 2] = 255
    refused(InvalidArgument, "experts[1].down's scale of row 3", lambda: processed(case))
    for weights, text in (
        ({"symmetric": False}, "symmetric is False"),
        ({"group_size": 64}, "group_size is 64"),
        ({"num_bits": 8}, "num_bits is 8"),
        ({"strategy": "channel", "group_size": None}, "strategy is 'channel'"),
    ):
        refused(Unsupported, f"compressed-tensors' {text}; ", lambda: compressed(weights=weights))
    refused(Unsupported, "INT4 and have biases", lambda: compressed(with_bias=True))
    options = _sglang_runner.options_of
    _sglang_runner.options_of = lambda: dataclasses.replace(options(), release_weights=True)
    refused(Unsupported, "release_weights is true, and the experts are of INT4", compressed)
    _sglang_runner.options_of = options
    setting = _sglang_runner.setting
    _sglang_runner.setting = lambda name, default=None: name == "enable_eplb" or setting(
        name, default
    )
    for make in (deepseek_v4, gpt_oss, compressed):
        refused(Unsupported, "--enable-eplb moves experts", make)


def main():
    torch.manual_seed(0)
    serve()
    makers = {
        "gpt-oss": gpt_oss,
        # As gpt-oss' columns on a rank of four, 2880 / 4, these are no whole groups.
        "gpt-oss-tp": lambda: gpt_oss(columns=80),
        "deepseek-v4": deepseek_v4,
        "int4": compressed,
        "int4-128": lambda: compressed(group=128),
    }
    if sys.argv[1] in ("bf16", "refusals"):
        {"bf16": in_bf16, "refusals": refusals}[sys.argv[1]]()
    else:
        check(makers[sys.argv[1]])
    print("agrees")


if __name__ == "__main__":
    main()
