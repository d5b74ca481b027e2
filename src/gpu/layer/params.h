// The host's parameters for the layer kernel: LayerParams is fixed for the life of the layer,
// CallParams changes with each call. Each room declares the parameters that it needs; these structs
// combine them. Trivially copyable; pointers are device pointers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/exchange/params.h"
#include "gpu/layer/policy.h"
#include "gpu/pipeline/params.h"
#include "gpu/pipeline/trace_record.h"
#include "gpu/pipeline/words.h"
#include "gpu/route/params.h"
#include "gpu/schedule/params.h"
#include "gpu/tile/params.h"
#include "gpu/tokens/params.h"
#include "protocol/recorder.h"
#include "switchyard/layer_spec.h"

namespace switchyard::gpu {

// The parts of a block's shared memory whose place depends on the number of experts, in large
// passes.
struct LargeStorage {
  ExpertTables tables;
  std::uint32_t ring_bytes;   // without the tables, if they are in its end
  std::uint32_t ring_stages;  // where stages have a fixed size
  bool tables_in_ring;
};

struct LayerParams : ExpertParams,
                     TokenParams,
                     RouterParams,
                     WaitParams,
                     ExchangeParams,
                     ModelShape,
                     PartitionParams,
                     ActivationParams,
                     ListParams,
                     HiddenParams,
                     ScheduleParams,
                     LargeStorage {
  std::uint64_t* epoch_word;  // the number of the next pass, from 0
  std::uint32_t* readers;     // counts the blocks of this pass that have read its epoch
  PassWords pass_words[2];
  std::uint32_t num_pass_words;  // of all layers that use them
  std::uint32_t* stats;  // [E] rows per expert of the last pass, of all ranks; then its tokens
  protocol::RoutingRing ring;  // the same of the last passes; see record.cuh
};

struct CallParams : RouteCall, InputCall, OutputCall {
  std::uint32_t tokens;
  std::uint32_t paired;       // 1: launched in pairs of blocks, which do each task together; 0: not
  TraceBuffer trace;          // for traced kernels
  std::uint64_t patience_ns;  // with late ranks' counts; kWaitsForAll: without end
};

// The launch parameters that the host must know.
struct KernelShape {
  int threads;
  std::uint32_t shared_bytes;
};

using LayerKernel = void (*)(LayerParams, CallParams);
struct KernelEntry {
  LayerKernel small, large;  // for small and large passes
  KernelShape shape;         // of both
  PolicyFacts policy;        // for large passes
  // For layers with up to kUsualExperts places of experts, and for those with more.
  LargeStorage usual, many;
  // For passes whose tiles are all low; null where there are none. The storage is of large ones, of
  // layers with up to kUsualExperts places.
  struct Low {
    LayerKernel small, large, tall;                   // small: null where small passes are not low
    int blocks_per_sm, tall_rows, parts, tall_parts;  // parts: see kStageParts
    std::uint32_t shared_bytes;
    LargeStorage storage, tall_storage;
  } low;
};
// kSilu: the activation is SiLU; else LayerParams::form says which it is. Each is defined in an
// object file of its own.
template <typename P, bool kSilu, bool kGated>
KernelEntry kernel_entry();
// Returns the kernel for an activation, a type of weights and a compute type, that of weights that
// are not of four bits. Throws Error{kUnsupported} if it was not compiled.
KernelEntry find_kernel(const Activation& activation, DType weights, DType compute, bool traced);

}  // namespace switchyard::gpu
