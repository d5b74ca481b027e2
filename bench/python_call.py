#!/usr/bin/env python3
"""Host time of a call of switchyard.Experts with four tensors, without what the engine does.

    PYTHONPATH=python SWITCHYARD_LIBRARY=build/src/c_api/libswitchyard_c.so bench/python_call.py

The engine is left out: sy_layer_check(), which finds nothing to do, stands in the place of
sy_layer_forward(). Beside it an operator of torch.library that does nothing. Best of 7 rounds.
"""

import ctypes
import timeit

import torch

import switchyard
from switchyard import _library, _passes

CALLS = 20000


def microseconds(function):
    return min(timeit.repeat(function, number=CALLS, repeat=7)) / CALLS * 1e6


def main():
    torch.set_num_threads(1)
    experts, hidden, intermediate, tokens, top_k = 8, 64, 32, 4, 2
    w13 = torch.zeros(experts, 2 * intermediate, hidden, dtype=torch.bfloat16)
    w2 = torch.zeros(experts, hidden, intermediate, dtype=torch.bfloat16)
    one_thread = switchyard.Placement(num_threads=1)
    layer = switchyard.Experts(w13, w2, top_k=top_k, max_tokens=16, placement=one_thread)
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    ids = torch.arange(tokens * top_k).reshape(tokens, top_k) % experts
    weights = torch.ones(tokens, top_k)
    out = torch.empty_like(x)
    layer(x, ids, weights, out=out)

    _passes._forward = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)(
        ("sy_layer_check", _library.library)
    )
    with torch.no_grad():
        print(f"Experts, out given         {microseconds(lambda: layer(x, ids, weights, out=out)):5.2f} us")
        print(f"Experts                    {microseconds(lambda: layer(x, ids, weights)):5.2f} us")
        library = torch.library.Library("switchyard_bench", "DEF")
        library.define("nothing(Tensor x, Tensor ids, Tensor weights, Tensor(a!) out) -> ()")
        library.impl("nothing", lambda x, ids, weights, out: None, "CPU")
        operator = torch.ops.switchyard_bench.nothing.default
        print(f"empty operator of torch    {microseconds(lambda: operator(x, ids, weights, out)):5.2f} us")


if __name__ == "__main__":
    main()
