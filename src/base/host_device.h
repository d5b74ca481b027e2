// One annotation for code that both engines compile: the CPU engine as C++, the GPU engine as CUDA.
#pragma once

#if defined(__CUDACC__)
#define SWITCHYARD_HOST_DEVICE __host__ __device__
#else
#define SWITCHYARD_HOST_DEVICE
#endif

// Precedes a loop. Device code then keeps one copy of its body, because fetching instructions that
// are executed once takes longer than executing them.
#if defined(__CUDACC__)
#define SWITCHYARD_ROLLED _Pragma("unroll 1")
#else
#define SWITCHYARD_ROLLED
#endif
