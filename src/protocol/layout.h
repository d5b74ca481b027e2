// The symmetric heap of one layer: where everything is, how large it is, and who may write it.
//
// Conflict freedom (after the FlashDMoE thesis, theorem 5.3.1, restated for packed segments). Let a
// write be (s, d, i): rank s writes index i of a region of rank d's heap. In one epoch no two
// distinct ranks write the same (d, i):
//
//   region     index written by s                                     so distinct s differ in
//   counts     [epoch parity][s]                                      the row
//   pool       [P(s,d), P(s,d) + U(s,d))                              the interval
//              P: prefix sum of U over sources
//   rows       [B(e) + S(s,e), ... + c(s,e)) for e owned by d         the interval
//   arrived    [tile][s]                                              the column
//   finished   [s][tile]                                              the row
//   cells      [token][k], by the owner of the expert of (token, k) of d
//   control    own words only; but see abort_world
//
// where c(s,e) are the counts, U(s,d) the number of distinct tokens of s with an expert on d, S the
// prefix sum of c over sources and B that over d's experts. All follow from the counts matrix,
// which every rank has, so the intervals tile their regions exactly and nothing is padded.
//
// Only `counts` is doubled by epoch parity. A rank publishes its row for epoch n + 1 when it has
// finished epoch n, and nobody writes pool, rows, arrived, finished or cells of epoch n + 1 before
// it has every row of epoch n + 1. So the row is also the credit: no rank can be lapped, no buffer
// is overwritten while somebody reads it, and there is no exit barrier.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/quantize.h"
#include "protocol/partition.h"

namespace switchyard::protocol {

inline constexpr int kMaxRanks = 64;
inline constexpr int kMaxTopK = 32;

enum class Phase : std::uint8_t { kNone, kGate, kCounts, kDispatch, kExperts, kCombine };

SWITCHYARD_HOST_DEVICE constexpr const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kNone:
      return "none";
    case Phase::kGate:
      return "gate";
    case Phase::kCounts:
      return "counts";
    case Phase::kDispatch:
      return "dispatch";
    case Phase::kExperts:
      return "experts";
    case Phase::kCombine:
      return "combine";
  }
  return "?";
}

// What a waiter whose deadline passed saw.
struct FailureRecord {
  std::int32_t waiter;
  std::int32_t peer;  // the culprit
  Phase phase;        // the step that the culprit did not do,
  std::uint64_t epoch;
  std::uint64_t slot;  // what the waiter itself lacked
  std::uint64_t expected;
  std::uint64_t observed;
  std::uint64_t waited_ns;
  std::int32_t witness;  // the rank that waits for that step; often the waiter
};

// "I wait for `peer` in `phase` of `epoch`", in one word so that it is read whole. The words of a
// deadlocked world compare like the steps that are missing, the earliest first, except that a
// rank's wait for its own threads comes after all waits for others: it often is a consequence.
struct WaitsFor {
  Phase phase = Phase::kNone;
  int peer = 0;
  std::uint64_t epoch = 0;
  bool own = false;  // the waiter is `peer` itself

  // The lowest bits change with `beat` while a wait lasts: a word that stays the same is of a rank
  // that has stopped.
  SWITCHYARD_HOST_DEVICE constexpr std::uint64_t pack(std::uint32_t beat) const {
    return static_cast<std::uint64_t>(own) << 63 | (epoch & kMostEpochs) << 24 |
           static_cast<std::uint64_t>(phase) << 20 | static_cast<std::uint64_t>(peer) << kBeatBits |
           (beat & ((1u << kBeatBits) - 1));
  }
  SWITCHYARD_HOST_DEVICE static constexpr WaitsFor unpack(std::uint64_t word) {
    return {static_cast<Phase>(word >> 20 & 15), static_cast<int>(word >> kBeatBits & 255),
            word >> 24 & kMostEpochs, (word >> 63) != 0};
  }
  static constexpr int kBeatBits = 12;
  static constexpr std::uint64_t kMostEpochs = (std::uint64_t{1} << 39) - 1;
};
static_assert(kMaxRanks <= 256, "a peer has 8 bits");

// What a rank that looks for a culprit has seen another rank wait for.
struct Sighting {
  std::uint64_t last;      // its `waits_for` when it was looked at last
  std::uint64_t earliest;  // the least that it changed to; 0: it did not change
};

// Every rank's own words, on cache lines of their own because peers poll them.
struct Control {
  alignas(64) std::uint64_t abort;      // 0, or 1 + the rank whose `failure` ended the world
  std::uint64_t verdict;                // rank 0's: what every rank's `abort` will be
  std::uint64_t claim;                  // 0, or 1 once a thread of the owner writes `failure`
  FailureRecord failure;                // what ended the owner's own patience
  alignas(64) std::uint64_t waits_for;  // WaitsFor::pack of what the owner waits for; 0: it works
  alignas(64) std::uint64_t progress;   // steps the owner has completed since the layer was made
  // The owner's alone: 1 while one of its threads looks for a culprit, and what that thread saw.
  alignas(64) std::uint64_t judging;
  Sighting sightings[kMaxRanks];
};

// One row of an expert's packed segment: where its activation is and where its result goes.
struct RowMeta {
  std::uint32_t pool_index;  // in the destination's pool; in the caller's activations if local
  std::uint32_t token;       // of the source rank
  std::uint16_t source;      // rank
  std::uint16_t k;           // slot (token, k) of the source
  float weight;              // routing weight; used by layers that scale the expert's input
};
static_assert(sizeof(RowMeta) == 16);

// What the ranks must agree on. All offsets follow from it.
struct LayoutParams {
  int num_ranks = 1;
  int num_experts = 0;
  int top_k = 0;
  int hidden = 0;
  int max_tokens = 0;       // per rank and call
  int cells_per_token = 0;  // top_k, + 1 with a shared expert
  int element_bytes = 0;    // of cells, and of activations on the wire unless they are quantised
  bool quantised = false;   // activations travel as FP8 codes and their scales
  TileShape tile;
};

// Sizes on the host and pointers anywhere, from the same offsets.
class HeapLayout {
 public:
  HeapLayout() = default;
  SWITCHYARD_HOST_DEVICE constexpr explicit HeapLayout(const LayoutParams& params) : p_(params) {
    const std::uint64_t ranks = u(p_.num_ranks);
    const std::uint64_t tokens = u(p_.max_tokens);
    const int most_local = experts().max_count();
    const std::uint64_t slots_per_token = u(p_.top_k < most_local ? p_.top_k : most_local);
    max_rows_ = ranks * tokens * slots_per_token;
    max_tiles_ = u(most_local) + max_rows_ / u(p_.tile.max_height);

    std::uint64_t at = sizeof(Control);
    const auto place = [&at](std::uint64_t bytes) {
      // Page-aligned regions: what a pass does not use of one is never committed.
      constexpr std::uint64_t kPage = 4096;
      const std::uint64_t offset = round_up(at, kPage);
      at = offset + bytes;
      return offset;
    };
    counts_row_bytes_ = round_up<std::uint64_t>(
        sizeof(std::uint64_t) + sizeof(std::uint32_t) * (u(p_.num_experts) + ranks), 64);
    counts_ = place(2 * ranks * counts_row_bytes_);
    arrived_ = place(max_tiles_ * ranks * sizeof(std::uint64_t));
    finished_ = place(ranks * max_tiles_ * sizeof(std::uint64_t));
    rows_ = place(max_rows_ * sizeof(RowMeta));
    pool_ = place(ranks * tokens * token_bytes());
    cells_ = place(tokens * u(p_.cells_per_token) * cell_bytes());
    bytes_ = round_up<std::uint64_t>(at, 4096);
  }

  SWITCHYARD_HOST_DEVICE constexpr const LayoutParams& params() const { return p_; }
  SWITCHYARD_HOST_DEVICE constexpr ExpertPartition experts() const {
    return {p_.num_experts, p_.num_ranks};
  }
  // A token on its way to the experts: its values, or its codes and from scale_offset() on a float
  // for every kQuantGroup of them.
  SWITCHYARD_HOST_DEVICE constexpr std::uint64_t token_bytes() const {
    if (!p_.quantised) return cell_bytes();
    const std::uint64_t scales = u(ceil_div(p_.hidden, kQuantGroup)) * sizeof(float);
    return round_up(scale_offset() + scales, kVectorBytes);
  }
  SWITCHYARD_HOST_DEVICE constexpr std::uint64_t scale_offset() const {
    return round_up(u(p_.hidden), kVectorBytes);
  }
  // An expert's output for a token.
  SWITCHYARD_HOST_DEVICE constexpr std::uint64_t cell_bytes() const {
    return u(p_.hidden) * u(p_.element_bytes);
  }
  SWITCHYARD_HOST_DEVICE constexpr std::uint64_t max_rows() const { return max_rows_; }
  SWITCHYARD_HOST_DEVICE constexpr std::uint64_t max_tiles() const { return max_tiles_; }
  // The address space of one rank's heap at the declared maxima.
  SWITCHYARD_HOST_DEVICE constexpr std::uint64_t bytes() const { return bytes_; }

  // What one pass really uses of one rank's heap.
  SWITCHYARD_HOST_DEVICE constexpr std::uint64_t bytes_used(std::uint64_t tokens,
                                                            std::uint64_t pool_tokens,
                                                            std::uint64_t rows,
                                                            std::uint64_t tiles) const {
    const std::uint64_t ranks = u(p_.num_ranks);
    return sizeof(Control) + 2 * ranks * counts_row_bytes_ +
           2 * tiles * ranks * sizeof(std::uint64_t) + rows * sizeof(RowMeta) +
           pool_tokens * token_bytes() + tokens * u(p_.cells_per_token) * cell_bytes();
  }

  // Regions of a heap that starts at `base`.
  SWITCHYARD_HOST_DEVICE Control* control(std::byte* base) const {
    return reinterpret_cast<Control*>(base);
  }
  // A row of the counts matrix: the epoch it is of, then c(source, e) for all experts, then
  // U(source, d) for all ranks.
  SWITCHYARD_HOST_DEVICE std::uint64_t* counts_epoch(std::byte* base, std::uint64_t epoch,
                                                     int source) const {
    return reinterpret_cast<std::uint64_t*>(
        base + counts_ + ((epoch & 1) * u(p_.num_ranks) + u(source)) * counts_row_bytes_);
  }
  SWITCHYARD_HOST_DEVICE std::uint32_t* counts(std::byte* base, std::uint64_t epoch,
                                               int source) const {
    return reinterpret_cast<std::uint32_t*>(counts_epoch(base, epoch, source) + 1);
  }
  SWITCHYARD_HOST_DEVICE std::uint64_t* arrived(std::byte* base, std::uint64_t tile,
                                                int source) const {
    return reinterpret_cast<std::uint64_t*>(base + arrived_) + tile * u(p_.num_ranks) + u(source);
  }
  SWITCHYARD_HOST_DEVICE std::uint64_t* finished(std::byte* base, int owner,
                                                 std::uint64_t tile) const {
    return reinterpret_cast<std::uint64_t*>(base + finished_) + u(owner) * max_tiles_ + tile;
  }
  SWITCHYARD_HOST_DEVICE RowMeta* rows(std::byte* base) const {
    return reinterpret_cast<RowMeta*>(base + rows_);
  }
  SWITCHYARD_HOST_DEVICE std::byte* pool(std::byte* base, std::uint64_t index) const {
    return base + pool_ + index * token_bytes();
  }
  SWITCHYARD_HOST_DEVICE std::byte* cell(std::byte* base, std::uint64_t token,
                                         std::uint64_t k) const {
    return base + cells_ + (token * u(p_.cells_per_token) + k) * cell_bytes();
  }

 private:
  static constexpr std::uint64_t kVectorBytes = 16;  // what is moved at a time
  SWITCHYARD_HOST_DEVICE static constexpr std::uint64_t u(int value) {
    return static_cast<std::uint64_t>(value);
  }

  LayoutParams p_;
  std::uint64_t max_rows_ = 0, max_tiles_ = 0, counts_row_bytes_ = 0, counts_ = 0, arrived_ = 0,
                finished_ = 0, rows_ = 0, pool_ = 0, cells_ = 0, bytes_ = 0;
};

// All ranks' heaps as this rank maps them. Trivially copyable, so that a kernel can take it.
struct Heaps {
  HeapLayout layout;
  int rank = 0;
  std::byte* base[kMaxRanks] = {};

  SWITCHYARD_HOST_DEVICE int size() const { return layout.params().num_ranks; }
  SWITCHYARD_HOST_DEVICE std::byte* mine() const { return base[rank]; }
  SWITCHYARD_HOST_DEVICE Control* control(int of) const { return layout.control(base[of]); }
};

}  // namespace switchyard::protocol
