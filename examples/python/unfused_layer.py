"""A whole layer in five calls, each of which can be replaced; and its result beside the fused one.

On a GPU, if torch and the library have one: there the calls go to the current stream, and wait for
nothing.
"""

import torch

import switchyard

E, I, H, K, T = 8, 64, 128, 2, 40
torch.manual_seed(0)
capable = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)  # H100, H200
if capable and switchyard.has_cuda():
    torch.set_default_device("cuda")
w13 = torch.randn(E, 2 * I, H, dtype=torch.bfloat16) / H**0.5
w2 = torch.randn(E, H, I, dtype=torch.bfloat16) / I**0.5
x, logits = torch.randn(T, H, dtype=torch.bfloat16), torch.randn(T, E)

ids, weights = switchyard.topk(logits, K, renormalize=True)
order = switchyard.permute(ids, E)  # packed: experts' rows one behind the other
h = switchyard.grouped_gemm(x, w13, order.ends, activation=switchyard.Activation("silu"), index=order.tokens)
y = switchyard.grouped_gemm(h, w2, order.ends)
out = switchyard.unpermute(y, order.positions, weights)

fused = switchyard.Experts(w13, w2, top_k=K)(x, ids, weights)
difference = ((out - fused).float().norm() / fused.float().norm()).item()
print(f"rows per expert {order.ends.diff(prepend=order.ends.new_zeros(1)).tolist()}")
print(f"difference from Experts: {difference:.1e}")
# The same bits, where the processor multiplies bf16; elsewhere the fused layer keeps h in fp32. On a
# GPU the fused layer may cut sums over I in parts.
assert difference < 1e-2
