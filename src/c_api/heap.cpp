// The symmetric heap of the C interface.
#include <fmt/format.h>

#include <cstddef>
#include <cstring>
#include <memory>

#include "c_api/guard.h"
#include "c_api/handles.h"
#include "c_api/specs.h"
#include "c_api/structs.h"
#include "switchyard/error.h"
#include "switchyard/peer.h"
#include "switchyard/symmetric_heap.h"

struct sy_heap {
  switchyard::SymmetricHeap heap;
  switchyard::c_api::Calls calls{};
};

namespace switchyard::c_api {
namespace {

static_assert(sizeof(sy_peer_map) == sizeof(PeerMap) && SY_MAX_PEERS == kMaxPeers &&
                  offsetof(sy_peer_map, rank) == offsetof(PeerMap, rank) &&
                  offsetof(sy_peer_map, size) == offsetof(PeerMap, size) &&
                  offsetof(sy_peer_map, bytes) == offsetof(PeerMap, bytes) &&
                  offsetof(sy_peer_map, deadline_ns) == offsetof(PeerMap, deadline_ns) &&
                  offsetof(sy_peer_map, bases) == offsetof(PeerMap, bases),
              "a kernel that takes a PeerMap takes a sy_peer_map");

std::unique_ptr<sy_heap> create(const sy_world& world, const sy_heap_options* options) {
  const sy_heap_options asked = read_struct("sy_heap_options", options);
  SymmetricHeapOptions given;
  given.backend = backend_of(asked.backend);
  given.device = asked.device;
  given.deadline = milliseconds_of("deadline", asked.deadline_seconds);
  return std::unique_ptr<sy_heap>(
      new sy_heap{SymmetricHeap(world.world, static_cast<std::size_t>(asked.bytes), given)});
}

// Raises a flag like host::signal(), if it is in some rank's memory.
void signal(const SymmetricHeap& heap, std::uint64_t* flag, std::uint64_t value) {
  if (heap.backend() != Backend::kCpu) {
    throw Error(ErrorCode::kUnsupported,
                "sy_heap_signal() is for heaps of CPU memory; on a GPU a kernel signals, with "
                "device::signal()");
  }
  const PeerMap map = heap.peer_map();
  for (int r = 0; r < map.size; ++r) {
    const auto offset =
        reinterpret_cast<std::uintptr_t>(flag) - reinterpret_cast<std::uintptr_t>(map.bases[r]);
    if (offset % sizeof *flag != 0 || map.bytes < sizeof *flag ||
        offset > map.bytes - sizeof *flag) {
      continue;
    }
    return host::signal(flag, value);
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("the flag, at {}, is not at a multiple of 8 bytes in any rank's memory of "
                  "the symmetric heap; pass an address that translate() gave",
                  static_cast<const void*>(flag)));
}

void fill_info(const SymmetricHeap& heap, sy_heap_info* out) {
  const SymmetricHeapStats stats = heap.stats();
  sy_heap_info info = SY_HEAP_INFO_INIT;
  info.backend = heap.backend() == Backend::kCpu ? SY_CPU : SY_CUDA;
  info.device = heap.device();
  info.bytes = stats.bytes;
  info.bytes_reserved = stats.bytes_reserved;
  info.bytes_allocated = stats.bytes_allocated;
  info.most_allocated = stats.most_allocated;
  info.largest_free = stats.largest_free;
  info.allocations = stats.allocations;
  info.calls = stats.calls;
  write_struct("sy_heap_info", info, out);
}

}  // namespace
}  // namespace switchyard::c_api

using namespace switchyard::c_api;

sy_status sy_heap_create(sy_world* world, const sy_heap_options* options, sy_heap** out) {
  return guarded([&] {
    require("world", world);
    require("out", out);
    const Call in_call(world->calls, world->world);
    *out = create(*world, options).release();
  });
}

sy_status sy_heap_destroy(sy_heap** heap) {
  return guarded([&] {
    require("heap", heap);
    destroy(*heap);
  });
}

sy_status sy_heap_allocate(sy_heap* heap, uint64_t bytes, uint64_t alignment, void** out) {
  return guarded([&] {
    require("heap", heap);
    require("out", out);
    *out = heap->heap.allocate(bytes,
                               alignment == 0 ? switchyard::SymmetricHeap::kAlignment : alignment);
  });
}

sy_status sy_heap_free(sy_heap* heap, void* pointer) {
  return guarded([&] {
    require("heap", heap);
    heap->heap.free(pointer);
  });
}

sy_status sy_heap_reset(sy_heap* heap) {
  return guarded([&] {
    require("heap", heap);
    heap->heap.reset();
  });
}

sy_status sy_heap_translate(const sy_heap* heap, const void* pointer, int32_t rank, void** out) {
  return guarded([&] {
    require("heap", heap);
    require("out", out);
    *out = heap->heap.translate(pointer, rank);
  });
}

sy_status sy_heap_get_peer_map(const sy_heap* heap, sy_peer_map* out) {
  return guarded([&] {
    require("heap", heap);
    require("out", out);
    const switchyard::PeerMap map = heap->heap.peer_map();
    std::memcpy(out, &map, sizeof *out);
  });
}

sy_status sy_heap_signal(sy_heap* heap, uint64_t* flag, uint64_t value) {
  return guarded([&] {
    require("heap", heap);
    require("flag", flag);
    signal(heap->heap, flag, value);
  });
}

sy_status sy_heap_wait(sy_heap* heap, const uint64_t* flag, uint64_t value, int32_t peer) {
  return guarded([&] {
    require("heap", heap);
    require("flag", flag);
    const Call in_call(heap->calls, heap->heap.world());
    heap->heap.wait(flag, value, peer);
  });
}

sy_status sy_heap_barrier(sy_heap* heap) {
  return guarded([&] {
    require("heap", heap);
    const Call in_call(heap->calls, heap->heap.world());
    heap->heap.barrier();
  });
}

sy_status sy_heap_check(const sy_heap* heap) {
  return guarded([&] {
    require("heap", heap);
    heap->heap.check();
  });
}

sy_status sy_heap_get_info(const sy_heap* heap, sy_heap_info* out) {
  return guarded([&] {
    require("heap", heap);
    fill_info(heap->heap, out);
  });
}
