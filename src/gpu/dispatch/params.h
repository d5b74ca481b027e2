// The host's parameters for the kernels of Exchange. Trivially copyable; pointers are the device's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/control.h"
#include "protocol/exchange_heap.h"
#include "switchyard/exchange.h"
#include "switchyard/trace.h"

namespace switchyard::gpu {

// A row as its source describes it: 16 bytes, one store. A token has room for as many entries as it
// can have, and fills the first of them. A token without rows has one entry, without siblings.
struct DeviceEntry {
  std::uint32_t number;    // among the source's rows of the expert, in the order of tokens
  std::uint32_t expert;    // k << 16 | the receiver's expert, from 0
  std::uint32_t weight;    // an f32's bits
  std::uint32_t siblings;  // the token's slots with an expert of the receiver's, a bit for each
};
static_assert(sizeof(DeviceEntry) == 16);

// A row that arrived, and where it was put.
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
// read the numbers when they begin, and its last block advances them when all have ended; those
// that place rows end later than those that send, so there are two counts of blocks.
struct ExchangeWords {
  std::uint64_t calls;             // dispatches and combines that were sent
  std::uint64_t dispatch;          // the number of the last dispatch that was sent
  std::uint64_t dispatch_of_all;   // its number among all calls
  std::uint64_t combine;           // the number of the last combine that was sent
  std::uint64_t combine_of_all;    // its number among all calls
  std::uint32_t ended_blocks;      // sending blocks of the send that runs
  std::uint32_t ended_all_blocks;  // all of its blocks, if some place rows
  std::uint32_t counting[2];       // counts of the send that runs
  // Statistics of the last calls.
  std::uint32_t tokens, tokens_sent, entries_sent, new_layout;
  std::uint32_t rows_received, rows_returned;
};

// The plan of a handle's rows. The kernel that waits for the dispatch writes it, or a send that
// places rows early.
struct PlanWords {
  std::uint64_t layout;       // the number of the dispatch that made the rows; the send writes it
  std::uint64_t planned;      // the same, once all words below are of that dispatch
  std::uint32_t end_of_rows;  // one past the last row in use
  std::uint32_t layout_rows;  // rows of the layout, unused ones included
  std::uint32_t num_rows;
  std::uint32_t first[protocol::kMaxRanks + 1];  // arrivals of the ranks before each
  std::uint32_t tokens[protocol::kMaxRanks];     // of each rank
};

// Failures, in memory that the host and the kernels share. Kernels write these words, the host
// clears them.
struct ExchangeFailures {
  std::uint64_t duplicate;   // kFound | token << 32 | id: an id that a token names twice
  std::uint64_t unknown;     // kFound | token << 32 | id: one that no expert has
  std::uint64_t padded;      // kFound | expert << 32 | rows: more than its room
  std::uint64_t capacity;    // kFound | rows: that the output has no room for
  std::uint64_t results;     // kFound | rows: that combine's input should have had
  std::uint64_t mixture;     // kFound | source << 32 | its layout
  std::uint64_t mixture_of;  // the dispatch << 32 | this rank's layout
  std::uint32_t given_up;

  static constexpr std::uint64_t kFound = std::uint64_t{1} << 63;
};

// The kernels of a dispatch and a combine, in the order of a stream.
enum class ExchangeStage : std::uint8_t {
  kSendTokens,
  kAwaitDispatch,
  kPlaceRows,
  kSendResults,
  kAwaitCombine,
  kSumTokens,
};
inline constexpr std::uint32_t kExchangeStages = 6;

// A record tells what a block of a traced exchange did. Its times are nanoseconds of the device's
// global timer.
struct ExchangeRecord {
  std::uint64_t ready;     // the kernels before it had ended
  std::uint64_t begin;     // its inputs had arrived
  std::uint64_t end;       // its last warp was done
  std::uint64_t dispatch;  // the number of the last dispatch
  std::uint64_t combine;   // a combine's own number
  TraceKind kind;
};
struct ExchangeRecords {
  ExchangeRecord* records;  // [kExchangeStages][blocks]; null: nothing is recorded
  std::uint32_t blocks;     // the most blocks of a kernel
};

// Parameters of all kernels of an exchange.
struct ExchangeSite {
  protocol::Heaps heaps;
  protocol::ExchangeHeap heap;
  ExchangeWords* words;
  ExchangeFailures* failures;
  std::uint64_t deadline_ns;
  std::uint32_t top_k;
  std::uint32_t hidden;
  std::uint32_t list;         // the most rows of one source
  std::uint32_t slots;        // the most rows of one token
  std::uint32_t most_tokens;  // the most tokens of one source
  // Words of the send that runs.
  std::uint32_t* units_done;  // [parts of most_tokens]: units done of each; zeros between sends
  std::uint32_t* totals;      // [kMostSorters][places]: slots of each sorting block
  std::uint64_t* totalled;    // [kMostSorters]: the dispatch that the totals belong to
  std::uint32_t* placed;      // [warps]: units that a warp placed before the receive began
  ExchangeRecords trace;
};
inline constexpr std::uint32_t kMostSorters = 64;
// Threads of the blocks that move rows and sort.
inline constexpr std::uint32_t kMoverThreads = 512, kMoverWarps = kMoverThreads / 32;
inline constexpr std::uint32_t kMostPlaces = 2 * kMoverThreads;  // a thread scans two

// A handle's memory.
struct HandleSite {
  std::int32_t* places;  // [T, K]: the place of each slot, or -1
  float* weights;        // [T, K]
  // The rows that arrived.
  PlanWords* plan;
  std::uint32_t* row_base;     // [ranks][own]: add a DeviceEntry's number: its row
  std::uint32_t* packed_base;  // [ranks][own]: the same, in packed order
  std::uint32_t* list_base;    // [ranks][own]: the same, among all rows of its source
  std::uint32_t* limit;        // [own]: one past the expert's last row in the layout
  std::int32_t* own_ends;      // [own]
  DeviceEntry* entries;        // [ranks][max_tokens][slots]: as they arrived
  DeviceArrival* arrivals;     // [ranks][list], sorted by expert
  std::uint32_t* siblings;     // [ranks][list], with pre_sum
  std::uint32_t* index_of;     // [ranks][max_tokens * K], with pre_sum: the arrival of a slot
};

// A token's slots as the caller has them.
struct SlotsCall {
  const void* ids;  // [T, K]
  bool wide_ids;
  const void* weights;  // [T, K] or null
  bool bf16_weights;
  const std::int32_t* place_of;  // [E] or null
  std::int32_t num_experts;
  bool large_ids_are_none;  // ids of num_experts or more; else they are bad
  std::uint32_t tokens_of_sorter;
};

// How tokens are made ready to travel: copied, or quantised from a type.
enum class Wire : std::uint8_t { kCopy, kFromBF16, kFromF16, kFromF32 };

struct DispatchSend {
  const std::byte* tokens;
  std::int64_t token_stride;  // in bytes
  const float* scales;        // of FP8 tokens that are copied
  std::int64_t scale_stride;
  std::uint32_t count;
  std::uint32_t wire_bytes;  // of a travelling token's elements, a multiple of 16
  std::uint32_t groups;      // scales of a token
  std::uint32_t num_places;
  bool new_layout;
  SlotsCall slots;
  // How blocks share the work out. The first sort slots, those from first_sender on send tokens,
  // and the last place rows. If first_sender is 0, sorters send, too, when they are done.
  std::uint32_t sorters, first_sender, placing_blocks;
  bool by_parts;  // raise each part's flag when it is sent, not all flags at the end
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
  bool new_layout;
  std::uint32_t placing_blocks;  // blocks of the send that placed rows already
};

struct CombineSend {
  const std::byte* rows;
  std::int64_t row_stride;  // in bytes
  std::int64_t num_rows;
  bool weighs;  // rows are multiplied by their weights before they travel
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
