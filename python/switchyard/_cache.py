"""Layers and operators made once for their arrays, and kept while those are."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from . import _arrays
from ._handle import in_child
from .errors import InvalidArgument

_CACHED_LAYERS = 512
# Layers and operators, and what their small arrays were like.
_cache: OrderedDict[Any, tuple[Any, list[Any]]] = OrderedDict()
# Reentrant: garbage is collected, and arrays end, wherever memory is asked for.
_lock = threading.RLock()


class WeakTensors:
    """Tensors as long as they are."""

    def __init__(self, tensors: list[Any]) -> None:
        self._references = [weakref.ref(tensor) for tensor in tensors]

    def __iter__(self) -> Iterator[Any]:
        found = (reference() for reference in self._references)
        return (tensor for tensor in found if tensor is not None)


def fingerprint(name: str, array: Any) -> Any:
    """What tells an array from others, for the cache."""
    if array is None:
        return None
    torch = sys.modules.get("torch")
    plain = torch and type(array) is torch.Tensor and array.is_cpu | array.is_cuda and array.layout is torch.strided
    if plain and not array.is_nested:
        return (array.data_ptr(), tuple(array.shape), array.stride(), array.dtype, array.device, array.requires_grad)
    tensor, _ = _arrays.describe(name, array, packed=True)
    strides = tuple(tensor.strides[: tensor.ndim])
    return (tensor.data, _arrays.shape_of(tensor), strides, tensor.dtype, tensor.device_type, tensor.device_id)


def find(key: Any, small: Sequence[Any], fits: Callable[[Any], bool]) -> Any:
    """The layer or operator made of these arrays, if it still serves; or None.

    small: arrays that the library may have copied. They have to be the same objects, unchanged: others
    may have come to the same place.
    """
    with _lock:
        found = _cache.get(key)
        if found is None:
            return None
        made, states = found
        if made.closed or not fits(made) or not all(map(_is_as_then, small, states)):
            return None
        try:
            _cache.move_to_end(key)
        except KeyError:  # garbage was collected just now, and one of its arrays with it
            pass
        return made


def _hashable(value: Any) -> Any:
    # Values that compare equal may differ in type: an option takes 1, but neither True nor 1.0.
    if isinstance(value, (tuple, list)):
        return tuple(map(_hashable, value))
    return type(value), value


def options_key(options: Iterable[tuple[str, Any]]) -> tuple[Any, ...]:
    """Options by name as part of a key. A list counts as a tuple: who makes the object says what is wrong."""
    found = tuple((name, _hashable(value)) for name, value in options)
    try:
        hash(found)
    except TypeError:
        for name, value in found:
            try:
                hash(value)
            except TypeError as error:
                given = dict(options)[name]
                raise InvalidArgument(
                    f"{name} is {given!r}, which is no value of an option ({error}); pass numbers, texts, tuples of "
                    "them, or an option's own class"
                ) from None
    return found


def _state(array: Any) -> Any:
    """A reference to a tensor of torch and its version counter. Changes of other arrays are not seen, but
    looked for at each call."""
    if not _arrays.is_torch(array):
        return None
    return weakref.ref(array), _arrays.version_of(array)


def _is_as_then(array: Any, state: Any) -> bool:
    if state is None:
        return not _arrays.is_torch(array)
    return state[0]() is array and state[1] == _arrays.version_of(array)


def remember(key: Any, made: Any, large: Sequence[Any], small: Sequence[Any]) -> None:
    """Keep a layer or an operator until one of its arrays goes."""
    kept = []
    for array in (*large, *small):
        try:
            if array is not None:
                weakref.finalize(array, _forget, key).atexit = False
        except TypeError:  # not to be told of its end
            kept.append(array)
    made._cached_arrays = kept
    with _lock:
        old = _cache.pop(key, None)
        _cache[key] = (made, [_state(array) for array in small])
        dropped = _cache.popitem(last=False)[1][0] if len(_cache) > _CACHED_LAYERS else None
    del old, dropped


def _forget(key: Any) -> None:
    # A thread in a call of it has a reference, so it ends after that call.
    with _lock:
        found = _cache.pop(key, None)
    del found


@in_child
def _forget_all() -> None:
    global _lock
    _lock = threading.RLock()
    _cache.clear()
