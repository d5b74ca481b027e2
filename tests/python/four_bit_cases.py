"""Layers of a server with weights of four bits, and what must be seen of them: for
test_vllm_four_bit.py and test_sglang_four_bit.py."""

import dataclasses
import math

import torch

from reference import Packed, error, experts, four_bit_values, routing
from switchyard import Activation

E, H, I, K, T = 8, 256, 128, 2, 17
GPT_OSS = Activation("silu", alpha=1.702, limit=7.0, up_bias=1.0)
# The least relative change of the result by a mistake. Rounding to bf16 changes it by 0.006 or less.
SEEN = 0.05


@dataclasses.dataclass
class Case:
    """A server's layer with weights in it, and what they are.

    Biases are those of gate, up and down.
    """

    layer: object
    w13: Packed
    w2: Packed
    biases: tuple
    activation: Activation
    interleaved: bool = False

    def matrices(self, w13=None, w2=None):
        w13, w2 = self.w13.exact if w13 is None else w13, self.w2.exact if w2 is None else w2
        halves = (w13[:, 0::2], w13[:, 1::2]) if self.interleaved else w13.chunk(2, dim=1)
        return *halves, w2


def batch():
    # Large enough that every second gate is beyond the limits.
    return 5 * torch.randn(T, H).bfloat16(), *routing(T, E, K)


def expected_of(case, x, ids, weights, dtype=torch.float64):
    return experts(x, *case.matrices(), ids, weights, case.activation, case.biases, dtype=dtype)


def require_as_exact_as_torch(case, out, x, ids, weights):
    """Below twice the error of the same in torch's bf16, beside fp64."""
    expected = expected_of(case, x, ids, weights)
    bound = 2 * error(expected_of(case, x, ids, weights, dtype=torch.bfloat16), expected)
    assert error(out, expected) < bound < SEEN / 4


def swapped_nibbles(packed):
    return four_bit_values(packed.form, packed.bytes << 4 | packed.bytes >> 4, packed.scale)


def shifted_scales(packed):
    return four_bit_values(packed.form, packed.bytes, packed.scale.roll(1, dims=2))


MISTAKES = {
    "gate and up swapped": lambda case: (
        (case.matrices()[1], case.matrices()[0], case.w2.exact), {}
    ),
    "rows in another order": lambda case: (
        dataclasses.replace(case, interleaved=not case.interleaved).matrices(), {}
    ),
    "nibbles of w13 swapped": lambda case: (case.matrices(w13=swapped_nibbles(case.w13)), {}),
    "nibbles of w2 swapped": lambda case: (case.matrices(w2=swapped_nibbles(case.w2)), {}),
    "scales of w13 one group on": lambda case: (case.matrices(w13=shifted_scales(case.w13)), {}),
    "scales of w2 one group on": lambda case: (case.matrices(w2=shifted_scales(case.w2)), {}),
    "no limit": lambda case: (
        case.matrices(), {"activation": dataclasses.replace(case.activation, limit=math.inf)}
    ),
    "another alpha": lambda case: (
        case.matrices(), {"activation": dataclasses.replace(case.activation, alpha=1.0)}
    ),
    "nothing added to up": lambda case: (
        case.matrices(), {"activation": dataclasses.replace(case.activation, up_bias=0.0)}
    ),
    "no bias of gate": lambda case: (case.matrices(), {"biases": (None, *case.biases[1:])}),
    "no bias of up": lambda case: (
        case.matrices(), {"biases": (case.biases[0], None, case.biases[2])}
    ),
    "no bias of down": lambda case: (case.matrices(), {"biases": (*case.biases[:2], None)}),
}  # fmt: skip
# Only gpt-oss has alpha, an addend of up and biases, so only there can they be mistaken.
ONLY_GPT_OSS = {
    "another alpha", "nothing added to up", "no bias of gate", "no bias of up", "no bias of down",
}


def require_mistakes_seen(case, out, x, ids, weights):
    """Each mistake that the case allows gives another result than `out`."""
    gpt_oss, limited = case.biases[0] is not None, case.activation.limit < math.inf
    for mistake, of in MISTAKES.items():
        if (mistake in ONLY_GPT_OSS and not gpt_oss) or (mistake == "no limit" and not limited):
            continue
        if "scales of w2" in mistake and case.w2.scale.shape[2] == 1:
            continue  # a row has one group, and none to be taken for it
        matrices, changed = of(case)
        given = {"activation": case.activation, "biases": case.biases} | changed
        wrong = experts(x, *matrices, ids, weights, given["activation"], given["biases"])
        assert error(out, wrong) > SEEN, mistake
