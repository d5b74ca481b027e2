// The kernels of GPU ranks, for C++ code. Functions throw Error{kSystem} naming the call of the
// CUDA runtime that failed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "all_to_all/call.h"
#include "all_to_all/rung.h"

namespace switchyard::all_to_all {

inline constexpr int kWarpsOfBlock = 16;

// Loads all kernels on the current device: the first launch of a kernel that is not loaded waits
// for what the device does. Returns how many blocks, of any mixture of these kernels, the device
// can run at once.
int load_kernels();

// `stream` is a cudaStream_t.
void launch(Stage stage, const Call& call, int blocks, void* stream);

// One block that raises `flags` [ranks] for all ranks and waits until all ranks have raised them to
// `number`: what comes behind it begins on all ranks at the same time.
void launch_gate(const PeerMap& map, std::uint64_t* flags, std::uint64_t number, void* stream);

void enqueue_fill(void* memory, int value, std::size_t bytes, void* stream);
void enqueue_copy(void* to, const void* from, std::size_t bytes, void* stream);

}  // namespace switchyard::all_to_all
