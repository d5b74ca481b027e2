"""What plugins of servers share: the server's packed weights, given up once a layer has copied them."""

import pytest
import torch

from conftest import ROOT, python
from switchyard import Activation, InvalidArgument, Unsupported, _serving
from switchyard._serving import Binding, Options, refresh_all

E, N, K, TOKENS = 2, 64, 96, 16


class CopyingExperts:
    """In the place of a layer on a GPU, which has copied what it was made of."""

    workspace_bytes = 0

    def __init__(self, w13, w2, **options):
        self.w13, self.w2 = w13.clone(), w2.clone()
        self.options = options

    def refresh(self):
        raise AssertionError("the weights are gone")

    rebind = refresh


def binding(monkeypatch, *, on_gpu=True, **options):
    monkeypatch.setattr(_serving, "_shares_memory", lambda tensor: on_gpu)
    monkeypatch.setattr(_serving, "workspace_for", lambda *arguments, **named: None)
    monkeypatch.setattr(_serving, "_workspaces", {})
    monkeypatch.setattr(_serving, "Experts", CopyingExperts)
    return Binding(
        Options(**options),
        activation=Activation(),
        order="gate_up",
        top_k=1,
        max_tokens=TOKENS,
        weight_format="mxfp4",
    )


def weights():
    of = lambda *shape: torch.randint(256, shape, dtype=torch.uint8)
    arrays = dict(w13=of(E, 2 * N, K // 2), w2=of(E, K, N // 2))
    small = dict(w13_scale=of(E, 2 * N, K // 32), w2_scale=of(E, K, N // 32))
    return arrays, small


def test_packed_weights_are_given_up(monkeypatch):
    bound, (arrays, small) = binding(monkeypatch, release_weights=True), weights()
    before = {name: array.clone() for name, array in arrays.items()}
    bound.weights_loaded(**arrays, **small)
    assert all(array.untyped_storage().nbytes() == 0 for array in arrays.values())
    # Scales stay: they are a sixteenth of the codes, and servers look at them.
    assert all(array.untyped_storage().nbytes() != 0 for array in small.values())
    layer = bound.bind(**arrays, **small, tokens=TOKENS)
    assert layer is bound.experts
    assert torch.equal(layer.w13, before["w13"]) and torch.equal(layer.w2, before["w2"])
    with pytest.raises(Unsupported, match=f"a call has 17 tokens, more than max_tokens {TOKENS}.*release_weights"):
        bound.bind(**arrays, **small, tokens=17)
    with pytest.raises(Unsupported, match="weights were loaded anew.*release_weights"):
        bound.weights_loaded(**weights()[0], **small)
    with pytest.raises(Unsupported, match="weights were updated.*release_weights"):
        refresh_all()


def test_packed_weights_are_kept(monkeypatch):
    """Without the option, and of formats that are read in place."""
    for options, form in ({}, "mxfp4"), ({"release_weights": True}, None):
        bound, (arrays, small) = binding(monkeypatch, **options), weights()
        bound.weight_format = form
        bound.weights_loaded(**arrays, **small)
        assert all(array.untyped_storage().nbytes() != 0 for array in arrays.values())


def test_a_processor_reads_weights_where_they_are(monkeypatch):
    bound, (arrays, small) = binding(monkeypatch, on_gpu=False, release_weights=True), weights()
    with pytest.raises(InvalidArgument, match="release_weights is true, but a processor reads"):
        bound.weights_loaded(**arrays, **small)
    assert all(array.untyped_storage().nbytes() != 0 for array in arrays.values())


@pytest.mark.parametrize("option, form, compute", [
    ({}, "mxfp4", "bf16"),
    ({"mxfp4_compute": "f8_e4m3"}, "mxfp4", "f8_e4m3"),
    ({"mxfp4_compute": "f8_e4m3"}, "int4", None),
    ({"mxfp4_compute": "f8_e4m3"}, None, None),
])
def test_what_experts_of_four_bits_compute_in(monkeypatch, option, form, compute):
    """The option is for MXFP4 alone: FP8 tokens do not go with INT4, and other weights say it themselves."""
    bound, (arrays, small) = binding(monkeypatch, **option), weights()
    bound.weight_format = form
    bound.weights_loaded(**arrays, **small)
    assert bound.experts.options["numerics"].compute == compute


def test_mxfp4_computes_as_asked():
    """A layer of the library, not a stand-in: tokens in FP8 give other numbers, and close ones."""
    (arrays, small), x = weights(), torch.randn(TOKENS, K).bfloat16()
    small = {name: torch.full_like(scale, 120) for name, scale in small.items()}
    ids = torch.arange(TOKENS, dtype=torch.int32).remainder(E)[:, None]
    outputs = []
    for compute in "bf16", "f8_e4m3":
        bound = Binding(Options(mxfp4_compute=compute), activation=Activation(), order="gate_up", top_k=1,
                        max_tokens=TOKENS, weight_format="mxfp4")
        layer = bound.bind(**arrays, **small, tokens=TOKENS)
        assert layer.compute == compute
        outputs.append(layer(x, ids, torch.ones(TOKENS, 1)).float())
    difference = (outputs[0] - outputs[1]).norm() / outputs[0].norm()
    assert 1e-3 < difference < 0.1


@pytest.mark.parametrize("given", ["fp8", "f32", None])
def test_another_arithmetic_of_mxfp4_is_refused(given):
    with pytest.raises(InvalidArgument, match="mxfp4_compute is .*use 'bf16' or 'f8_e4m3'"):
        Options.parse({"mxfp4_compute": given}, "options")


@pytest.mark.parametrize("given", [1, "true", None])
def test_an_option_that_cannot_be_is_refused(given):
    with pytest.raises(InvalidArgument, match="release_weights is .*use true or false"):
        Options.parse({"release_weights": given}, "options")


@pytest.mark.parametrize("given", [1, "engine", None])
def test_a_kind_of_expert_parallelism_that_is_none_is_refused(given):
    with pytest.raises(InvalidArgument, match="expert_parallel is .*use 'local' or 'fused'"):
        Options.parse({"expert_parallel": given}, "options")


@pytest.mark.parametrize("what", ["passes", "late", "lost", "lost_within", "mistaken", "stopped"])
def test_ranks_that_exchange_tokens_themselves(what):
    assert "agrees" in python(ROOT / "tests/python/serving_ranks.py", what).stdout
