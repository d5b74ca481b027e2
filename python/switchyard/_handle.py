"""One guard around every call of the library: the object is open, of this process, and used by one thread."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from ctypes import byref
from typing import Any, NoReturn

from . import _arrays
from ._arrays import Kept
from ._library import check
from .errors import InvalidArgument, Unsupported

# How long the end of the process waits for threads that are still in a call.
_EXIT_SECONDS = 5.0
# Objects by number.
live: weakref.WeakValueDictionary[int, Owned] = weakref.WeakValueDictionary()


def _first_number() -> int:
    """Code that is compiled or exported has objects by number. In another process it must find nothing by it rather than
    another object, so processes begin at random."""
    return random.SystemRandom().getrandbits(62)


_numbers = itertools.count(_first_number())


def next_number() -> int:
    return next(_numbers)


def _destroy(destroy: Any, handle: ctypes.c_void_p, kept: object) -> None:
    """End a handle once: the library sets it to null, and does nothing for null.

    A finalizer that calls this keeps `kept` until then.
    """
    check(destroy(byref(handle)))


def read_json(function: Callable[..., int], *arguments: Any) -> Any:
    """What a function of the library writes as JSON. Its last arguments are a text, null to ask for its
    size, and that size."""
    size = ctypes.c_uint64()
    check(function(*arguments, None, byref(size)))
    text = ctypes.create_string_buffer(size.value)
    check(function(*arguments, text, byref(size)))
    return json.loads(text.value)


class Owned:
    """An object of the library.

    Methods call the library under `_lock` with the handle that `_open` returns, so calls from several
    threads follow one another, and `close` waits for the call under way. Methods that must not wait for
    other calls use `_shared` instead.

    A child of fork() has none of the threads that stand behind the object, so it is refused there, and
    its end in the child leaves the parent's alone.
    """

    _noun = "object"

    def __repr__(self) -> str:
        # A debugger shows it anywhere: in the midst of __init__, after close() and in a child of fork(). It takes
        # no lock and calls no library, both of which another thread may hold up.
        try:
            return f"<{type(self).__name__}: {self._shown()}, {self._state()}>"
        except Exception:
            return f"<{type(self).__name__}: not made>"

    def _shown(self) -> str:
        """What it is, from attributes alone."""
        return self._noun

    def _state(self) -> str:
        if os.getpid() != self._made_in:
            return f"of process {self._made_in}, which this one is a child of"
        return "open" if self._handle else "closed"

    def __init__(
        self,
        handle: ctypes.c_void_p,
        destroy: Any,
        *,
        lock: Any = None,
        kept: object = None,
    ) -> None:
        self._handle = handle
        # Reentrant: a signal's handler or an allocator of the caller's may use the object, too.
        self._lock = lock or threading.RLock()
        self._idle = threading.Condition(threading.RLock())
        self._sharers: list[int] = []  # threads
        self._closing = 0  # the thread that closes it
        self._made_in = os.getpid()
        self._number = next(_numbers)
        # The end of an object that nobody can reach needs no lock: no call of it is under way. A lock
        # could be waited for here in the midst of any other thread's work, wherever garbage is collected.
        self._finalizer = weakref.finalize(self, _destroy, destroy, handle, kept)
        self._finalizer.atexit = False
        live[self._number] = self

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._handle

    def close(self) -> None:
        """Give memory and threads back, after the call under way. May be called again."""
        with self._lock, self._idle:
            self._closing = threading.get_ident()
            try:
                self._idle.wait_for(self._unshared)
                self._finalizer()
            finally:
                self._closing = 0
                self._idle.notify_all()

    def _open(self) -> ctypes.c_void_p:
        if not self._handle:
            self._refuse()
        return self._handle

    def _refuse(self) -> NoReturn:
        here = os.getpid()
        if here != self._made_in:
            raise InvalidArgument(
                f"the {self._noun} was made by process {self._made_in}, and this is its child {here}: "
                "threads and devices do not survive fork(); make it after fork(), or start processes "
                "with the start method 'spawn'"
            )
        raise InvalidArgument(f"the {self._noun} is closed; make another")

    @contextlib.contextmanager
    def _shared(self) -> Iterator[ctypes.c_void_p]:
        """The handle, for calls that the library allows beside others."""
        with self._idle:
            while self._closing:
                if self._closing == threading.get_ident():  # a signal's handler, while this thread closes it
                    raise InvalidArgument(f"the {self._noun} is closed; make another")
                self._idle.wait()
            handle = self._open()
            self._sharers.append(threading.get_ident())
        try:
            yield handle
        finally:
            with self._idle:
                self._sharers.remove(threading.get_ident())
                self._idle.notify_all()

    def _unshared(self) -> bool:
        # A call of this thread itself waits if a signal's handler asks. The library leaves its handle behind.
        return all(thread == threading.get_ident() for thread in self._sharers)

    def _inherit(self) -> None:
        """In a child of fork()."""
        self._finalizer.detach()
        self._handle = ctypes.c_void_p()
        # Threads that are not here may have held them.
        self._lock = threading.RLock()
        self._idle = threading.Condition(threading.RLock())
        self._sharers = []
        self._closing = 0  # the thread that closes it

    def _end(self, deadline: float) -> None:
        """At the end of the process. The lock is kept for good, so that daemon threads stop before
        their next call. An object in use is left to the operating system."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return
        with self._idle:
            self._closing = threading.get_ident()
            if self._idle.wait_for(self._unshared, deadline - time.monotonic()):
                self._finalizer()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Unsupported(
            f"a {type(self).__name__} cannot be copied or pickled: it is memory and threads of this "
            "process; make another from the same arguments where it is needed"
        )


class Reader(Owned):
    """An object that reads arrays of the caller's at each call: a layer, or an operator with weights."""

    # The remedy if an array has other memory by now.
    _remedy = "make another"
    # Whether it looks for changes of its arrays before each call. A server that is told of changes turns it
    # off.
    _watches = True
    # Lays out anew what the library copied, given the handle and a stream.
    _lay_out: Any
    # Whether the library copied anything.
    _copies: bool
    backend: str
    device: int | None

    def _set_keep(self, keep: Kept) -> None:
        # The library does not own what it reads.
        self._keep: Kept | None = keep
        self._places = keep.places
        self._watched = self._watches and keep.watched and (self._copies or keep.repeats)

    def _forget_arrays(self) -> None:
        """For the cache, whose key has the arrays' places."""
        if self._keep is not None:
            self._keep.forget_arrays()
            self._set_keep(self._keep)

    def _see_changes(self, x: Any) -> None:
        """Before a call: refuses arrays that have other memory by now, and lays out anew what may have
        changed."""
        keep = self._keep
        if keep is None:
            self._open()
            return
        for tensor, address, _ in self._places:
            if tensor.data_ptr() != address:
                keep.refuse_moved(self._noun, self._remedy)
        if self._watched and keep.changed():
            keep.refresh()
            check(self._lay_out(self._open(), self._stream(x)))

    def _stream(self, x: Any) -> int | None:
        return _arrays.current_stream(x) if self.backend == "cuda" else None

    def close(self) -> None:
        """Give memory and threads back, after the call under way. May be called again."""
        with self._lock:
            super().close()
            self._keep = None
            self._places = []

    def refresh(self, stream: int | None = None) -> None:
        """Lay out anew what the library copied of the arrays: biases and scales, on CPUs scales that are
        not float32 with contiguous rows.

        The next call does so by itself where torch counts in-place changes. Call `refresh` after you
        changed a copied array through ``.data`` or by a kernel of your own, and for replays of graphs.

        Parameters
        ----------
        stream : int, optional
            On GPUs, a cudaStream_t. None: torch's current one of the object's device.

        Raises
        ------
        Unsupported
            On GPUs, where all weights were copied from host memory.
        """
        with self._lock:
            handle = self._open()
            if self._keep is not None:
                self._keep.refresh()
                self._keep.changed()
            torch = sys.modules.get("torch")
            if stream is None and self.backend == "cuda" and torch is not None:
                stream = torch.cuda.current_stream(self.device).cuda_stream
            check(self._lay_out(handle, stream))


def _exit() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    for _, owned in sorted(live.items(), reverse=True):
        owned._end(deadline)


def _forked() -> None:
    global _numbers
    _numbers = itertools.count(_first_number())
    for owned in list(live.values()):
        owned._inherit()


def in_child(forget: Callable[[], None]) -> Callable[[], None]:
    """Have a function called in each child of fork(), where it forgets what the parent made."""
    os.register_at_fork(after_in_child=forget)
    return forget


atexit.register(_exit)
os.register_at_fork(after_in_child=_forked)
