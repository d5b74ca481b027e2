"""Switchyard as a runner of SGLang, below SGLang's own method for unquantised experts.

Runs without a GPU and without a server. A server says instead:
    python -m sglang.launch_server --model-path MODEL --moe-runner-backend switchyard
"""

import importlib.util

if importlib.util.find_spec("sglang") is None:
    raise SystemExit(print("skipped: pip install sglang"))

import torch
import switchyard.sglang

switchyard.sglang.register()  # SGLang calls it by the entry point of an installed package

from sglang.srt.layers.moe import utils
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_flags

HookRegistry.apply_hooks()
resolve = getattr(utils, "resolve_moe_runner_backend", utils.MoeRunnerBackend)  # SGLang 0.5.23, 0.5.16
get_flags().moe.runner_backend = resolve("switchyard")

layer = torch.nn.Module()
layer.moe_runner_config = MoeRunnerConfig(num_experts=8, num_local_experts=8, top_k=2, layer=layer)
method = UnquantizedFusedMoEMethod()
method.create_weights(layer, 8, 256, 128, torch.bfloat16)
method.create_moe_runner(layer, layer.moe_runner_config)
for parameter in layer.parameters():
    parameter.data.normal_(std=0.1)

x = torch.randn(4, 256, dtype=torch.bfloat16)
weights, ids = torch.rand(4, 8).topk(2)
topk = StandardTopKOutput(weights, ids.int(), None)
given = StandardDispatchOutput(hidden_states=x, hidden_states_scale=None, topk_output=topk)
y = method.forward_cuda(layer=layer, dispatch_output=given).hidden_states

expected = torch.zeros(4, 256)
for t in range(4):
    for weight, e in zip(weights[t], ids[t]):
        gate, up = (x[t].float() @ layer.w13_weight[e].float().T).chunk(2)
        expected[t] += weight * (torch.nn.functional.silu(gate) * up @ layer.w2_weight[e].float().T)
print(method.runner.runner_backend.value, f"error {(y - expected).norm() / expected.norm():.1e}")
