"""Workspaces: layers of different shapes in one memory."""

import ctypes
import gc
import sys
import threading
import weakref

import numpy
import pytest
import torch

from conftest import in_threads, started
import switchyard
from reference import error, experts, routing
from switchyard import Activation, Experts, Memory, Placement, Workspace, World, _workspace

# H, I, E, K, most tokens, plain or gated: each is the largest in something.
SHAPES = [(64, 24, 5, 2, 13, True), (32, 48, 9, 3, 24, True), (48, 16, 16, 4, 7, False)]
LARGEST = dict(hidden=64, intermediate=48, experts=16, top_k=4, max_tokens=24, compute="f32", num_threads=1)


class Case:
    """A layer's weights and a batch for it, and what a layer with memory of its own makes of them."""

    def __init__(self, shape, dtype=torch.float32):
        hidden, intermediate, count, top_k, self.tokens, gated = shape
        self.w13 = (torch.randn(count, (2 if gated else 1) * intermediate, hidden) / 8).to(dtype)
        self.w2 = (torch.randn(count, hidden, intermediate) / 6).to(dtype)
        self.options = dict(
            top_k=top_k, max_tokens=self.tokens, placement=Placement(num_threads=1), activation=Activation("silu", gated)
        )
        self.batch = (torch.randn(self.tokens, hidden).to(dtype), *routing(self.tokens, count, top_k))
        self.expected = self.make()(*self.batch)

    def make(self, **more):
        return Experts(self.w13, self.w2, **self.options | more)

    def agrees(self, layer):
        return torch.equal(layer(*self.batch), self.expected)


@pytest.fixture
def cases():
    return [Case(shape) for shape in SHAPES]


@pytest.fixture
def workspace():
    return Workspace(**LARGEST)


def test_layers_of_different_shapes_share_it(cases, workspace):
    layers = [case.make(memory=Memory(workspace)) for case in cases]
    for _ in range(3):
        for case, layer in zip(cases, layers):
            assert case.agrees(layer)
    assert workspace.bytes > 0 and workspace.slots == 1 and workspace.backend == "cpu"
    # Passes are counted together: it is one memory.
    assert layers[-1].stats().epoch == 9
    first = cases[0]
    gate, up = first.w13.chunk(2, dim=1)
    expected = experts(first.batch[0], gate, up, first.w2, *first.batch[1:], Activation())
    assert error(layers[0](*first.batch), expected) < 1e-5


@pytest.mark.parametrize("compute", ["bf16", "f8_e4m3"])
def test_in_other_types(compute):
    dtype = torch.float8_e4m3fn if compute == "f8_e4m3" else torch.bfloat16
    workspace = Workspace(**LARGEST | {"compute": compute})
    for shape in SHAPES[:2]:
        case = Case(shape, torch.bfloat16)
        if dtype != torch.bfloat16:
            case.w13, case.w2 = case.w13.to(dtype), case.w2.to(dtype)
            count = case.w13.shape[0]
            case.options |= dict(w13_scale=torch.ones(count), w2_scale=torch.ones(count))
            case.expected = case.make()(*case.batch)
        layer = case.make(memory=Memory(workspace))
        assert layer.compute == compute
        assert case.agrees(layer)


def test_numpy(workspace):
    random = numpy.random.default_rng(0)
    w13, w2 = (random.standard_normal(s, numpy.float32) for s in ((5, 48, 64), (5, 64, 24)))
    x = random.standard_normal((9, 64), numpy.float32)
    ids = numpy.array([[t % 5, (t + 1) % 5] for t in range(9)], numpy.int32)
    weights = random.random((9, 2), numpy.float32)
    options = dict(top_k=2, max_tokens=16, placement=Placement(num_threads=1))
    expected = Experts(w13, w2, **options)(x, ids, weights)
    layer = Experts(w13, w2, **options, memory=Memory(workspace))
    assert (layer(x, ids, weights) == expected).all()
    workspace.release()
    workspace.restore()
    assert (layer(x, ids, weights) == expected).all()


@pytest.mark.parametrize(
    "less", ["hidden", "intermediate", "experts", "top_k", "max_tokens", "compute", "num_threads"]
)
def test_layers_that_need_more_are_refused(less):
    case = Case((64, 48, 16, 4, 24, True))
    if less == "compute":
        sizes = LARGEST | {"compute": "bf16"}
    elif less == "num_threads":
        sizes = LARGEST
        case.options["placement"] = Placement(num_threads=8)
    else:
        sizes = LARGEST | {less: LARGEST[less] // 2}
    workspace = Workspace(**sizes)
    with pytest.raises(switchyard.InvalidArgument, match="does not fit .* make the workspace for the largest"):
        case.make(memory=Memory(workspace))
    # The workspace is as it was.
    small = Case((32, 16, 4, 2, 8, True))
    assert small.agrees(small.make(memory=Memory(workspace)))


@pytest.mark.parametrize(
    "options,text",
    [
        (dict(slots=0), "slots is 0; use 1 to 16"),
        (dict(slots=17), "slots is 17"),
        (dict(hidden=0), "hidden"),
        (dict(top_k=17), "top_k"),
        (dict(max_tokens=0), "max_tokens is 0"),
        (dict(compute="f16"), "compute is 'f16'; pass 'bf16', 'f32' or 'f8_e4m3'"),
        (dict(num_threads=-1), "num_threads is -1"),
        (dict(reserved_sms=4), "backend is cpu"),
        (dict(device="tpu:0"), "device is 'tpu:0'"),
        (dict(device=-1), "device is -1"),
        (dict(device="cuda:x"), "device is 'cuda:x'"),
        (dict(allocator="jax"), "allocator is 'jax'"),
        (dict(allocator="torch"), "the device is a CPU"),
        (dict(allocator=object()), "allocator is a object, which lacks"),
    ],
)
def test_what_makes_no_sense_is_refused(options, text):
    with pytest.raises(switchyard.InvalidArgument, match=text):
        Workspace(**LARGEST | options)


@pytest.mark.skipif(switchyard.has_cuda(), reason="this build has the GPU engine")
def test_gpus_are_not_in_every_build():
    with pytest.raises(switchyard.Unsupported):
        Workspace(**{k: v for k, v in LARGEST.items() if k != "num_threads"}, device="cuda:0")


def test_what_a_layer_asks_of_it(cases, workspace):
    case = cases[0]
    with pytest.raises(switchyard.InvalidArgument, match="the workspace has slots 0 to 0"):
        case.make(memory=Memory(workspace, slot=1))
    with pytest.raises(switchyard.InvalidArgument, match="slot is 1, but there is no workspace"):
        case.make(memory=Memory(slot=1))
    with pytest.raises(switchyard.InvalidArgument, match="of another world"):
        case.make(memory=Memory(workspace), placement=Placement(world=World.single()))
    with pytest.raises(switchyard.InvalidArgument, match="workspace is a Experts; pass a switchyard.Workspace"):
        case.make(memory=Memory(case.make()), placement=Placement(world=World.single()))
    # Without a world the layer is of the workspace's.
    other = Workspace(World.single(), **LARGEST)
    assert case.agrees(case.make(memory=Memory(other)))


def test_release_and_restore(cases, workspace):
    layers = [case.make(memory=Memory(workspace)) for case in cases]
    size = workspace.bytes
    for _ in range(2):
        assert all(case.agrees(layer) for case, layer in zip(cases, layers))
        workspace.release()
        workspace.release()
        assert workspace.released and workspace.bytes == size and "released" in repr(workspace)
        for case, layer in zip(cases, layers):
            with pytest.raises(switchyard.InvalidArgument, match="workspace was released; call restore"):
                layer(*case.batch)
        workspace.restore()
        workspace.restore()
        assert not workspace.released
    assert all(case.agrees(layer) for case, layer in zip(cases, layers))


def test_release_and_restore_of_two_ranks():
    case = Case((64, 24, 6, 2, 13, True))
    outs = [[], []]

    def rank(world):
        workspace = Workspace(world, **LARGEST)
        own = world.own_experts(6)
        layer = Experts(
            case.w13[own.start : own.stop], case.w2[own.start : own.stop], memory=Memory(workspace),
            **case.options | {"placement": Placement(num_experts=6, num_threads=1, world=world)},
        )
        for _ in range(3):
            outs[world.rank].append(layer(*case.batch))
            workspace.release()
            workspace.restore()

    in_threads(rank, World.threads(2))
    for of_rank in outs:
        assert len(of_rank) == 3 and all(torch.equal(out, case.expected) for out in of_rank)


def test_slots_serve_two_threads_at_once(cases):
    workspace = Workspace(**LARGEST, slots=2)
    assert workspace.slots == 2 and workspace.bytes == 2 * Workspace(**LARGEST).bytes
    layers = [case.make(memory=Memory(workspace, slot=i)) for i, case in enumerate(cases[:2])]
    together = threading.Barrier(2)

    def passes(i):
        together.wait()
        for _ in range(200):
            assert cases[i].agrees(layers[i])

    in_threads(passes, range(2))
    assert [layer.stats().epoch for layer in layers] == [200, 200]


def test_experts_in_other_places_need_room_for_the_places():
    case = Case((64, 24, 4, 2, 13, True))
    placement = [0, 1, 2, 3, 0, 2]

    def make(workspace):
        return Experts(
            case.w13[placement], case.w2[placement], memory=Memory(workspace),
            **case.options | {"placement": Placement(num_experts=4, experts=placement, num_threads=1)},
        )

    with pytest.raises(switchyard.InvalidArgument, match="does not fit"):
        make(Workspace(**LARGEST | {"experts": 4}))
    layer = make(Workspace(**LARGEST | {"experts": 6}))
    assert error(layer(*case.batch), case.expected.double()) < 1e-5


def test_the_function_takes_it(cases, workspace):
    case = cases[0]
    x, ids, weights = case.batch
    out = switchyard.experts(
        x, case.w13, case.w2, ids, weights, memory=Memory(workspace), max_tokens=24, placement=Placement(num_threads=1)
    )
    assert torch.equal(out, case.expected)


@torch.no_grad()
def test_whole_layers_share_it(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=96, num_local_experts=8, num_experts_per_tok=2,
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path)
    options = dict(max_tokens=16, num_threads=1)
    workspace = Workspace(**LARGEST)
    x = torch.randn(2, 7, 64)
    for index in range(2):
        alone = switchyard.MoeLayer.from_checkpoint(tmp_path, index, **options)
        shared = switchyard.MoeLayer.from_checkpoint(tmp_path, index, workspace=workspace, **options)
        assert torch.equal(shared(x), alone(x))
        assert shared.stats().epoch == index + 1
    block = transformers.MixtralForCausalLM(config).eval().model.layers[0].mlp
    alone = switchyard.MoeLayer.from_hf(block, **options)
    other = switchyard.MoeLayer.from_hf(block, workspace=workspace, **options)
    assert torch.equal(other(x), alone(x))
    assert torch.equal(shared(x), switchyard.MoeLayer.from_checkpoint(tmp_path, 1, **options)(x))
    # Passes of both, from_hf()'s own among them.
    assert shared.stats().epoch == 2 + alone.stats().epoch + 1
    workspace.release()
    with pytest.raises(switchyard.InvalidArgument, match="released"):
        shared(x)


# ---------------------------------------------------------------------------------- its life


def test_it_may_be_closed_before_its_layers(cases):
    with Workspace(**LARGEST) as workspace:
        layers = [case.make(memory=Memory(workspace)) for case in cases]
    assert workspace.closed and "closed" in repr(workspace)
    workspace.close()
    assert all(case.agrees(layer) for case, layer in zip(cases, layers))
    for use in (workspace.release, workspace.restore, lambda: workspace.released):
        with pytest.raises(switchyard.InvalidArgument, match="the workspace is closed"):
            use()
    with pytest.raises(switchyard.InvalidArgument, match="the workspace is closed"):
        cases[0].make(memory=Memory(workspace))


def test_nothing_keeps_it(cases):
    workspace = Workspace(**LARGEST)
    layer = cases[0].make(memory=Memory(workspace))
    gone = weakref.ref(workspace)
    del workspace
    gc.collect()
    assert gone() is None
    assert cases[0].agrees(layer)


def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * 4096


def test_its_memory_goes_with_the_last_layer(cases):
    sizes = LARGEST | {"max_tokens": 150_000}
    workspace = Workspace(**sizes)
    layer, size = cases[0].make(memory=Memory(workspace)), workspace.bytes
    assert size > 100 << 20
    held = address_space()
    workspace.close()
    assert address_space() > held - size // 2
    layer.close()
    assert address_space() < held - size * 9 // 10


EXIT = """
import torch, switchyard
workspace = switchyard.Workspace(hidden=32, intermediate=32, experts=4, top_k=2, max_tokens=8, compute="f32")
layers = [
    switchyard.Experts(
        torch.zeros(4, 64, 32), torch.zeros(4, 32, 32), top_k=2, max_tokens=8, memory=switchyard.Memory(workspace)
    )
    for _ in range(3)
]
x, ids = torch.zeros(5, 32), torch.tensor([[0, 1]] * 5)
for layer in layers:
    layer(x, ids, torch.ones(5, 2))
{more}
print("done")
"""


@pytest.mark.parametrize("more", ["", "workspace.release()", "del workspace", "del layers, layer", "workspace.me = workspace"])
def test_alive_at_exit(more):
    done = started(sys.executable, "-c", EXIT.format(more=more))
    assert done.returncode == 0 and done.stderr == "" and done.stdout == "done\n", done


# ------------------------------------------------------------------------------- the allocator
#
# The CPU engine takes none, so the callbacks are called here as the library calls them.


class Fake:
    """Remembers what it gave."""

    def __init__(self, fails_with=None):
        self.given, self.freed, self.fails_with = {}, [], fails_with

    def allocate(self, size):
        if self.fails_with is not None:
            raise self.fails_with
        memory = ctypes.create_string_buffer(size)
        self.given[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def free(self, address):
        self.freed.append(address)
        del self.given[address]


def test_the_cpu_engine_takes_no_allocator():
    fake = Fake()
    with pytest.raises(switchyard.InvalidArgument, match="an allocator is given, but the backend is cpu"):
        Workspace(**LARGEST, allocator=fake)
    assert not fake.given


def test_allocators_are_called_back():
    fake = Fake()
    callbacks = _workspace._callbacks_of(fake, switchyard._abi.CUDA)
    # Sizes and addresses of more than 32 bits come through.
    address = callbacks.allocate(1000, None)
    assert list(fake.given) == [address]
    callbacks.release(address, None)
    assert fake.freed == [address] and not fake.given
    high = type("High", (), {"allocate": lambda self, size: size + (1 << 46), "free": None})()
    high.free = lambda address: None
    assert _workspace._Callbacks(high).allocate(1 << 40, None) == (1 << 40) + (1 << 46)


def test_an_allocators_exception_is_the_cause():
    failure = RuntimeError("no memory in the pool")
    callbacks = _workspace._Callbacks(Fake(failure))
    assert callbacks.allocate(8, None) is None  # null, as the library sees it
    # The library's error then.
    assert switchyard._library.library.sy_workspace_release(None)
    with pytest.raises(switchyard.InvalidArgument) as caught:
        callbacks.raise_last()
    assert caught.value.__cause__ is failure
    # The next failure is not this one's.
    with pytest.raises(switchyard.InvalidArgument) as caught:
        callbacks.raise_last()
    assert caught.value.__cause__ is None


def test_an_interrupt_in_an_allocator_comes_through():
    callbacks = _workspace._Callbacks(Fake(KeyboardInterrupt()))
    callbacks.allocate(8, None)
    with pytest.raises(KeyboardInterrupt):
        callbacks.raise_last()


@pytest.mark.parametrize("address", [None, "4096", 1.5])
def test_addresses_are_integers(address):
    allocator = Fake()
    allocator.allocate = lambda size: address
    callbacks = _workspace._Callbacks(allocator)
    assert callbacks.allocate(8, None) is None
    assert isinstance(callbacks._failure, TypeError)


def test_callbacks_outlive_workspace_and_first_layer(cases, workspace):
    """Whoever closes the last layer frees the memory through them."""
    callbacks = _workspace._Callbacks(Fake())
    gone = weakref.ref(callbacks)
    workspace._callbacks = callbacks
    first = cases[0].make(memory=Memory(workspace))
    second = cases[1].make(memory=Memory(workspace))
    del callbacks, workspace._callbacks, workspace, first
    gc.collect()
    assert gone() is not None
    assert cases[1].agrees(second)
    del second
    gc.collect()
    assert gone() is None


def test_torchs_caching_allocator(monkeypatch):
    calls = []

    class Stream:
        def synchronize(self):
            calls.append("synchronize")

    stream = Stream()
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream if device == 3 else None)

    def allocate(size, device=None, stream=None):
        calls.append((size, device, stream))
        if size > 1 << 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 1 << 33

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", allocate)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", lambda address: calls.append(address))
    callbacks = _workspace._callbacks_of("torch", switchyard._abi.CUDA)
    assert callbacks.allocate(4096, None) == 1 << 33
    callbacks.release(1 << 33, None)
    # The stream's work with the block's last tensor is over before it is handed out.
    assert calls == ["init", (4096, 3, stream), "synchronize", 1 << 33]
    assert callbacks.allocate(1 << 41, None) is None
    assert isinstance(callbacks._failure, torch.OutOfMemoryError)
