"""A model of transformers whose experts Switchyard runs; a tiny one, with random weights."""

import torch

try:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
except ImportError:
    raise SystemExit(print("skipped: pip install transformers"))

import switchyard

switchyard.register_with_transformers()
config = Qwen3MoeConfig(
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=48,
    num_experts=8,
    num_experts_per_tok=2,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=128,
)
model = Qwen3MoeForCausalLM(config).eval()
prompt = torch.randint(0, 128, (1, 8))
with torch.inference_mode():
    expected = model(prompt).logits
    # from_pretrained(..., experts_implementation="switchyard") does the same.
    model.set_experts_implementation("switchyard")
    print(f"largest difference of logits {(model(prompt).logits - expected).abs().max().item():.1e}")
    print(model.generate(prompt, max_new_tokens=8, do_sample=False)[0, 8:].tolist())
