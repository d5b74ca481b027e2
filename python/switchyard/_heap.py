"""The symmetric heap for kernels and programs of your own."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import math
import weakref
from collections.abc import Sequence
from ctypes import byref
from typing import Any, Literal

from . import _abi, _arrays, _values
from ._arrays import Array
from ._exchange import _gpu_of
from ._handle import Owned, _destroy, in_child
from ._library import check, library
from ._values import count_text
from ._world import World, checked_world
from .errors import DTypeMismatch, InvalidArgument


@dataclasses.dataclass(frozen=True)
class PeerMap:
    """Where each rank's memory is, as this rank reaches it. For kernels.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    bytes : int
        Size of each rank's memory.
    deadline_ns : int
        Deadline of waits that have no other.
    bases : tuple of int
        Addresses. ``bases[peer] + (address - bases[rank])`` is where `peer` has what this rank has
        at `address`.
    """

    rank: int
    size: int
    bytes: int
    deadline_ns: int
    bases: tuple[int, ...]

    def __bytes__(self) -> bytes:
        """The struct `switchyard::PeerMap`, which kernels in C++ take by value."""
        return bytes(self.struct)

    @property
    def struct(self) -> ctypes.Structure:
        """The same, for ctypes."""
        bases = (ctypes.c_void_p * 64)(*self.bases)
        return _abi.PeerMap(self.rank, self.size, self.bytes, self.deadline_ns, bases)


@dataclasses.dataclass(frozen=True)
class HeapStats:
    """Of this rank's memory.

    Attributes
    ----------
    bytes, bytes_reserved, bytes_allocated, most_allocated, largest_free : int
        The heap's; with what the library adds; in use now, and at most; and the largest that there
        is in one piece.
    allocations, calls : int
        Allocations that live; calls that allocated or freed.
    """

    bytes: int
    bytes_reserved: int
    bytes_allocated: int
    most_allocated: int
    largest_free: int
    allocations: int
    calls: int


class _Memory:
    """The heap in the library, which ends with its last reference.

    A `SymmetricHeap` has one reference until it is closed, and each of its arrays of host memory has another: they
    would crash the process if they were used after the memory is gone. No rank waits for another's end of a heap.
    """

    def __init__(self, handle: int) -> None:
        end = weakref.finalize(self, _destroy, library.sy_heap_destroy, ctypes.c_void_p(handle), None)
        # At the end of the process arrays may still be in use, and then the operating system takes the memory back.
        end.atexit = False


def _letting_go(handle: ctypes.c_void_p, kept: list[_Memory]) -> Any:
    """What ends a `SymmetricHeap` as sy_heap_destroy() would, but leaves its memory to its arrays."""

    def let_go(_: Any) -> int:
        handle.value = None
        kept.clear()
        return _abi.OK

    return let_go


# GPU heaps that gave out tensors, which do not keep them: they live until close().
_pinned: set[SymmetricHeap] = set()
in_child(_pinned.clear)


class SymmetricHeap(Owned):
    """Memory of the same size on every rank, which all ranks read and write. Collective.

    An allocation has the same place on all ranks, so its address there follows from the one here.
    All ranks allocate and free alike, in the same order; `barrier` finds it if they do not. Calls of
    several threads follow one another, but for `signal`, `wait` and `translate`.

    ::

        heap = switchyard.SymmetricHeap(world, 64 << 20, device="cuda")
        inbox = heap.empty((world.size, 4096), torch.bfloat16)
        heap.barrier()                             # all have allocated, and alike
        there = heap.translate(inbox, peer)        # the inbox of `peer`, for kernels of this rank

    Parameters
    ----------
    world : World
    bytes : int
        Size of each rank's memory, which is all 0 at first.
    device : str, int or torch.device
        "cpu", or this rank's GPU.
    deadline : float
        Seconds that a wait for a flag takes at most, if it is given no other. 0: the world's.
    arrays : {"torch", "numpy"}, optional
        What `empty` makes. None: tensors of torch where it is installed.

    Raises
    ------
    Error
        As `Exchange` does; InvalidArgument also for no bytes, or a device that is none.
    """

    _noun = "heap"

    def _shown(self) -> str:
        where = self.backend if self.device < 0 else f"cuda:{self.device}"
        return (
            f"{self.bytes:,} bytes on {where}, arrays of {self.arrays}, rank {self.world.rank} of {self.world.size}"
        )

    def __init__(
        self,
        world: World,
        bytes: int,
        *,
        device: Any = "cpu",
        deadline: float = 0.0,
        arrays: Literal["torch", "numpy"] | None = None,
    ) -> None:
        gpu = _gpu_of(device)
        if arrays is None:
            arrays = "torch" if importlib.util.find_spec("torch") is not None else "numpy"
        if arrays not in ("torch", "numpy") or (arrays == "numpy" and gpu is not None):
            raise InvalidArgument(
                f"arrays is {arrays!r}, and device {device!r}; use 'torch', or 'numpy' on the CPU"
            )
        if checked_world(world) is None:
            raise InvalidArgument("world is None; pass a switchyard.World, such as World.single()")
        bytes = _values.integer("bytes", bytes, 1, (1 << 64) - 1)
        options = _abi.HeapOptions(
            backend=_abi.CPU if gpu is None else _abi.CUDA, device=-1 if gpu is None else gpu,
            bytes=bytes, deadline_seconds=deadline,
        )
        handle = ctypes.c_void_p()
        with world._lock:
            check(library.sy_heap_create(world._open(), byref(options), byref(handle)))
        # Empty once the heap is closed.
        self._kept = [_Memory(handle.value or 0)]
        super().__init__(handle, _letting_go(handle, self._kept))
        self.world = world
        self.bytes = bytes
        self.arrays = arrays
        self.backend: str = "cpu" if gpu is None else "cuda"
        info = _abi.HeapInfo()
        check(library.sy_heap_get_info(handle, byref(info)))
        self.device: int = info.device
        """The GPU's number; -1: host memory."""
        c_map = _abi.PeerMap()
        check(library.sy_heap_get_peer_map(handle, byref(c_map)))
        self.peer_map = PeerMap(
            c_map.rank, c_map.size, c_map.bytes, c_map.deadline_ns,
            tuple(c_map.bases[r] for r in range(c_map.size)),
        )
        """Addresses, for kernels."""

    # ---------------------------------------------------------------------------------- places

    def empty(self, shape: int | Sequence[int], dtype: Any, *, alignment: int = 128) -> Any:
        """An array in this rank's memory. All ranks make it alike.

        Parameters
        ----------
        shape : int or sequence of int
        dtype : dtype of torch or numpy, or a name of one, or "bf16", "fp8", ...
        alignment : int
            Its address is a multiple of this: a power of two up to 4096.

        Returns
        -------
        array
            Contiguous. It holds 0 where the heap was never used before, and otherwise what was there.
            In host memory it keeps the memory, also after `close`. A heap of a GPU that has given out
            arrays lives until `close`, after which they must not be used.

        Raises
        ------
        CapacityExceeded
            If there is no room.
        InvalidArgument, DTypeMismatch
            For an alignment, a shape or a type that is none.
        """
        try:
            sizes = (shape,) if isinstance(shape, (int, str, bytes)) else tuple(shape)
        except TypeError:
            sizes = (shape,)
        sizes = tuple(_values.integer("shape", size, 0) for size in sizes)
        kind, item = self._dtype(dtype)
        size = math.prod(sizes) * item
        if size >= 1 << 63:
            raise InvalidArgument(f"shape is {sizes}, which is {size:,} bytes; no memory has so many")
        pointer = ctypes.c_void_p()
        with self._lock:
            check(library.sy_heap_allocate(self._open(), size, alignment, byref(pointer)))
            memory = self._kept[0]
        return self._array(memory, pointer.value or 0, size, kind, sizes, _arrays.contiguous_strides(sizes))

    def translate(self, array: Array, rank: int) -> Array:
        """The array of `rank` that stands where `array` stands here.

        Parameters
        ----------
        array : array, or int
            Made by `empty` of this heap on this rank, or a view of such; or an address in it.
        rank : int

        Returns
        -------
        array, or int
            `rank`'s memory, with the same shape, type and strides. On a GPU it says that it is on this
            rank's GPU, whose kernels reach it.

        Raises
        ------
        InvalidArgument
            For memory that is not this rank's of this heap, and ranks that there are not.
        """
        if isinstance(array, int):
            return self._translate(array, rank)
        address, strides, item = self._address(array)
        if any(stride < 0 for stride in strides):
            raise InvalidArgument("the array has negative strides; translate what it is a view of")
        shape = tuple(array.shape)
        span = 0
        if math.prod(shape) != 0:
            span = item * (1 + sum((n - 1) * s for n, s in zip(shape, strides)))
        elif address == 0:  # torch tells no address of a tensor without elements
            address = self.peer_map.bases[self.peer_map.rank]
        with self._shared():
            memory = self._kept[0]
            self._translate(address + span, rank)  # its end is in the heap, too
            there = self._translate(address, rank)
        return self._array(memory, there, span, array.dtype, shape, strides)

    def free(self, array: Any) -> None:
        """Give back what `empty` made. All ranks do so alike; the memory may be used again then.

        Parameters
        ----------
        array : array, or int
            Or its address.

        Raises
        ------
        InvalidArgument
            If nothing is allocated there.
        """
        address = array if isinstance(array, int) else self._address(array)[0]
        with self._lock:
            check(library.sy_heap_free(self._open(), address))

    def reset(self) -> None:
        """Give everything back. All ranks do so alike."""
        with self._lock:
            check(library.sy_heap_reset(self._open()))

    # ----------------------------------------------------------------------------------- flags

    def signal(self, flag: Any, value: int) -> None:
        """Raise a flag in any rank's host memory, after everything that this thread wrote before.

        On a GPU kernels do that.

        Parameters
        ----------
        flag : array of one int64 or uint64, or int
            What `translate` returned, or its address.
        value : int

        Raises
        ------
        Unsupported
            On a GPU.
        InvalidArgument
            For a flag that is not in the heap.
        """
        address = self._flag(flag)
        with self._shared() as handle:
            check(library.sy_heap_signal(handle, address, value))

    def wait(self, flag: Any, value: int, peer: int) -> None:
        """Wait until a flag in this rank's host memory, which `peer` raises, has at least a value.

        What `peer` wrote before it raised the flag can be read then. On a GPU kernels wait.

        Parameters
        ----------
        flag : array of one int64 or uint64, or int
        value : int
        peer : int
            The rank to be named if the flag does not come.

        Raises
        ------
        Timeout
            If it does not within the deadline. The heap is dead then, on all ranks; the world lives.
        Aborted
            If another rank gave up first.
        Unsupported
            On a GPU.
        """
        address = self._flag(flag)
        with self._shared() as handle:
            check(library.sy_heap_wait(handle, address, value, peer))

    def barrier(self) -> None:
        """Wait for all ranks, and check that all have allocated and freed alike. Collective.

        On a GPU it does not wait for streams.

        Raises
        ------
        SpecMismatch
            If they have not, naming a rank and the first call in which it differs from rank 0.
        Timeout, Aborted
            If a rank does not come, or the heap is dead.
        """
        with self._lock:
            check(library.sy_heap_barrier(self._open()))

    def check(self) -> None:
        """Raise `Timeout` or `Aborted` if a wait was given up on any rank, kernels' waits included."""
        with self._shared() as handle:
            check(library.sy_heap_check(handle))

    def stats(self) -> HeapStats:
        """How much is used."""
        info = _abi.HeapInfo()
        with self._lock:
            check(library.sy_heap_get_info(self._open(), byref(info)))
        names = [field.name for field in dataclasses.fields(HeapStats)]
        return HeapStats(**{name: getattr(info, name) for name in names})

    def close(self) -> None:
        """End this rank's use of the heap. May be called again; no rank waits for it.

        The memory is given back at once, or with the last array of host memory that `empty` or `translate` made. On
        a GPU it is given back at once, and tensors of the heap must not be used any more.
        """
        _pinned.discard(self)
        super().close()

    # --------------------------------------------------------------------------------- private

    def _translate(self, address: int, rank: int) -> int:
        pointer = ctypes.c_void_p()
        with self._shared() as handle:
            check(library.sy_heap_translate(handle, address, rank, byref(pointer)))
        return pointer.value or 0

    def _dtype(self, dtype: Any) -> tuple[Any, int]:
        """The dtype of torch or numpy, and an element's bytes."""
        name = _arrays.dtype_name(dtype)
        code = _arrays._SHORT.get(name)
        if code is not None and code != _abi.DTYPE_NONE:
            name = next(long for long, number in _arrays._NAMES.items() if number == code)
        if self.arrays == "torch":
            import torch

            found = dtype if isinstance(dtype, torch.dtype) else getattr(torch, name, None)
            if isinstance(found, torch.dtype):
                return found, torch.empty((), dtype=found).element_size()
        else:
            import numpy

            try:
                found = numpy.dtype(name)
                return found, found.itemsize
            except TypeError:
                pass
        raise DTypeMismatch(f"dtype {dtype} is not known to {self.arrays}; use one of its own")

    def _address(self, array: Any, name: str = "array") -> tuple[int, tuple[int, ...], int]:
        """Address, strides in elements, and an element's bytes."""
        if self.arrays == "torch" and _arrays.is_torch(array):
            return array.data_ptr(), tuple(array.stride()), array.element_size()
        if self.arrays == "numpy" and _arrays.is_numpy(array):
            item = array.itemsize
            if any(stride % item for stride in array.strides):
                raise InvalidArgument("the array has strides that are no multiples of its elements")
            return array.ctypes.data, tuple(stride // item for stride in array.strides), item
        raise InvalidArgument(
            f"{name} is a {type(array).__name__}; pass an array of {self.arrays} that empty() made, or an "
            "address"
        )

    def _flag(self, flag: Any) -> int:
        if isinstance(flag, int):
            return flag
        address, _, item = self._address(flag, "flag")
        if math.prod(flag.shape) != 1 or item != 8:
            raise InvalidArgument(
                f"the flag has shape {tuple(flag.shape)} and {count_text(item, 'byte')} an element; pass one int64"
            )
        return address

    def _array(
        self,
        memory: _Memory,
        address: int,
        size: int,
        dtype: Any,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> Any:
        """`memory`: that of this heap, which another thread may close meanwhile."""
        if self.arrays == "numpy":
            import numpy

            steps = tuple(stride * dtype.itemsize for stride in strides)
            return numpy.ndarray(shape, dtype, _buffer(memory, address, size), 0, steps)
        import torch

        if size == 0:
            device = "cpu" if self.device < 0 else f"cuda:{self.device}"
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if self.device < 0:
            flat = torch.frombuffer(_buffer(memory, address, size), dtype=torch.uint8)
        else:
            _pinned.add(self)
            flat = _borrow(address, size, _abi.CUDA, self.device)
        return flat.view(dtype).as_strided(shape, strides)


def _buffer(memory: _Memory, address: int, size: int) -> Any:
    buffer = (ctypes.c_uint8 * size).from_address(address)
    buffer._memory = memory  # who keeps the buffer keeps the memory
    return buffer


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("tensor", _arrays._DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
# Tensors may outlive the interpreter, so descriptions stay, one for each place.
_borrowed: dict[tuple[int, int, int, int], tuple[Any, ...]] = {}


def _borrow(address: int, size: int, device_type: int, device: int) -> Any:
    """A tensor of torch, [size] uint8, of memory that it does not keep. By DLPack, which takes the
    device from the description: that of a peer's memory is this rank's, which has it mapped."""
    from torch.utils.dlpack import from_dlpack

    key = (address, size, device_type, device)
    if key not in _borrowed:
        shape, strides = (ctypes.c_int64 * 1)(size), (ctypes.c_int64 * 1)(1)
        tensor = _arrays._DLTensor(address, device_type, device, 1, 1, 8, 1, shape, strides, 0)
        # Some versions of torch call it, whatever it is: a function that does nothing.
        nothing = ctypes.cast(library.sy_abi_version, ctypes.c_void_p).value
        _borrowed[key] = (_DLManagedTensor(tensor, None, nothing), shape, strides)
    managed = _borrowed[key][0]
    return from_dlpack(_new_capsule(ctypes.addressof(managed), b"dltensor", None))
