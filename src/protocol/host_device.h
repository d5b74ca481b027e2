// One annotation for code that both engines compile: the CPU engine as C++, the GPU engine as CUDA.
#pragma once

#if defined(__CUDACC__)
#define SWITCHYARD_HOST_DEVICE __host__ __device__
#else
#define SWITCHYARD_HOST_DEVICE
#endif
