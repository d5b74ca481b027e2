// The host's parameters for the kernels of Exchange. Trivially copyable; pointers are the device's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/control.h"
#include "protocol/exchange_heap.h"
#include "switchyard/exchange.h"

namespace switchyard::gpu {

// A row as its source describes it: 16 bytes, one store.
struct DeviceEntry {
  std::uint32_t slot;      // a SlotEntry of the source
  std::uint32_t expert;    // of the receiver's, from 0
  std::uint32_t weight;    // an f32's bits
  std::uint32_t siblings;  // the token's slots with an expert of the receiver's, a bit for each
};
static_assert(sizeof(DeviceEntry) == 16);

// A row that came, and where it was put.
struct DeviceArrival {
  std::uint32_t row;     // in the layout; kNoRow: there was no room for it
  std::uint32_t packed;  // in packed order
  std::uint32_t slot;    // of the source
  std::uint32_t weight;  // an f32's bits
};
static_assert(sizeof(DeviceArrival) == 16);
inline constexpr std::uint32_t kNoRow = 0xffff'ffffu;

// Numbers that advance on the device, so that a graph's replays advance them too. Kernels of one
// exchange follow one another, so each reads what the ones before it wrote. The blocks of a send
// read the numbers when they begin, and its last block advances them when all have ended.
struct ExchangeWords {
  std::uint64_t calls;     // that were sent, of both kinds
  std::uint64_t dispatch;  // the last dispatch that was sent; its number among all calls
  std::uint64_t dispatch_of_all;
  std::uint64_t combine;
  std::uint64_t combine_of_all;
  std::uint32_t ended_blocks;  // of the send that runs
  std::uint32_t counting[2];   // what the send that runs has counted
  // Of the last calls.
  std::uint32_t tokens, tokens_sent, entries_sent, fresh;
  std::uint32_t rows_received, rows_returned;
};

// What became of a handle's dispatch; written by the kernel that waits for it.
struct PlanWords {
  std::uint64_t layout;       // the number of the dispatch that made it; by the send
  std::uint32_t end_of_rows;  // one behind the last row that is somebody's
  std::uint32_t layout_rows;  // that the layout has
  std::uint32_t num_rows;
  std::uint32_t first[protocol::kMaxRanks + 1];  // arrivals of the ranks before each
};

// In memory that the host and the kernels share. Kernels write these words, the host clears them.
struct ExchangeFailures {
  std::uint64_t twice;       // kFound | token << 32 | id: an id that a token names twice
  std::uint64_t padded;      // kFound | expert << 32 | rows: more than its room
  std::uint64_t capacity;    // kFound | rows: that the output has no room for
  std::uint64_t results;     // kFound | rows: that combine's input should have had
  std::uint64_t mixture;     // kFound | source << 32 | its layout
  std::uint64_t mixture_of;  // the dispatch << 32 | this rank's layout
  std::uint32_t given_up;

  static constexpr std::uint64_t kFound = std::uint64_t{1} << 63;
};

// What all kernels of an exchange take.
struct ExchangeSite {
  protocol::Heaps heaps;
  protocol::ExchangeHeap heap;
  ExchangeWords* words;
  ExchangeFailures* failures;
  std::uint64_t deadline_ns;
  std::uint32_t top_k;
  std::uint32_t hidden;
  std::uint32_t list;         // the most rows of one source
  std::uint32_t most_tokens;  // of one source
};

// A handle's memory.
struct HandleSite {
  std::int32_t* places;     // [T, K]: the place of each slot, or -1
  float* weights;           // [T, K]
  std::int32_t* positions;  // [T, K]: of a slot among all of this rank's, sorted by place
  std::int32_t* ends;       // [places]: of them
  // Of what came.
  PlanWords* plan;
  std::uint32_t* row_base;     // [ranks][own]: plus a row's number in its source's list: its row
  std::uint32_t* packed_base;  // [ranks][own]: the same, in packed order
  std::uint32_t* limit;        // [own]: one behind the expert's last row in the layout
  std::int32_t* own_ends;      // [own]
  DeviceArrival* arrivals;     // [ranks][list]
  std::uint32_t* siblings;     // [ranks][list], with pre_sum
  std::uint32_t* index_of;     // [ranks][max_tokens * K], with pre_sum: the arrival of a slot
};

struct PrepareCall {
  const void* ids;  // [T, K]
  bool wide_ids;
  const void* weights;  // [T, K] or null
  bool bf16_weights;
  const std::int32_t* place_of;  // [E] or null
  std::int32_t num_experts;
  std::uint32_t slots, top_k;
  std::int32_t* places;
  float* to;
};

// How tokens become what travels.
enum class Wire : std::uint8_t { kCopy, kFromBF16, kFromF16, kFromF32 };

struct DispatchSend {
  const std::byte* tokens;
  std::int64_t token_stride;  // in bytes
  const float* scales;        // of FP8 tokens that are copied
  std::int64_t scale_stride;
  std::uint32_t count;
  std::uint32_t wire_bytes;  // of a token's elements as they travel, a multiple of 16
  std::uint32_t groups;      // scales of a token
  std::uint32_t num_places;
  bool fresh;
};

struct DispatchReceive {
  std::byte* rows;
  std::int64_t capacity;    // -1: only the plan is wanted
  std::int64_t row_stride;  // in bytes
  float* scales;
  std::int64_t scale_stride;
  std::int32_t* ends;
  std::int32_t* counts;
  std::int32_t* num_rows;
  RowOrigin* origins;
  float* weights;
  std::uint32_t wire_bytes, groups;
  RowLayout layout;
  std::uint32_t own_experts;
  bool fresh;
};

struct CombineSend {
  const std::byte* rows;
  std::int64_t row_stride;  // in bytes
  std::int64_t num_rows;
  bool weighs;  // this rank multiplies
  bool pre_sum;
};

struct CombineReceive {
  void* out;
  DType to;
  std::int64_t out_stride;  // in elements
  std::uint32_t tokens;
  float scale;
  bool accumulate, weighs, pre_sum;
};

}  // namespace switchyard::gpu
