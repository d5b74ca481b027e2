"""SymmetricHeap: arrays in memory of all ranks, over ranks that are threads and processes."""

import ctypes
import gc
import os
import subprocess
import sys

import numpy
import pytest
import torch

from conftest import in_threads
import switchyard
from switchyard import SymmetricHeap, World, _abi, _heap


def all_gather(world, arrays, rounds=20):
    """Every rank puts its block into all ranks' arrays, in rounds, with two windows."""
    heap = SymmetricHeap(world, 1 << 20, arrays=arrays)
    n = 50
    windows = heap.empty((2, world.size, n), "float32")
    flags = heap.empty(world.size, "int64")
    assert windows.shape == (2, world.size, n) and not windows.any() and not flags.any()
    heap.barrier()
    me = world.rank
    there = [heap.translate(windows, peer) for peer in range(world.size)]
    flags_there = [heap.translate(flags, peer)[me : me + 1] for peer in range(world.size)]
    make = torch.arange if arrays == "torch" else numpy.arange
    for i in range(1, rounds + 1):
        for peer in range(world.size):
            there[peer][i % 2, me] = make(n) * (me + 1) + i
            heap.signal(flags_there[peer], i)
        for peer in range(world.size):
            heap.wait(flags[peer : peer + 1], i, peer)
            assert (windows[i % 2, peer] == make(n) * (peer + 1) + i).all(), (i, peer)
    heap.barrier()
    heap.check()


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_threads_gather(ranks, arrays):
    in_threads(lambda world: all_gather(world, arrays), World.threads(ranks))


def test_processes_gather(tmp_path):
    source = tmp_path / "ranks.py"
    source.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from switchyard import World\n"
        "from test_symmetric_heap import all_gather\n"
        "all_gather(World.processes(int(sys.argv[2]), 3, rendezvous=sys.argv[3]), 'torch')\n"
    )
    here = os.path.dirname(__file__)
    name = f"heap test {os.getpid()}"
    ranks = [
        subprocess.Popen([sys.executable, str(source), here, str(rank), name]) for rank in range(3)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0, 0]


@pytest.mark.parametrize(
    "dtype, expected",
    [
        ("bf16", torch.bfloat16),
        ("float8_e4m3fn", torch.float8_e4m3fn),
        (torch.int16, torch.int16),
        (numpy.float64, torch.float64),
        (numpy.dtype("int32"), torch.int32),
        ("bool", torch.bool),
    ],
)
def test_types(dtype, expected):
    heap = SymmetricHeap(World.single(), 4096)
    array = heap.empty((3, 5), dtype)
    assert array.dtype == expected and array.shape == (3, 5) and array.is_contiguous()
    assert array.data_ptr() % 128 == 0
    assert heap.translate(array, 0).data_ptr() == array.data_ptr()
    assert heap.stats().bytes_allocated == 15 * array.element_size()


def test_types_of_numpy():
    heap = SymmetricHeap(World.single(), 4096, arrays="numpy")
    array = heap.empty((2, 3), "f16")
    assert array.dtype == numpy.float16 and array.flags.c_contiguous and array.flags.writeable
    array[:] = 2
    column = heap.translate(array[:, 1], 0)
    assert column.strides == (6,) and (column == 2).all()
    with pytest.raises(switchyard.DTypeMismatch, match="bfloat16"):
        heap.empty(3, "bfloat16")
    with pytest.raises(switchyard.InvalidArgument, match="numpy"):
        heap.translate(torch.zeros(3), 0)
    with pytest.raises(switchyard.InvalidArgument, match="negative"):
        heap.translate(array[::-1], 0)


def test_views_are_translated_with_their_strides():
    worlds = World.threads(2)

    def body(world):
        heap = SymmetricHeap(world, 1 << 16)
        array = heap.empty((4, 6, 2), torch.int32)
        array.copy_(torch.arange(48).reshape(4, 6, 2) + 100 * world.rank)
        heap.barrier()
        view = array[1:3, ::2, 1].t()
        there = heap.translate(view, 1 - world.rank)
        assert there.shape == view.shape and there.stride() == view.stride()
        assert torch.equal(there - 100 * (1 - world.rank), view - 100 * world.rank)
        assert heap.translate(array[4:], 1 - world.rank).shape == (0, 6, 2)
        assert heap.translate(heap.empty((), torch.float32), 1 - world.rank).shape == ()
        heap.barrier()

    in_threads(body, worlds)


def test_the_peer_map_is_what_kernels_take():
    heap = SymmetricHeap(World.threads(1)[0], 12345, deadline=2.5)
    peers = heap.peer_map
    assert (peers.rank, peers.size, peers.bytes, peers.deadline_ns) == (0, 1, 12345, 2_500_000_000)
    array = heap.empty(7, torch.uint8)
    assert peers.bases == (array.data_ptr(),)
    assert heap.translate(array.data_ptr() + 3, 0) == array.data_ptr() + 3
    raw = bytes(peers)
    assert len(raw) == 24 + 64 * 8
    assert raw == bytes(_abi.PeerMap.from_buffer_copy(raw))
    assert int.from_bytes(raw[24:32], sys.byteorder) == array.data_ptr()
    assert raw[32:] == bytes(63 * 8)


def test_places():
    heap = SymmetricHeap(World.single(), 1000)
    first = heap.empty(100, torch.uint8)
    second = heap.empty(100, torch.uint8, alignment=256)
    assert second.data_ptr() - first.data_ptr() == 256
    heap.free(first)
    with pytest.raises(switchyard.InvalidArgument, match="offset 0"):
        heap.free(first)
    assert heap.empty(64, "uint8").data_ptr() == first.data_ptr()
    with pytest.raises(switchyard.CapacityExceeded, match="1000 bytes has 644"):
        heap.empty(645, torch.uint8)
    heap.reset()
    assert heap.empty((10, 100), torch.uint8).data_ptr() == first.data_ptr()
    stats = heap.stats()
    assert (stats.bytes, stats.allocations, stats.largest_free) == (1000, 1, 0)
    assert stats.most_allocated == 1000 and stats.calls == 6
    heap.reset()
    assert heap.empty((0, 3), torch.float32).shape == (0, 3)


def test_refusals():
    world = World.single()
    for size in (0, -1):
        with pytest.raises(switchyard.InvalidArgument, match="bytes"):
            SymmetricHeap(world, size)
    with pytest.raises(switchyard.InvalidArgument, match="arrays"):
        SymmetricHeap(world, 64, arrays="jax")
    with pytest.raises(switchyard.InvalidArgument, match="device"):
        SymmetricHeap(world, 64, device="tpu")
    if not switchyard.has_cuda():
        with pytest.raises(switchyard.Unsupported, match="CUDA"):
            SymmetricHeap(world, 64, device="cuda")
    heap = SymmetricHeap(world, 4096)
    flags = heap.empty(2, torch.int64)
    for bad in (flags, heap.empty(1, torch.int32)):
        with pytest.raises(switchyard.InvalidArgument, match="one int64"):
            heap.signal(bad, 1)
    with pytest.raises(switchyard.InvalidArgument, match="symmetric heap"):
        heap.signal(torch.zeros(1, dtype=torch.int64), 1)
    with pytest.raises(switchyard.InvalidArgument, match="rank 1"):
        heap.translate(flags, 1)
    with pytest.raises(switchyard.InvalidArgument, match="not in this rank's memory"):
        heap.translate(torch.zeros(4), 0)
    with pytest.raises(switchyard.InvalidArgument, match="shape"):
        heap.empty((2, -1), torch.int32)
    with pytest.raises(switchyard.DTypeMismatch, match="nonsense"):
        heap.empty(3, "nonsense")
    heap.close()
    heap.close()
    assert heap.closed
    with pytest.raises(switchyard.InvalidArgument, match="closed"):
        heap.empty(1, torch.int32)


def test_ranks_that_differ():
    def body(world):
        heap = SymmetricHeap(world, 1 << 16)
        heap.empty(8 + world.rank // 2, torch.float32)
        with pytest.raises(switchyard.SpecMismatch, match="rank 2 called allocate.36 bytes"):
            heap.barrier()
        with pytest.raises(switchyard.SpecMismatch, match="rank 2"):
            SymmetricHeap(world, 4096 + world.rank // 2)

    in_threads(body, World.threads(3))


def test_a_rank_that_does_not_signal_is_named():
    def body(world):
        heap = SymmetricHeap(world, 4096, deadline=0.3)
        flags = heap.empty(2, torch.int64)
        heap.barrier()
        if world.rank == 0:
            with pytest.raises(switchyard.Timeout, match="rank 1 did not raise the flag at offset 8") as info:
                heap.wait(flags[1], 5, 1)
            assert info.value.peer == 1
        world.barrier()
        with pytest.raises(switchyard.Timeout if world.rank == 0 else switchyard.Aborted, match="rank 1"):
            heap.check()

    in_threads(body, World.threads(2))


def test_arrays_keep_the_heap():
    heap = SymmetricHeap(World.single(), 1 << 22)
    array = heap.empty(1 << 20, torch.float32)
    view = array[5:]
    other = SymmetricHeap(World.single(), 1 << 22, arrays="numpy")
    values = other.empty(1 << 20, "float32")[7:]
    del heap, array, other
    gc.collect()
    view.fill_(3)
    values[:] = 3
    assert float(view.sum()) == 3 * len(view) and values.sum() == 3 * len(values)


AFTER_CLOSE = """
import sys
import threading
import torch
import switchyard
from switchyard import SymmetricHeap, World

arrays, dtype = sys.argv[1], "int64"
worlds = World.threads(2)
heaps = [None, None]

def body(rank):
    heaps[rank] = SymmetricHeap(worlds[rank], 1 << 20, arrays=arrays)

threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
mine, other = heaps
array, freed, scalar = mine.empty((4, 1000), dtype), mine.empty(1000, dtype), mine.empty((), dtype)
view, there = array[1:, ::2], mine.translate(array, 1)
other.empty((4, 1000), dtype)[...] = 7
mine.free(freed)
mine.close()
other.close()
[world.close() for world in worlds]
try:
    mine.translate(array, 1)
except switchyard.InvalidArgument as error:
    assert "closed" in str(error)
view[...] = 3
freed[...] = 1
assert scalar.sum() == 0 and array.sum() == 3 * 1500 and there.sum() == 7 * 4000 and freed.sum() == 1000
del array, heaps, mine, other
assert view.sum() == 3 * 1500
print("right")
"""


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_arrays_outlive_a_closed_heap(arrays):
    """In a process of its own, which a mistake would end. It ends with arrays that are still there."""
    found = subprocess.run(
        [sys.executable, "-c", AFTER_CLOSE, arrays], capture_output=True, text=True, timeout=300
    )
    assert (found.returncode, found.stdout) == (0, "right\n"), found.stderr


def _mapped():
    with open("/proc/self/maps") as maps:
        return sum("memfd:switchyard" in line for line in maps)


@pytest.mark.parametrize("arrays", ["torch", "numpy"])
def test_memory_goes_with_the_heap_or_its_last_array(arrays):
    world = World.processes(0, 1, rendezvous=f"heap memory {os.getpid()} {arrays}")
    before = _mapped()
    heap = SymmetricHeap(world, 1 << 20, arrays=arrays)
    first, second = heap.empty(10, "int64"), heap.empty(10, "int64")[3:]
    assert _mapped() > before
    del first
    heap.close()
    assert _mapped() > before
    del second
    gc.collect()
    assert _mapped() == before
    heap = SymmetricHeap(world, 1 << 20, arrays=arrays)
    heap.empty(10, "int64")
    heap.close()
    assert heap.closed and _mapped() == before
    heap = SymmetricHeap(world, 1 << 20, arrays=arrays)
    del heap
    gc.collect()
    assert _mapped() == before


def test_borrowed_memory():
    """As tensors of GPU memory are made, of memory of the host."""
    words = (ctypes.c_float * 8)(*range(8))
    for _ in range(3):
        tensor = _heap._borrow(ctypes.addressof(words), 32, _abi.CPU, 0).view(torch.float32)
        assert tensor.tolist() == list(range(8))
        assert tensor.data_ptr() == ctypes.addressof(words)
    tensor[3] = 50
    del tensor
    gc.collect()
    assert words[3] == 50
