"""Experts in plain torch, fp64 unless told otherwise."""

import torch


def activate(activation, gate, up):
    f = {
        "silu": lambda v: v * torch.sigmoid(activation.alpha * v),
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        "relu": torch.relu,
        "relu2": lambda v: torch.relu(v) ** 2,
        "identity": lambda v: v,
    }[activation.kind]
    if not activation.gated:
        return f(up)
    limit = activation.limit
    return f(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + activation.up_bias)


def experts(x, gate, up, down, ids, weights, activation, biases=(None, None, None), dtype=torch.float64):
    """gate, up: [E, I, H]; down: [E, H, I]; ids out of range are skipped."""
    x, weights = x.to(dtype), weights.to(dtype)
    gate, up, down = (None if w is None else w.to(dtype) for w in (gate, up, down))
    biases = [None if b is None else b.to(dtype) for b in biases]
    out = torch.zeros_like(x)

    def linear(v, weight, bias, e):
        return v @ weight[e].T + (0 if bias is None else bias[e])

    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if not 0 <= e < up.shape[0]:
                continue
            g = None if gate is None else linear(x[t], gate, biases[0], e)
            h = activate(activation, g, linear(x[t], up, biases[1], e))
            out[t] += weights[t, k] * linear(h, down, biases[2], e)
    return out


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


def routing(tokens, num_experts, top_k):
    """Distinct ids, int64, and weights."""
    ids = torch.rand(tokens, num_experts).argsort(1)[:, :top_k].contiguous()
    return ids, torch.rand(tokens, top_k)


def load(module):
    """Random parameters for a server's layer: biases count as much as the rest."""
    for name, parameter in module.named_parameters():
        parameter.data.normal_(std=1.0 if "bias" in name else 0.1)


def fill_with_fp8(module):
    """Random FP8 weights with a scale per 128 x 128 for a server's layer, and [w13, w2] as they stand for."""
    exact = []
    for name in ("w13", "w2"):
        weight, scale = getattr(module, f"{name}_weight"), getattr(module, f"{name}_weight_scale_inv")
        weight.data.copy_((torch.randn(weight.shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn))
        scale.data.copy_(torch.rand(scale.shape) / 500 + 1e-3)
        wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
        exact.append(weight.data.float() * wide[:, : weight.shape[1], : weight.shape[2]])
    return exact
