"""Objects over threads, processes and time: who changes, closes, forks or leaves while a call is made."""

import copy
import gc
import os
import pickle
import signal
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

from conftest import python
import switchyard
from switchyard import Exchange, Experts, GroupedGemm, Memory, Placement, SymmetricHeap, Workspace, World
from test_arguments import BIASES, CALL, E, H, I, K, T, WEIGHTS
from test_arguments import _numbers as numbers


def tensors(arrays):
    return {name: torch.from_numpy(a.copy()) for name, a in arrays.items()}


# --------------------------------------------------------------------------------- what changes


def fp8_weights():
    generator = torch.Generator().manual_seed(3)
    w13 = torch.randn(E, 2 * I, H, generator=generator).to(torch.float8_e4m3fn)
    w2 = torch.randn(E, H, I, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.full((E, 2 * I // 128, H // 128), 0.1), torch.full((E, H // 128, I // 128), 0.1)
    return dict(w13=w13, w2=w2, w13_scale=scales[0], w2_scale=scales[1])


def fp8_interleaved():
    """Blocks of rows that gate and up share: their scales are laid out anew."""
    given = fp8_weights()
    half = I // 2
    return dict(
        w13=given["w13"][:, : 3 * half].contiguous(),
        w2=given["w2"][:, :, : 3 * half // 2].contiguous(), w13_scale=torch.full((E, 2, 1), 0.1),
        w2_scale=torch.full((E, 1, 1), 0.1), block=(128, 128),
    )


def e8m0_scales():
    given = fp8_weights()
    for name in ("w13_scale", "w2_scale"):
        given[name] = (given[name] * 0 + 0.125).to(torch.float8_e8m0fnu)
    return given


def rows_scales():
    given = fp8_weights()
    given["w13_scale"] = torch.full((E, 2 * I), 0.1)
    given["w2_scale"] = torch.full((E, H), 0.1)
    return given


FORMS = {
    "plain": lambda: tensors(WEIGHTS),
    "biases": lambda: tensors(WEIGHTS | BIASES),
    "bf16 biases": lambda: {n: t.bfloat16() for n, t in tensors(WEIGHTS | BIASES).items()},
    "strided biases": lambda: tensors(WEIGHTS)
    | {n: torch.from_numpy(a).repeat_interleave(2, 1)[:, ::2] for n, a in BIASES.items()},
    "FP8": fp8_weights,
    "FP8, blocks over gate and up": fp8_interleaved,
    "FP8, e8m0": e8m0_scales,
    "FP8, rows": rows_scales,
}
CHANGES = {
    "add_": lambda t: t.add_(1) if t.element_size() > 1 else t.copy_((t.float() * 2).to(t.dtype)),
    "copy_": lambda t: t.copy_((t.float() * 0.5).to(t.dtype)),
    "a part": lambda t: t[1].copy_((t[1].float() * 4).to(t.dtype)),
    "through numpy": lambda t: t.view(torch.uint8).numpy().__ixor__(
        numpy.uint8(1)
    ) if t.dtype != torch.bfloat16 and t.is_contiguous() else t.mul_(2),
}  # fmt: skip


def call(layer, x=None):
    with torch.no_grad():
        given = tensors(CALL)
        return layer(given["x"].bfloat16().float(), given["topk_ids"], given["topk_weights"])


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("form, name", [(f, n) for f in FORMS for n in FORMS[f]() if n != "block"])
def test_a_change_in_place_is_seen_by_the_next_call(form, name, how):
    given = FORMS[form]()
    layer = Experts(**given, top_k=K, max_tokens=T)
    for _ in range(3):
        before = call(layer)
    CHANGES[how](given[name])
    if how == "through numpy" and not layer._places:
        pytest.fail("the layer watches nothing")
    if how == "through numpy":
        layer.refresh()  # no counter has told of it
    after = call(layer)
    anew = call(Experts(**given, top_k=K, max_tokens=T))
    assert torch.equal(after, anew)
    assert not torch.equal(after, before)


@pytest.mark.parametrize(
    "form, name", [(f, n) for f in FORMS if f != "strided biases" for n in FORMS[f]() if n != "block"]
)
def test_the_function_sees_changes_too(form, name):
    given = FORMS[form]()
    options = {n: given.pop(n) for n in list(given) if n not in ("w13", "w2")}
    arguments = tensors(CALL)

    def run():
        with torch.no_grad():
            return switchyard.experts(
                arguments["x"], given["w13"], given["w2"], arguments["topk_ids"],
                arguments["topk_weights"], **options,
            )  # fmt: skip

    before = run()
    CHANGES["copy_"]((given | options)[name])
    after = run()
    anew = Experts(**given, **options, top_k=K, max_tokens=T)
    assert torch.equal(after, anew(arguments["x"], arguments["topk_ids"], arguments["topk_weights"]))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("name", [*WEIGHTS, *BIASES])
def test_a_change_of_an_array_of_numpy_is_seen(name):
    given = {n: a.copy() for n, a in (WEIGHTS | BIASES).items()}
    layer = Experts(**given, top_k=K, max_tokens=T)
    layer(**CALL)
    given[name] *= 2
    numpy.testing.assert_array_equal(
        layer(**CALL), Experts(**given, top_k=K, max_tokens=T)(**CALL)
    )


def test_scales_without_a_counter_are_looked_at_each_time():
    with torch.inference_mode():
        given = e8m0_scales()
        given = {n: t.clone() for n, t in given.items()}
        layer = Experts(**given, top_k=K, max_tokens=T)
        before = call(layer)
        given["w2_scale"].copy_((given["w2_scale"].float() * 2).to(torch.float8_e8m0fnu))
        assert torch.equal(call(layer), before * 2)


@pytest.mark.parametrize("name", ["w", "bias", "w_scale"])
def test_a_grouped_gemm_sees_changes(name):
    generator = torch.Generator().manual_seed(5)
    given = dict(
        w=torch.randn(E, I, H, generator=generator).to(torch.float8_e4m3fn),
        bias=torch.randn(E, I, generator=generator).bfloat16(),
        w_scale=torch.full((E, 1, 1), 0.125).to(torch.float8_e8m0fnu),
    )
    x, ends = torch.randn(6, H, generator=generator), torch.tensor([1, 3, 3, 6])
    gemm = GroupedGemm(**given)
    before = gemm(x, ends)
    assert torch.equal(switchyard.grouped_gemm(x, ends=ends, **given), before)
    CHANGES["copy_"](given[name])
    anew = GroupedGemm(**given)(x, ends)
    assert not torch.equal(anew, before)
    assert torch.equal(gemm(x, ends), anew)
    assert torch.equal(switchyard.grouped_gemm(x, ends=ends, **given), anew)


def test_a_router_bias_is_read_at_each_call():
    bias = torch.zeros(E)
    layer = Experts(
        **tensors(WEIGHTS), top_k=K, routing=switchyard.Routing(score="sigmoid"), correction_bias=bias
    )
    x, logits = torch.randn(T, H), torch.zeros(T, E)
    ids = torch.empty(T, K, dtype=torch.int32)
    weights = torch.empty(T, K)
    layer.from_logits(x, logits, ids_out=ids, weights_out=weights)
    assert ids.tolist() == [[0, 1]] * T
    bias += torch.tensor([0.0, 0, 1, 2])
    layer.from_logits(x, logits, ids_out=ids, weights_out=weights)
    assert ids.tolist() == [[3, 2]] * T


# ------------------------------------------------------------------------------ what goes away


@pytest.mark.parametrize("name", [*WEIGHTS, *BIASES])
def test_memory_that_was_replaced_is_refused_by_name(name):
    given = {n: torch.nn.Parameter(t) for n, t in tensors(WEIGHTS | BIASES).items()}
    layer = Experts(**given, top_k=K, max_tokens=T)
    before = call(layer)
    kept = given[name].data
    given[name].data = given[name].data.bfloat16().float() + 1
    for _ in range(2):
        with pytest.raises(switchyard.InvalidArgument, match=rf"{name} has other memory .* rebind"):
            call(layer)
    layer.rebind(**given)
    assert not torch.equal(call(layer), before)
    given[name].data = kept
    layer.rebind(**given)
    assert torch.equal(call(layer), before)


def test_a_layer_keeps_the_memory_that_it_reads():
    given = {n: torch.nn.Parameter(t) for n, t in tensors(WEIGHTS | BIASES).items()}
    layer = Experts(**given, top_k=K, max_tokens=T)
    places = {n: (t.data_ptr(), t.numel()) for n, t in given.items()}
    for parameter in given.values():
        parameter.data = torch.zeros(1)
    # Freed memory would be given out again.
    others = [torch.empty(count) for _, count in places.values() for _ in range(4)]
    assert not {other.data_ptr() for other in others} & {address for address, _ in places.values()}
    layer.close()


def test_a_cached_layer_goes_with_its_weights_and_takes_no_other_for_them():
    from switchyard import _cache

    given = {n: torch.from_numpy(a) for n, a in CALL.items()}
    for seed in range(6):
        torch.manual_seed(seed)
        w13, w2 = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
        biases = dict(w13_bias=torch.randn(E, 2 * I), w2_bias=torch.randn(E, H))
        found = switchyard.experts(given["x"], w13, w2, given["topk_ids"], given["topk_weights"], **biases)
        layer = Experts(w13, w2, **biases, top_k=K)
        assert torch.equal(found, layer(given["x"], given["topk_ids"], given["topk_weights"])), seed
        before = len(_cache._cache)
        del w13, w2, biases, layer
        gc.collect()
        assert len(_cache._cache) == before - 1


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nothing_is_copied_or_pickled(how):
    world = World.single()
    workspace = Workspace(hidden=H, intermediate=I, experts=E, top_k=K, max_tokens=T, compute="f32")
    exchange = Exchange(world, hidden=H, num_experts=E, top_k=K, max_tokens=T)
    module = torch.nn.Linear(1, 1)
    module.experts = Experts(**WEIGHTS, top_k=K)
    for thing in (
        world, workspace, exchange, exchange.make_handle(), SymmetricHeap(world, 4096), module.experts,
        GroupedGemm(WEIGHTS["w2"]), module,
    ):  # fmt: skip
        with pytest.raises(switchyard.Unsupported, match="cannot be copied or pickled.*make another"):
            how(thing)
            if how is copy.copy and thing is module:
                raise switchyard.Unsupported("cannot be copied or pickled: make another")  # a shallow copy


# ------------------------------------------------------------------------------------- threads


def wanted_of(layer_of, batches):
    return [layer_of()(**batch) for batch in batches]


def batches(count):
    rng = numpy.random.default_rng(11)
    found = []
    for i in range(count):
        tokens = int(rng.integers(0, T + 1))
        ids = numpy.stack([rng.permutation(E)[:K] for _ in range(tokens)] or [numpy.zeros(K)])
        found.append(
            dict(
                x=rng.standard_normal((tokens, H), dtype=numpy.float32),
                topk_ids=ids[:tokens].astype(numpy.int64 if i % 2 else numpy.int32),
                topk_weights=rng.random((tokens, K), dtype=numpy.float32),
            )
        )
    return found


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("function", ["Experts", "experts", "grouped_gemm", "GroupedGemm"])
def test_threads_share_an_object_and_get_their_own_numbers(function, library):
    make = (lambda a: a) if library == "numpy" else torch.from_numpy
    weights = {n: make(a) for n, a in WEIGHTS.items()}
    layer = Experts(**weights, top_k=K, max_tokens=T)
    gemm = GroupedGemm(weights["w13"])
    ends = make(numpy.array([1, 1, 2, 3], dtype=numpy.int32))

    def run(batch):
        batch = {n: make(a) for n, a in batch.items()}
        rows = make(numpy.full((3, H), batch["x"].shape[0] + 1, dtype=numpy.float32))
        with torch.no_grad():
            if function == "Experts":
                return layer(**batch)
            if function == "experts":
                return switchyard.experts(
                    batch["x"], *weights.values(), batch["topk_ids"], batch["topk_weights"]
                )
            if function == "GroupedGemm":
                return gemm(rows, ends)
            return switchyard.grouped_gemm(rows, weights["w13"], ends)

    given = batches(60)
    expected = [numbers(run(batch)) for batch in given]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(4):
            for found, wanted in zip(pool.map(run, given), expected):
                numpy.testing.assert_array_equal(numbers(found), wanted)


def test_layers_in_one_workspace_take_turns():
    workspace = Workspace(hidden=H, intermediate=I, experts=E, top_k=K, max_tokens=T, compute="f32")
    layers = [Experts(**WEIGHTS, top_k=K, max_tokens=T, memory=Memory(workspace)) for _ in range(3)]
    given = batches(30)
    expected = [layers[0](**batch) for batch in given]
    with ThreadPoolExecutor(6) as pool:
        for layer in layers * 2:
            for found, wanted in zip(pool.map(lambda batch: layer(**batch), given), expected):
                numpy.testing.assert_array_equal(found, wanted)


def objects():
    """Name -> (an object, a call of it that takes a while or is repeated)."""
    world = World.single()
    x = numpy.ones((T, H), dtype=numpy.float32)
    exchange = Exchange(world, hidden=H, num_experts=E, top_k=K, max_tokens=T, dispatch="f32")
    layer = Experts(**WEIGHTS, top_k=K, max_tokens=T)
    gemm = GroupedGemm(WEIGHTS["w2"])
    heap = SymmetricHeap(world, 4096, arrays="numpy")
    flag = heap.empty(1, numpy.int64)

    def round_trip():
        got = exchange.dispatch(x, CALL["topk_ids"], CALL["topk_weights"])
        exchange.combine(got.rows, got.handle)

    def raise_and_wait():
        heap.signal(flag, 1)
        heap.wait(flag, 1, 0)

    return {
        "layer": (layer, lambda: layer(**CALL)),
        "operator": (gemm, lambda: gemm(x[:, :I], numpy.array([1, 2, 3, 4]))),
        "exchange": (exchange, round_trip),
        "heap": (heap, raise_and_wait),
        "heap's barrier": (heap, heap.barrier),
        "world": (world, world.barrier),
    }


@pytest.mark.parametrize("name", list(objects()))
def test_an_object_is_closed_while_threads_use_it(name):
    for _ in range(5):
        thing, use = objects()[name]
        refused = []

        def work():
            try:
                while True:
                    use()
            except switchyard.Error as error:
                refused.append(error)

        # The calls of an exchange have an order.
        threads = [threading.Thread(target=work) for _ in range(1 if name == "exchange" else 3)]
        for thread in threads:
            thread.start()
        time.sleep(0.01)
        thing.close()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert len(refused) == len(threads)
        assert all("closed" in str(error) for error in refused), refused
        thing.close()
        assert thing.closed


# ------------------------------------------------------------------------------------ processes


def run_script(text):
    """A script beside the tests; its output."""
    script = "import sys; sys.path.insert(0, sys.argv[1])\nfrom test_lifetimes import *\n" + textwrap.dedent(text)
    return python("-X", "faulthandler", "-c", script, os.path.dirname(__file__)).stdout


def test_a_child_of_fork_is_refused_what_it_inherits_and_makes_its_own():
    out = run_script(
        """
        kept = objects()
        workspace = Workspace(hidden=H, intermediate=I, experts=E, top_k=K, max_tokens=T, compute="f32")
        kept["workspace"] = workspace, workspace.release
        kept["workspace, anew"] = workspace, workspace.restore
        wanted = switchyard.experts(CALL["x"], *WEIGHTS.values(), CALL["topk_ids"], CALL["topk_weights"])
        for thing, use in kept.values():
            if thing is not workspace:
                use()
        stop = threading.Event()

        def keep_busy():
            while not stop.is_set():
                kept["layer"][1]()

        thread = threading.Thread(target=keep_busy)
        thread.start()
        for _ in range(10):
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                for name, (thing, use) in kept.items():
                    try:
                        use()
                    except switchyard.InvalidArgument as error:
                        assert "child" in str(error) and "fork" in str(error), error
                    else:
                        print(name, "was taken", flush=True)
                        os._exit(1)
                    thing.close()
                again = switchyard.experts(
                    CALL["x"], *WEIGHTS.values(), CALL["topk_ids"], CALL["topk_weights"])
                assert numpy.array_equal(again, wanted)
                objects()["exchange"][1]()
                kept.clear()
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        thread.join()
        for thing, use in kept.values():
            use()
        print("fine")
        """
    )
    assert out.endswith("fine\n")


def test_a_child_that_ends_in_python_leaves_the_parents_world_alone():
    run_script(
        """
        worlds = World.threads(2, deadline=20)
        layer = Experts(**WEIGHTS, top_k=K, max_tokens=T)
        child = os.fork()
        if child == 0:
            sys.exit(0)  # with all that Python does at its end
        assert os.waitpid(child, 0)[1] == 0
        threads = [threading.Thread(target=world.barrier) for world in worlds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        layer(**CALL)
        """
    )


@pytest.mark.parametrize("trial", range(3))
def test_daemon_threads_are_in_calls_when_the_process_ends(trial):
    begin = time.monotonic()
    run_script(
        """
        def work(use):
            while True:
                use()

        kept = objects()
        for _, use in kept.values():
            for _ in range(1 if use is kept["exchange"][1] else 2):
                threading.Thread(target=work, args=(use,), daemon=True).start()
        time.sleep(0.05)
        """
    )
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_signal_in_the_midst_of_a_call(library):
    """Its handler makes a call of the same object, of another shape."""
    run_script(
        f"""
        make = torch.from_numpy if {library!r} == "torch" else numpy.array
        layer = Experts(**WEIGHTS, top_k=K, max_tokens=T)
        whole = {{name: make(a) for name, a in CALL.items()}}
        few = {{name: make(a[:2]) for name, a in CALL.items()}}
        torch.set_grad_enabled(False)
        wanted, of_few = layer(**whole), layer(**few)
        seen = []

        def again(*_):
            if len(seen) < 300:
                try:
                    seen.append(layer(**few))
                except switchyard.InvalidArgument as refusal:
                    # The call had waited for its own threads for so long that it ran the handler.
                    assert "a handler of a signal makes this call while its thread waits" in str(refusal)
                signal.setitimer(signal.ITIMER_REAL, 0.0003 if len(seen) < 300 else 0)

        signal.signal(signal.SIGALRM, again)
        signal.setitimer(signal.ITIMER_REAL, 0.0003)
        end = time.monotonic() + 20
        while len(seen) < 300 and time.monotonic() < end:
            assert (layer(**whole) == wanted).all()
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        assert len(seen) > 20 and all((s == of_few).all() for s in seen)
        """
    )


def test_a_read_only_map_is_not_written(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(bytes(4 * T * H))
    rows = numpy.memmap(path, dtype=numpy.float32, mode="r", shape=(T, H))
    layer = Experts(**WEIGHTS, top_k=K, max_tokens=T)
    with pytest.raises(switchyard.InvalidArgument, match="out is read-only"):
        layer(**CALL, out=rows)
    assert path.read_bytes() == bytes(4 * T * H)


def test_rebind_takes_what_the_layer_was_made_of():
    given = tensors(WEIGHTS | BIASES)
    with_biases = Experts(**given, top_k=K, max_tokens=T)
    plain = Experts(given["w13"], given["w2"], top_k=K, max_tokens=T)
    before = call(with_biases), call(plain)
    with pytest.raises(switchyard.MissingTensor, match="made with biases; pass w13_bias"):
        with_biases.rebind(given["w13"], given["w2"])
    with pytest.raises(switchyard.ShapeMismatch, match="w13_bias is given.*without"):
        plain.rebind(**given)
    with pytest.raises(switchyard.ShapeMismatch, match="make 2 experts .* made of 4"):
        plain.rebind(given["w13"][:2], given["w2"][:2])
    assert torch.equal(call(with_biases), before[0]) and torch.equal(call(plain), before[1])
    with pytest.raises(switchyard.ShapeMismatch, match="w13 has 3 experts; pass this rank's 4"):
        Experts(given["w13"][:3], given["w2"][:3], placement=Placement(num_experts=4), top_k=K)
