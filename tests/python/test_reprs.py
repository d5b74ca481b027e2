"""What objects say that they are, in a debugger or a log: also closed ones, those of a parent process, and those
whose making failed."""

import dataclasses
import inspect
import os
import threading

import pytest

import switchyard
from switchyard import tuner

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

E, I, H, K = 4, 32, 64, 2


def single():
    return switchyard.World.single()


def experts():
    w13, w2 = torch.zeros(E, 2 * I, H, dtype=torch.bfloat16), torch.zeros(E, H, I, dtype=torch.bfloat16)
    return switchyard.Experts(w13, w2, top_k=K, max_tokens=1)


def workspace():
    return switchyard.Workspace(hidden=H, intermediate=I, experts=E, top_k=K, max_tokens=8, compute="bf16")


def exchange():
    return switchyard.Exchange(single(), hidden=H, num_experts=E, top_k=K, max_tokens=8, dispatch="f32")


def received():
    return exchange().dispatch(torch.zeros(3, H), torch.tensor([[0, 1]] * 3))


def heap():
    return switchyard.SymmetricHeap(single(), 4096)


def grouped_gemm():
    return switchyard.GroupedGemm(torch.zeros(E, 2 * I, H))


def permutation():
    return switchyard.permute(torch.tensor([[0, 1]] * 3), E)


def block_layer():
    from transformers.models.olmoe.modeling_olmoe import OlmoeConfig, OlmoeSparseMoeBlock

    config = OlmoeConfig(hidden_size=H, intermediate_size=I, num_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block = OlmoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return switchyard.MoeLayer.from_hf(block.eval())


def configuration():
    return tuner.Configuration("rows=64", 64, 128)


def kernel():
    return tuner.Kernel("mine", 3, [configuration()], "a machine", 132)


def selector(directory):
    """Over a fit of times that are made up."""
    mine = kernel()
    path = directory / "mine.profile.json"
    tuner.profile(
        mine,
        [tuner.Model("olmoe", E, K, 64, 64)],
        lambda model, configuration, counts: 1.0 + sum(counts),
        path,
        tokens=[8, 16, 32],
        betas=[0.5, 0.9, 1.0],
        test_tokens=[],
        test_betas=[],
    )
    tuner.fit(path, directory / "mine.fit.json")
    return tuner.Selector(mine, directory / "mine.fit.json")


# Class: how to make one, and what its repr() must tell.
MAKERS = {
    "Activation": (switchyard.Activation, ["silu"]),
    "Configuration": (configuration, ["rows=64", "128"]),
    "Diagnostics": (lambda: switchyard.Diagnostics(trace=True), ["trace=True"]),
    "Exchange": (exchange, ["H 64", "4 experts", "top-2", "8 tokens", "f32", "packed", "cpu", "rank 0 of 1", "open"]),
    "ExchangeHandle": (lambda: received().handle, ["3 tokens", "H 64", "open"]),
    "ExchangeStats": (lambda: exchange().stats(), ["dispatches=0"]),
    "Experts": (experts, ["H 64", "I 32", "4 experts", "top-2", "1 token;", "bf16", "cpu", "rank 0 of 1", "open"]),
    "GroupedGemm": (grouped_gemm, ["4 experts", "N 64", "K 64", "f32", "cpu", "open"]),
    "GroupedSchedule": (lambda: switchyard.GroupedSchedule(tile_rows=64), ["tile_rows=64"]),
    "HeapStats": (lambda: heap().stats(), ["bytes=4096"]),
    "Kernel": (kernel, ["mine", "version 3", "1 configuration", "a machine"]),
    "Memory": (lambda: switchyard.Memory(workspace()), ["<Workspace: H 64", "slot=0"]),
    "Model": (lambda: tuner.Model("olmoe", E, K, 64, 64), ["olmoe", "num_experts=4"]),
    "MoeLayer": (block_layer, ["H 64", "I 32", "4 experts", "top-2", "f32", "cpu", "rank 0 of 1", "open"]),
    "Numerics": (lambda: switchyard.Numerics(bad_ids="skip"), ["bad_ids='skip'"]),
    "Outcome": (
        lambda: tuner.Outcome("olmoe", 8, 1.0, 1.0, False, False, 1.0, 1.0, 1.0, None, None, "a", "b"),
        ["olmoe", "tokens=8"],
    ),
    "PeerMap": (lambda: heap().peer_map, ["rank=0", "size=1", "bytes=4096"]),
    "Permutation": (permutation, ["int32 [4]", "int32 [3, 2]", "packed"]),
    "Placement": (lambda: switchyard.Placement(single(), num_experts=E), ["<World: rank 0 of 1", "num_experts=4"]),
    "Progress": (lambda: tuner.Progress(1, 2, 3.0, 4.0, None), ["done=1"]),
    "Received": (received, ["float32", "[4]", "packed"]),
    "Routing": (switchyard.Routing, ["softmax"]),
    "Selector": (selector, ["mine", "version 3", "open"]),
    "Stats": (lambda: experts().stats(), ["epoch=0"]),
    "SymmetricHeap": (heap, ["4,096 bytes", "cpu", "torch", "rank 0 of 1", "open"]),
    "Workspace": (workspace, ["H 64", "I 32", "4 experts", "bf16", "MiB", "cpu", "1 slot", "rank 0 of 1", "open"]),
    "World": (single, ["rank 0 of 1", "threads", "open"]),
}
# A protocol has no objects of its own.
WITHOUT = {"DeviceAllocator"}


def public_classes():
    for module in (switchyard, tuner):
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                yield name, value


def make(name, directory):
    maker, _ = MAKERS[name]
    return maker(directory) if inspect.signature(maker).parameters.get("directory") else maker()


def owned_classes():
    return [name for name, kind in public_classes() if hasattr(kind, "close")]


def test_every_public_class_is_here():
    errors = {name for name, kind in public_classes() if issubclass(kind, BaseException)}
    assert {name for name, _ in public_classes()} - errors - WITHOUT == set(MAKERS)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_it_says_what_it_is(name, tmp_path):
    text = repr(make(name, tmp_path))
    assert name in text
    for part in MAKERS[name][1]:
        assert part in text, text
    assert " at 0x" not in text and len(text) < 900


@pytest.mark.parametrize("name", sorted(set(MAKERS) & set(owned_classes())))
def test_it_says_so_when_it_is_closed_or_of_another_process(name, tmp_path):
    made = make(name, tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        text = "failed"
        try:
            text = repr(made)
        finally:
            os.write(writer, text.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert f"of process {os.getpid()}" in text and MAKERS[name][1][0] in text, text
    made.close()
    text = repr(made)
    assert "closed" in text and "open" not in text, text
    assert MAKERS[name][1][0] in text


@pytest.mark.parametrize("name", sorted(set(MAKERS) & set(owned_classes())))
def test_it_waits_for_no_call_that_is_under_way(name, tmp_path):
    """A debugger that looks at an object must not hang for as long as a call hangs."""
    made = make(name, tmp_path)
    owned = getattr(made, "_layer", made)
    done = threading.Event()
    with owned._lock:
        threading.Thread(target=lambda: (repr(made), done.set()), daemon=True).start()
        assert done.wait(20)


@pytest.mark.parametrize("name", sorted(set(MAKERS) & set(owned_classes())))
def test_one_that_was_never_made_has_a_repr(name):
    """As in a traceback that shows the variables of an __init__ which raised."""
    kind = dict(public_classes())[name]
    made = kind.__new__(kind)
    if issubclass(kind, torch.nn.Module):
        torch.nn.Module.__init__(made)
    assert "not made" in repr(made)


def test_a_kernel_of_nonsense_has_a_repr():
    assert "7" in repr(tuner.Kernel("mine", 1, 7, "a machine", 1))


def test_a_workspace_that_was_released_says_so():
    made = workspace()
    made.release()
    assert "released" in repr(made)
    made.restore()
    assert "open" in repr(made)


def test_arrays_are_told_by_their_shape_alone():
    """Their memory may be gone with the object that they came from, and a GPU's would be waited for."""

    class Gone:
        dtype, shape = "float32", (3, 4)

        def __repr__(self):
            raise AssertionError("it was read")

    from switchyard import _arrays

    gone = Gone()
    assert _arrays.shown(gone) == "float32 [3, 4]"
    assert "float32 [3, 4]" in repr(switchyard.Permutation(gone, gone, gone, "packed"))
    fields = {field.name: gone for field in dataclasses.fields(switchyard.Received)}
    assert "rows float32 [3, 4]" in repr(switchyard.Received(**fields | {"layout": "packed"}))


def test_errors_say_what_they_say():
    for name, kind in public_classes():
        if issubclass(kind, BaseException):
            assert repr(kind("what is wrong")) == f"{name}('what is wrong')"
