"""Experts over the caller's tensors, in bf16, with torch."""

import torch

import switchyard

E, I, H, K, T = 8, 64, 128, 2, 16
w13 = torch.randn(E, 2 * I, H, dtype=torch.bfloat16) / H**0.5
w2 = torch.randn(E, H, I, dtype=torch.bfloat16) / I**0.5
x = torch.randn(T, H, dtype=torch.bfloat16)
topk_weights, topk_ids = torch.randn(T, E).softmax(-1).topk(K)

experts = switchyard.Experts(w13, w2, top_k=K, max_tokens=4096)  # weights [E, 2 I, H], [E, H, I]: used in place
y = experts(x, topk_ids, topk_weights)  # on a GPU: one kernel on torch's current stream, no synchronisation

gate, up = torch.einsum("eih,th->tei", w13.float(), x.float()).chunk(2, dim=-1)
every = torch.einsum("ehi,tei->teh", w2.float(), torch.nn.functional.silu(gate) * up)
expected = (every * torch.zeros(T, E).scatter_(1, topk_ids, topk_weights)[..., None]).sum(1)
print(f"error {((y - expected).norm() / expected.norm()).item():.1e}, {experts.stats().tokens_per_expert}")
assert torch.allclose(y.float(), expected, atol=0.05, rtol=0.05)
