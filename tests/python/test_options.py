"""The four values that say more of an `Experts`, and the keyword arguments that they stand for now."""

import dataclasses
import inspect
import re
import warnings

import pytest
import torch

import switchyard
from switchyard import Diagnostics, Experts, InvalidArgument, Memory, Numerics, Placement, Workspace, World, _options

E, H, I, K, T = 4, 32, 32, 2, 5
W13, W2 = torch.randn(E, 2 * I, H) / 6, torch.randn(E, H, I) / 6
X, IDS, WEIGHTS = torch.randn(T, H), torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2], [0, 2]]), torch.rand(T, K)
KINDS = {"numerics": Numerics, "placement": Placement, "memory": Memory, "diagnostics": Diagnostics}
WORLD = World.single()
SIZES = dict(hidden=H, intermediate=I, experts=E, top_k=K, max_tokens=T, compute="f32")
# An old keyword argument and a value that it may have.
OLD = dict(
    compute="f32", weight_on_input=True, capacity_factor=1.5, capacity_rule="slots", bad_ids="skip",
    large_ids_are_none=True, pre_sum_per_host=False, world=WORLD, num_experts=E, reserved_sms=0, num_threads=1,
    workspace=Workspace(**SIZES), workspace_slot=0, deadline=3.0, trace=True, recorded_steps=2, name="layers.0",
)  # fmt: skip


def make(**options):
    return Experts(W13, W2, top_k=K, max_tokens=T, **options)


def test_there_are_few_arguments():
    """The tensors and what they mean, two sizes, and the four values; and old names, for one release."""
    names = list(inspect.signature(Experts).parameters)
    assert names[-5:] == [*KINDS, "renamed"] and len(names) == 22
    assert set(names).isdisjoint(set(_options.RENAMED) - {"placement"})


@pytest.mark.parametrize("kind", KINDS.values())
def test_values_are_values(kind):
    assert kind() == kind() and hash(kind()) == hash(kind())
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kind(), field.name, None)
        assert re.search(rf"^ *{field.name} : ", kind.__doc__, re.M)  # Python 3.13 takes the indentation away
    assert Placement(num_experts=4, experts=[0, 1]) == Placement(num_experts=4, experts=(0, 1))
    assert Numerics(bad_ids="skip") != Numerics()


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        (Numerics, dict(compute="f16"), "compute is 'f16'; pass None, 'bf16', 'f32' or 'f8_e4m3'"),
        (Numerics, dict(compute=[]), r"compute is \[\]; pass None"),
        (Numerics, dict(bad_ids=["skip"]), r"bad_ids is \['skip'\]; pass 'raise' or 'skip'"),
        (Numerics, dict(weight_on_input=1), "weight_on_input is 1; pass True or False"),
        (Numerics, dict(capacity_factor=-1), "capacity_factor is -1; pass a finite number of at least 0"),
        (Numerics, dict(capacity_rule="tokens"), "capacity_rule is 'tokens', but capacity_factor is 0"),
        (Placement, dict(world=1), "world is a int; pass a switchyard.World"),
        (Placement, dict(num_experts=0), "num_experts is 0; pass None or an int of at least 1"),
        (Placement, dict(experts=5), "experts is 5; use a sequence of whole numbers"),
        (Placement, dict(experts=[0, 1.5]), r"experts\[1\] is 1.5; use a whole number"),
        (Placement, dict(device="cuda:0"), "device is 'cuda:0'; pass None or the number of a GPU"),
        (Placement, dict(num_threads=True), "num_threads is True; pass an int of at least 0"),
        (Placement, dict(reserved_sms=-1), "reserved_sms is -1; pass an int of at least 0"),
        (Placement, dict(table="t.json"), "table is 't.json', but layers have no tables any more"),
        (Memory, dict(workspace=5), "workspace is a int; pass a switchyard.Workspace, or None"),
        (Memory, dict(slot=1), "slot is 1, but there is no workspace; pass both"),
        (Memory, dict(slot=-1), "slot is -1; pass an int of at least 0"),
        (Diagnostics, dict(deadline=float("inf")), "deadline is inf; pass seconds, a finite number"),
        (Diagnostics, dict(trace="yes"), "trace is 'yes'; pass True or False"),
        (Diagnostics, dict(recorded_steps=1.5), "recorded_steps is 1.5; pass an int of at least 0"),
        (Diagnostics, dict(name=b"x"), "name is b'x'; pass a str"),
        (Diagnostics, dict(name="\ud800"), r"name is '\\ud800'; pass a str without .*surrogate"),
        (Diagnostics, dict(recorded_steps=2**31), "recorded_steps is 2147483648; pass an int of at most 2147483647"),
        (Diagnostics, dict(deadline=1e300), r"deadline is 1e\+300; pass seconds, a finite number of at most 1e\+12"),
        (Placement, dict(num_experts=2**31), "num_experts is 2147483648; pass None or an int of at most 2147483647"),
        (Placement, dict(device=2**31), "device is .*the number of a GPU, an int of at most 2147483647"),
        (Placement, dict(num_threads=2**40), r"num_threads is .*an int of at most 2147483647 \(0: hardware"),
        (Memory, dict(slot=2**31), "slot is 2147483648; pass an int of at most 2147483647"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(kind, fields, message):
    with pytest.raises(InvalidArgument, match=message):
        kind(**fields)


def test_every_option_has_an_old_name_or_is_new():
    old = {(of, field) for of, field in _options.RENAMED.values()}
    assert old == {(of, field.name) for of, kind in KINDS.items() for field in dataclasses.fields(kind)}
    assert set(OLD) == set(_options.RENAMED) - {"placement", "device"}


@pytest.mark.parametrize("name", OLD)
def test_an_old_name_works_and_warns(name):
    value = OLD[name]
    of, field = _options.RENAMED[name]
    form = rf"{name}= of Experts goes with 0.3; pass {of}={KINDS[of].__name__}\({field}=...\)"
    with pytest.warns(DeprecationWarning, match=form) as caught:
        old = make(**{name: value})
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = make(**{of: KINDS[of](**{field: value})})
    assert torch.equal(old(X, IDS, WEIGHTS), new(X, IDS, WEIGHTS))
    with pytest.warns(DeprecationWarning, match=form):
        found = switchyard.experts(X, W13, W2, IDS, WEIGHTS, max_tokens=T, **{name: value})
    assert torch.equal(found, new(X, IDS, WEIGHTS))
    with pytest.raises(InvalidArgument, match=f"{name} is .*, but {of} is given, too; leave {name} out, and pass"):
        make(**{name: value, of: KINDS[of]()})


def test_several_old_names_are_one_value():
    with pytest.warns(DeprecationWarning) as caught:
        layer = make(trace=True, recorded_steps=3, num_threads=1, bad_ids="skip")
    assert len(caught) == 4
    layer(X, torch.full_like(IDS, 99), WEIGHTS)
    assert layer.trace() and len(layer.recording()["steps"]) == 1 and layer.stats().bad_slots == T * K


def test_a_placement_was_a_sequence():
    places = [1, 0, 3, 2, 1]
    new = Experts(W13[places], W2[places], top_k=K, placement=Placement(num_experts=E, experts=places))
    with pytest.warns(DeprecationWarning, match=r"placement=Placement\((experts|num_experts)=...\)"):
        old = Experts(W13[places], W2[places], top_k=K, num_experts=E, placement=torch.tensor(places))
    assert torch.equal(old(X, IDS, WEIGHTS), new(X, IDS, WEIGHTS))


def test_what_is_no_value_is_refused():
    for of in ("numerics", "memory", "diagnostics"):
        with pytest.raises(InvalidArgument, match=rf"{of} is \{{\}}; pass a switchyard.{KINDS[of].__name__}, or None"):
            make(**{of: {}})
    with pytest.raises(InvalidArgument, match="numerics is .*; pass a switchyard.Numerics"):
        make(numerics=Diagnostics())
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_thread'"):
        make(num_thread=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_thread'"):
        switchyard.experts(X, W13, W2, IDS, WEIGHTS, num_thread=1)


def test_what_is_gone_is_refused():
    with pytest.raises(InvalidArgument, match=r"share_memory_with is .*, but .* pass memory=Memory\(workspace=...\)"):
        make(share_memory_with=make())
    with pytest.raises(InvalidArgument, match="table is 't.json', but layers have no tables any more"):
        make(table="t.json")
    make(share_memory_with=None, table=None)


def test_the_function_caches_by_values():
    from switchyard import _cache

    given = (X, W13.clone(), W2.clone(), IDS, WEIGHTS)
    before = len(_cache._cache)
    for _ in range(2):
        switchyard.experts(*given, numerics=Numerics(bad_ids="skip"), placement=Placement(num_threads=1))
    assert len(_cache._cache) == before + 1
    switchyard.experts(*given, numerics=Numerics(), placement=Placement(num_threads=1))
    assert len(_cache._cache) == before + 2


def test_a_workspace_for_layers_has_room_for_them():
    """Plugins make it before the first layer."""
    from switchyard._experts import workspace_for

    for dtype, compute in ((torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f32")):
        weights = W13.to(dtype), W2.to(dtype)
        options = dict(top_k=K, max_tokens=T, numerics=Numerics(), placement=Placement(num_threads=1))
        workspace = workspace_for(*weights, **options)
        assert workspace.compute == compute
        layers = [Experts(*weights, memory=Memory(workspace), **options) for _ in range(2)]
        expected = Experts(*weights, **options)(X, IDS, WEIGHTS)
        assert all(torch.equal(layer(X, IDS, WEIGHTS), expected) for layer in layers)
        assert layers[1].stats().epoch == 2


def test_a_workspace_for_layers_knows_their_format(monkeypatch):
    """On GPUs MXFP4 times FP8 tokens wants more memory than FP8 does."""
    from switchyard import _experts

    made = []
    monkeypatch.setattr(_experts, "Workspace", lambda *_, **named: made.append(named))
    options = dict(top_k=K, max_tokens=T, placement=Placement(num_threads=1))
    _experts.workspace_for(W13, W2, numerics=Numerics(), **options)
    codes = (torch.zeros(E, 2 * I, H // 2, dtype=torch.uint8), torch.zeros(E, H, I // 2, dtype=torch.uint8))
    scales = (torch.full((E, 2 * I, H // 32), 127, dtype=torch.uint8), torch.full((E, H, I // 32), 127, dtype=torch.uint8))
    _experts.workspace_for(
        *codes, numerics=Numerics(compute="f8_e4m3"), w13_scale=scales[0], w2_scale=scales[1], weight_format="mxfp4",
        **options,
    )
    assert [(of["compute"], of["weight_format"]) for of in made] == [("f32", None), ("f8_e4m3", "mxfp4")]
    sizes = dict(hidden=H, intermediate=I, experts=E, top_k=K, max_tokens=T)
    assert Workspace(**sizes, compute="f8_e4m3", weight_format="mxfp4").compute == "f8_e4m3"
    with pytest.raises(InvalidArgument, match="weight_format is 'nf4'"):
        Workspace(**sizes, compute="bf16", weight_format="nf4")
