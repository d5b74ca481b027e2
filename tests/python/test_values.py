"""Values of Activation, Routing, topk() and register_with_transformers(): wrong ones are refused by name."""

import math

import numpy
import pytest
import torch

import switchyard
from switchyard import Activation, DTypeMismatch, InvalidArgument, Routing, ShapeMismatch

NAN = math.nan
# Arguments and what the refusal must say: the argument as the caller named it, its value, and what to pass.
ACTIVATIONS = [
    (("swish",), {}, r"kind 'swish'.*one of silu, gelu"),
    ((None,), {}, r"kind None.*one of"),
    ((["silu"],), {}, r"kind \['silu'\].*one of"),
    ((), {"gated": 1}, r"gated is 1; pass True or False"),
    ((), {"alpha": "1.7"}, r"alpha is '1.7'; pass a number"),
    ((), {"alpha": None}, r"alpha is None; pass a number"),
    ((), {"alpha": True}, r"alpha is True; pass a number"),
    ((), {"alpha": NAN}, r"alpha is nan; pass a finite number above 0"),
    ((), {"alpha": 0}, r"alpha is 0.0; pass a finite number above 0"),
    ((), {"alpha": math.inf}, r"alpha is inf; pass a finite"),
    (("gelu",), {"alpha": 1.7}, r"alpha is 1.7, but only silu"),
    ((), {"limit": NAN}, r"limit is nan; pass a number above 0, or math.inf"),
    ((), {"limit": -7.0}, r"limit is -7.0; pass a number above 0"),
    ((), {"limit": None}, r"limit is None; pass a number"),
    ((), {"up_bias": NAN}, r"up_bias is nan; pass a finite"),
    ((), {"up_bias": -math.inf}, r"up_bias is -inf; pass a finite"),
    ((), {"gated": False, "limit": 7.0}, r"limit is 7.0, but without a gate"),
    ((), {"gated": False, "up_bias": 1.0}, r"up_bias is 1.0, but without a gate"),
]
ROUTINGS = [
    ({"method": "topk"}, r"method is 'topk'; use one of top_k, sparse_mixer"),
    ({"score": "relu"}, r"score is 'relu'; use one of softmax"),
    ({"score": ["softmax"]}, r"score is \['softmax'\]; use one of"),
    ({"group_score": 2}, r"group_score is 2; use one of max"),
    ({"renormalize": 1}, r"renormalize is 1; pass True or False"),
    ({"top_k_before_score": "yes"}, r"top_k_before_score is 'yes'; pass True or False"),
    ({"groups": 0}, r"groups is 0; pass an int of at least 1"),
    ({"groups": 2**31}, r"groups is 2147483648; pass an int of at most 2147483647"),
    ({"group_score": "max"}, r"group_score is 'max', but groups is 1, .*leave it out"),
    ({"groups": 2.0}, r"groups is 2.0; pass an int"),
    ({"groups": True}, r"groups is True; pass an int"),
    ({"groups": 1 << 40}, r"groups is 1099511627776; pass an int"),
    ({"groups": 2, "top_groups": 3}, r"top_groups is 3, but groups is 2"),
    ({"top_groups": -1}, r"top_groups is -1; pass an int"),
    ({"scale": 0}, r"scale is 0; pass a finite number above 0"),
    ({"scale": NAN}, r"scale is nan; pass a finite number above 0"),
    ({"scale": -2.5}, r"scale is -2.5; pass"),
    ({"scale": "2.5"}, r"scale is '2.5'; pass"),
    ({"renormalize": True, "renormalize_epsilon": -1e-20}, r"renormalize_epsilon is -1e-20; pass"),
    ({"renormalize": True, "renormalize_epsilon": NAN}, r"renormalize_epsilon is nan; pass"),
    ({"renormalize_epsilon": 1e-6}, r"renormalize_epsilon is 1e-06, but renormalize is False"),
    ({"method": "sparse_mixer", "jitter_eps": math.inf}, r"jitter_eps is inf; pass"),
    ({"jitter_eps": 0.1}, r"jitter_eps is 0.1, but method='top_k' has no use"),
    ({"method": "sparse_mixer", "score": "sigmoid"}, r"score is 'sigmoid', but method='sparse_mixer' has no use"),
    ({"method": "sparse_mixer", "top_k_before_score": True}, r"top_k_before_score is True, but method="),
    ({"method": "sparse_mixer", "groups": 2}, r"groups is 2, but method='sparse_mixer'"),
]
LOGITS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CHOICES = [
    (InvalidArgument, 0, {}, r"k is 0; of 8 experts pass an int of 1 to 8"),
    (InvalidArgument, 9, {}, r"k is 9; of 8 experts"),
    (InvalidArgument, 2.0, {}, r"k is 2.0; of 8"),
    (InvalidArgument, 2, {"scores": "sigmoid"}, r"scores is 'sigmoid', .*no such field; did you mean score\?"),
    (InvalidArgument, 2, {"groups": 3}, r"groups is 3, which does not divide the 8 experts"),
    (InvalidArgument, 2, {"groups": [2]}, r"groups is \[2\]; pass an int"),
    (InvalidArgument, 5, {"groups": 4, "top_groups": 2}, r"k is 5, but the best 2 groups of 2 experts"),
    (InvalidArgument, 1, {"groups": 8}, r"groups is 8, .*'sum_top_two'"),
    (InvalidArgument, 3, {"method": "sparse_mixer"}, r"k is 3, but method='sparse_mixer' chooses 2"),
    (
        InvalidArgument,
        2,
        {"method": "sparse_mixer", "correction_bias": torch.zeros(8)},
        r"correction_bias is given, but method='sparse_mixer'",
    ),
    (ShapeMismatch, 2, {"correction_bias": torch.zeros(7)}, r"correction_bias is \(7,\); pass \(8,\)"),
    (DTypeMismatch, 2, {"correction_bias": torch.zeros(8).half()}, r"correction_bias is f16; pass float32"),
    (ShapeMismatch, 2, {"ids_out": torch.zeros(4, 3, dtype=torch.int32)}, r"ids_out is \(4, 3\); pass \(4, 2\)"),
    (DTypeMismatch, 2, {"ids_out": torch.zeros(4, 2, dtype=torch.int64)}, r"ids_out is i64; pass int32"),
    (DTypeMismatch, 2, {"weights_out": torch.zeros(4, 2).bfloat16()}, r"weights_out is bf16; pass float32"),
]
OPTIONS = [
    ({"max_token": 5}, r"max_token is 5, .*no such option; did you mean max_tokens\?"),
    ({"w13": 5}, r"w13 is 5, but every module says that of itself"),
    ({"activation": "gelu"}, r"activation is 'gelu', but every module says that"),
    ({"max_tokens": 0}, r"max_tokens is 0; pass an int of at least 1"),
    ({"max_tokens": 2**31}, r"max_tokens is 2147483648; pass an int of at most 2147483647"),
    ({"max_tokens": 8.0}, r"max_tokens is 8.0; pass an int"),
    ({"max_tokens": "8"}, r"max_tokens is '8'; pass an int"),
    ({"num_threads": -1}, r"num_threads is -1; pass an int of at least 0"),
    ({"reserved_sms": True}, r"reserved_sms is True; pass an int"),
    ({"compute": "fp64"}, r"compute is 'fp64'; pass None, 'bf16', 'f32' or 'f8_e4m3'"),
    ({"compute": "int32"}, r"compute is 'int32'; pass None"),
    ({"bad_ids": "ignore"}, r"bad_ids is 'ignore'; pass 'raise' or 'skip'"),
    ({"deadline": -1.0}, r"deadline is -1.0; pass seconds"),
    ({"deadline": NAN}, r"deadline is nan; pass seconds"),
    ({"capacity_factor": "1"}, r"capacity_factor is '1'; pass a finite number"),
    ({"capacity_rule": "token"}, r"capacity_rule is 'token'; pass 'slots' or 'tokens'"),
    ({"trace": 1}, r"trace is 1; pass True or False"),
    ({"table": 3}, r"table is 3, but layers have no tables"),
    ({"world": 2}, r"world is a int; pass a World"),
    ({"name": ""}, r"name is ''; pass a str"),
    ({"name": "eager"}, r"name is 'eager'; pass a str other than"),
]


@pytest.mark.parametrize("values,named,message", ACTIVATIONS, ids=lambda value: str(value)[:40])
def test_activations(values, named, message):
    with pytest.raises(InvalidArgument, match=message):
        Activation(*values, **named)


@pytest.mark.parametrize("fields,message", ROUTINGS, ids=lambda value: str(value)[:40])
def test_routings(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        Routing(**fields)
    with pytest.raises(InvalidArgument, match=message):
        switchyard.topk(LOGITS, 2, **fields)


def test_numbers_of_numpy_are_numbers():
    assert Activation(alpha=numpy.float32(1.5), limit=numpy.int64(7)) == Activation(alpha=1.5, limit=7.0)
    routing = {"groups": numpy.int64(4), "top_groups": 2, "scale": numpy.float64(2.5), "renormalize": numpy.bool_(True)}
    ids, weights = switchyard.topk(LOGITS, 2, **routing)
    expected = switchyard.topk(LOGITS, 2, groups=4, top_groups=2, scale=2.5, renormalize=True)
    assert torch.equal(ids, expected[0]) and torch.equal(weights, expected[1])


@pytest.mark.parametrize("kind,k,named,message", CHOICES, ids=lambda value: str(value)[:40])
def test_choices(kind, k, named, message):
    with pytest.raises(kind, match=message):
        switchyard.topk(LOGITS, k, **named)


@pytest.mark.parametrize(
    "logits,kind,message",
    [
        (LOGITS.double(), DTypeMismatch, "logits are float64; pass float32"),
        (LOGITS.double().numpy(), DTypeMismatch, "logits are float64; pass float32"),
        (LOGITS.half(), DTypeMismatch, "logits are f16; pass float32"),
        (LOGITS[0], ShapeMismatch, r"logits are \(8,\); pass \[T, E\]"),
        ([[1.0]], InvalidArgument, "logits is a list"),
    ],
    ids=str,
)
def test_logits(logits, kind, message):
    with pytest.raises(kind, match=message):
        switchyard.topk(logits, 1)


@pytest.mark.parametrize("options,message", OPTIONS, ids=lambda value: str(value)[:40])
def test_options_of_all_layers(options, message):
    pytest.importorskip("transformers", minversion="5.0")
    from switchyard import _hf

    before = dict(_hf._settings.options)
    with pytest.raises(InvalidArgument, match=message):
        switchyard.register_with_transformers(**options)
    assert _hf._settings.options == before


def test_what_a_cache_takes_for_true_is_no_flag():
    logits = torch.zeros(2, 4)
    switchyard.topk(logits, 2, renormalize=True)
    with pytest.raises(switchyard.InvalidArgument, match="renormalize is 1;"):
        switchyard.topk(logits, 2, renormalize=1)
