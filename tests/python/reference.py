"""Experts in plain torch, fp64 unless told otherwise, and weights of four bits with their values."""

import math

import torch

# The sizes of transformers' models in tests.
SMALL_MODEL = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=96,
    max_position_embeddings=2048, num_experts_per_tok=2,
)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def activate(activation, gate, up):
    f = {
        "silu": lambda v: v * torch.sigmoid(activation.alpha * v),
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda v: torch.nn.functional.gelu(v, approximate="tanh"),
        "relu": torch.relu,
        "relu2": lambda v: torch.relu(v) ** 2,
        "identity": lambda v: v,
        "situ": lambda v: activation.alpha * torch.tanh(v / activation.alpha) * torch.sigmoid(v),
    }[activation.kind]
    if not activation.gated:
        return f(up)
    limit = activation.limit
    if activation.kind == "situ":
        return f(gate) * ((up if limit == math.inf else limit * torch.tanh(up / limit)) + activation.up_bias)
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


def fp8_values(shape):
    """Random FP8 weights [E, rows, columns] of scale 1 / sqrt(columns): codes, a scale per 128 x 128, and what they
    stand for."""
    codes = (torch.randn(shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = [shape[0], *(-(-size // 128) for size in shape[1:])]
    scale = (torch.rand(blocks) + 0.5) / 100 / shape[-1] ** 0.5
    wide = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return codes, scale, codes.float() * wide[:, : shape[1], : shape[2]]


def fp8_experts(x, gate, up, down, ids, weights):
    """SwiGLU experts, with the inputs of both products rounded to e4m3, 128 columns of a token at a time."""

    def rounded(v):
        groups = v.float().view(*v.shape[:-1], -1, 128)
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
        return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).view(v.shape)

    out = torch.zeros(x.shape)
    for t in range(x.shape[0]):
        for k in range(ids.shape[1]):
            e, v = ids[t, k], rounded(x[t])
            h = torch.nn.functional.silu(v @ gate[e].T) * (v @ up[e].T)
            out[t] += weights[t, k] * (rounded(h) @ down[e].T)
    return out


def four_bit_values(form, packed, scale, zero=None):
    """What bytes [..., cols / 2] with scales [..., cols / group] stand for, in fp64."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    group = codes.shape[-1] // scale.shape[-1]
    if form == "mxfp4":
        numbers, factors = FP4[codes.long()], 2.0 ** (scale.double() - 127)
    else:
        middle = 8.0 if zero is None else zero.double().repeat_interleave(group, -1)
        numbers, factors = codes.double() - middle, scale.double()
    return numbers * factors.repeat_interleave(group, -1)


class Packed:
    """Random weights [E, rows, cols]: bytes, scales, and the numbers that they stand for."""

    def __init__(self, form, rows, cols, group=32, scale_dtype=torch.bfloat16, zero=False, count=5):
        self.form = form
        self.bytes = torch.randint(0, 256, (count, rows, cols // 2), dtype=torch.uint8)
        shape = (count, rows, cols // group)
        self.zero = torch.randint(0, 16, shape, dtype=torch.uint8) if zero else None
        if form == "mxfp4":
            self.scale = torch.randint(113, 125, shape, dtype=torch.uint8)  # a row spans 12 octaves
        else:
            self.scale = ((torch.rand(shape) + 0.5) / 60).to(scale_dtype)
        self.exact = four_bit_values(form, self.bytes, self.scale, self.zero)


def as_words(packed):
    """compressed-tensors' pack_to_int32: number i of a word at bits 4 i."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int64)
    words = (codes.unflatten(-1, (-1, 8)) << 4 * torch.arange(8)).sum(-1)
    return words.to(torch.int32)
