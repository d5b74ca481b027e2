"""A layer of vLLM whose experts Switchyard computes, as `vllm serve` with --additional-config makes it.

Runs without a GPU, on the platform for CPUs of vLLM 0.33. A server says instead:
    vllm serve MODEL --additional-config '{"switchyard": {"reserved_sms": 0}}'
"""

import importlib.util
import os
import tempfile

if importlib.util.find_spec("vllm") is None:
    raise SystemExit(print("skipped: pip install vllm"))
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import torch
import switchyard.vllm

switchyard.vllm.register()  # vLLM calls it by the entry point of an installed package

from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

config = VllmConfig(additional_config={"switchyard": {}}, device_config=DeviceConfig("cpu"))
with set_current_vllm_config(config), tempfile.TemporaryDirectory() as directory:
    init_distributed_environment(1, 0, f"file://{directory}/rendezvous", 0, "gloo")
    initialize_model_parallel()
    layer = FusedMoEFactory(
        num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, params_dtype=torch.bfloat16
    ).routed_experts
for parameter in layer.parameters():
    parameter.data.normal_(std=0.1)
layer.quant_method.process_weights_after_loading(layer)

x = torch.randn(4, 256, dtype=torch.bfloat16)
weights, ids = torch.rand(4, 8).topk(2)
with torch.inference_mode():
    y = layer.quant_method.apply(layer, x, weights, ids.int(), None, None)

expected = torch.zeros(4, 256)
for t in range(4):
    for weight, e in zip(weights[t], ids[t]):
        gate, up = (x[t].float() @ layer.w13_weight[e].float().T).chunk(2)
        expected[t] += weight * (torch.nn.functional.silu(gate) * up @ layer.w2_weight[e].float().T)
print(layer.quant_method.experts_cls.__name__, f"error {(y - expected).norm() / expected.norm():.1e}")
