"""vLLM's MoERunner on several ranks over gloo, with its own loader of weights: for test_vllm.py.

    vllm_ranks.py RANKS tensor|expert
"""

import os
import pathlib
import sys
import tempfile

import torch
import torch.multiprocessing

import switchyard
import switchyard.vllm
from reference import error, experts

E, H, I, T = 8, 256, 128, 9


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


def chosen(hidden_states, gating_output, topk, renormalize):
    weights, ids = gating_output.softmax(-1).topk(topk)
    return weights / weights.sum(-1, keepdim=True), ids.int()


def rank_body(rank, ranks, rendezvous, expert_parallel):
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
            prefix="experts",
            custom_routing_function=chosen,  # vLLM's own is a CUDA kernel in some releases
        )
    layer = runner.routed_experts
    assert layer.quant_method.experts_cls.__module__ == "switchyard._vllm"
    own = E // ranks if expert_parallel else E
    assert layer.w13_weight.shape == (own, 2 * I // (1 if expert_parallel else ranks), H)

    torch.manual_seed(0)
    gate, up = torch.randn(2, E, I, H).bfloat16() / 8
    down = torch.randn(E, H, I).bfloat16() / 8
    for e in range(E):
        for shard, name, weight in (("w1", "w13", gate), ("w3", "w13", up), ("w2", "w2", down)):
            parameter = getattr(layer, f"{name}_weight")
            layer.weight_loader(parameter, weight[e], f"{name}_weight", shard_id=shard, expert_id=e)
    layer.quant_method.process_weights_after_loading(layer)

    x, logits = torch.randn(T, H).bfloat16(), torch.randn(T, E)
    weights, ids = logits.softmax(-1).topk(2)
    weights /= weights.sum(-1, keepdim=True)
    expected = experts(x, gate, up, down, ids, weights, switchyard.Activation())
    with torch.inference_mode(), set_forward_context(None, config):
        out = runner(x, logits)  # routes, computes and adds up over ranks
    assert error(out, expected) < 1e-2, error(out, expected)


def main():
    ranks, split = int(sys.argv[1]), sys.argv[2]
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"file://{pathlib.Path(directory) / 'rendezvous'}"
        torch.multiprocessing.spawn(rank_body, (ranks, rendezvous, split == "expert"), nprocs=ranks)
    print("agrees")


if __name__ == "__main__":
    main()
