"""vLLM's layer of experts, made as a model makes it: in this process, for test_vllm.py and
test_vllm_four_bit.py, and as its MoERunner on several ranks over gloo, with its own loader of
weights.

    vllm_ranks.py RANKS tensor|expert [mxfp4]
"""

import functools
import importlib.util
import os
import pathlib
import sys
import tempfile

import torch
import torch.multiprocessing

import switchyard
import switchyard.vllm
from reference import Packed, as_words, error, experts

E, H, I, T, K = 8, 256, 128, 9, 2


def on_cpus():
    """Before anything else of vLLM is imported: its wheel for GPUs takes a machine without one for a CPU server."""
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    from vllm import platforms

    if platforms.current_platform.is_unspecified():
        # So it is before 0.33.
        from vllm.platforms.cpu import CpuPlatform

        platforms._current_platform = platforms.current_platform = CpuPlatform()
    from vllm.v1.worker.workspace import init_workspace_manager

    init_workspace_manager(torch.device("cpu"))  # as a worker does


def factory():
    """What models of vLLM make a layer by."""
    from vllm.model_executor.layers.fused_moe import layer

    return getattr(layer, "FusedMoEFactory", None) or layer.FusedMoE  # the name of before 0.33


def arguments_of(prefix, **more):
    """The factory's arguments for the layer that the tests make."""
    sizes = {"num_experts": E, "top_k": K, "hidden_size": H, "intermediate_size": I}
    return sizes | {"params_dtype": torch.bfloat16, "prefix": prefix} | more


@functools.cache
def one_rank():
    """vLLM with the plugin, one process, on its platform for CPUs: a function that makes a layer.

    Once for all tests of a process: vLLM's groups cannot be made twice. Skips without vLLM.
    """
    import pytest

    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: see docs/frameworks/vllm.md for how these tests were run")
    on_cpus()
    switchyard.vllm.register()
    switchyard.vllm.register()  # vLLM may call it again
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        rendezvous = "file://" + tempfile.mktemp()
        init_distributed_environment(1, 0, rendezvous, 0, "gloo")
        initialize_model_parallel()

    def make(options={}, change=None, **arguments):
        """A layer as a model of vLLM makes it."""
        additional = {} if options is None else {"switchyard": options}
        config = VllmConfig(additional_config=additional, device_config=DeviceConfig("cpu"))
        if change:
            change(config)
        with set_current_vllm_config(config):
            return factory()(**arguments_of("model.layers.0.mlp.experts") | arguments).routed_experts

    return make


def chosen(hidden_states, gating_output, topk, renormalize):
    weights, ids = gating_output.softmax(-1).topk(topk)
    return weights / weights.sum(-1, keepdim=True), ids.int()


def deepseek_v4_config():
    from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config

    return DeepseekV4FP8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128]
    )


def compressed_config(group=32, weights={}):
    """compressed-tensors' pack-quantized INT4, as Kimi-K2-Thinking has it."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": args | weights, "input_activations": None}}
    return CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [],
            "config_groups": groups,
        }
    )


def load_experts(layer, matrices):
    """Each expert's gate, up and down, [E, rows, columns] by the suffix of the parameter."""
    for suffix, (gate, up, down) in matrices.items():
        for shard, name, tensor in (("w1", "w13", gate), ("w3", "w13", up), ("w2", "w2", down)):
            parameter = getattr(layer, f"{name}_{suffix}")
            for e in range(tensor.shape[0]):
                parameter.weight_loader(
                    parameter, tensor[e], f"{name}_{suffix}", shard_id=shard, expert_id=e
                )


def in_bf16():
    """Random weights, by the names that a checkpoint has, and the numbers."""
    gate, up = torch.randn(2, E, I, H).bfloat16() / 8
    matrices = gate, up, torch.randn(E, H, I).bfloat16() / 8
    return {"weight": matrices}, matrices


def in_mxfp4():
    packed = [Packed("mxfp4", rows, columns, count=E) for rows, columns in ((I, H), (I, H), (H, I))]
    # DeepSeek-V4's checkpoints have int8 and float8_e8m0fnu; vLLM's model hands on scales as bytes.
    stored = {
        "weight": [matrix.bytes.view(torch.int8) for matrix in packed],
        "weight_scale": [matrix.scale for matrix in packed],
    }
    return stored, [matrix.exact for matrix in packed]


def in_int4():
    packed = [Packed("int4", rows, columns, count=E) for rows, columns in ((I, H), (I, H), (H, I))]
    stored = {
        "weight_packed": [as_words(matrix.bytes) for matrix in packed],
        "weight_scale": [matrix.scale for matrix in packed],
    }
    return stored, [matrix.exact for matrix in packed]


def rank_body(rank, ranks, rendezvous, expert_parallel, mxfp4):
    on_cpus()
    switchyard.vllm.register()
    from vllm.config import DeviceConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.forward_context import set_forward_context

    config = VllmConfig(
        additional_config={"switchyard": {"num_threads": 1}},
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(
            tensor_parallel_size=ranks,
            enable_expert_parallel=expert_parallel,
            distributed_executor_backend="external_launcher",
        ),
    )
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, rendezvous, rank, "gloo")
        initialize_model_parallel(tensor_model_parallel_size=ranks)
        runner = factory()(
            num_experts=E,
            top_k=2,
            hidden_size=H,
            intermediate_size=I,
            params_dtype=torch.bfloat16,
            quant_config=deepseek_v4_config() if mxfp4 else None,
            prefix="experts",
            custom_routing_function=chosen,  # vLLM's own is a CUDA kernel in some releases
        )
    layer = runner.routed_experts
    assert layer.quant_method.experts_cls.__module__ == "switchyard._vllm"
    own = E // ranks if expert_parallel else E
    columns = H // 2 if mxfp4 else H
    assert layer.w13_weight.shape == (own, 2 * I // (1 if expert_parallel else ranks), columns)

    torch.manual_seed(0)
    stored, (gate, up, down) = in_mxfp4() if mxfp4 else in_bf16()
    load_experts(layer, stored)
    layer.quant_method.process_weights_after_loading(layer)

    x, logits = torch.randn(T, H).bfloat16(), torch.randn(T, E)
    weights, ids = logits.softmax(-1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    expected = experts(x, gate, up, down, ids, weights, switchyard.Activation())
    with torch.inference_mode(), set_forward_context(None, config):
        out = runner(x, logits)  # routes, computes and adds up over ranks
    assert error(out, expected) < 1e-2, error(out, expected)
    os._exit(0)  # as bench/rank_processes.py ends ranks, and why


def main():
    ranks, split, mxfp4 = int(sys.argv[1]), sys.argv[2], "mxfp4" in sys.argv
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{pathlib.Path(directory) / 'rendezvous'}"
        given = ranks, rendezvous, split == "expert", mxfp4
        torch.multiprocessing.spawn(rank_body, given, nprocs=ranks)
    print("agrees")


if __name__ == "__main__":
    main()
