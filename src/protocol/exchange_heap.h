// The symmetric heap of an exchange: where everything is, and who may write it.
//
// As in the layer's heap (heap.h) every region is cut by source rank, so that a source can write
// its part knowing nothing of the others. In one call no two ranks write the same word:
//
//   region     index                      written by s
//   counts     [parity][s][expert of d]   its rows of each expert, the call's number in every word
//   arrived    [parity][s]                the call's number, and that of the dispatch whose rows
//                                         these are, when all entries and tokens came
//   header     [parity][s]                two words, early: as `arrived`; and how many tokens s has
//   part_arrived  [parity][s][part]       as `arrived`, when kPartTokens tokens of s came, with
//                                         entries. Only GPUs have headers and parts, for blocks
//                                         that do not wait for all tokens; no call depends on them
//   returned   [parity][s]                the call's number, when all cells that s computes came
//   entries    [parity][s][position]      the slot of each row, sorted by expert, then by slot; on
//                                         GPUs by token, each with room for the most it can have
//   pool       [parity][s][position]      tokens of s that have an expert of d, each once; on GPUs
//                                         the position is the token's number
//   cells      [parity][token][k]         results of d's tokens, by the owner of the slot's expert
//   control    own words only; but see abort_world
//
// Dispatches are numbered from 1, and so are combines; the parity is that of this number. Two
// windows are enough, and nothing else keeps ranks apart. A rank sends dispatch n + 2 when it has
// received dispatch n + 1, for which it has waited for a flag of every rank, even of those that
// sent it nothing. A rank raises its flags of dispatch n + 1 after it has received dispatch n. So
// nobody still reads the window that dispatch n + 2 is written to. The same holds for combines.
// Flags are compared for equality: a flag is raised again, in the same window, only after its
// earlier number was waited for.
#pragma once

#include <cstddef>
#include <cstdint>

#include "protocol/control.h"
#include "protocol/heap.h"
#include "protocol/partition.h"

namespace switchyard::protocol {

// A row as its source describes it.
struct ExchangeEntry {
  std::uint32_t slot;      // a SlotEntry of the source
  std::uint32_t position;  // of its token among those that the source sends to this rank
  float weight;
};

// A flag's word, or a count's in the lower half. The upper half says of which call it is.
SWITCHYARD_HOST_DEVICE constexpr std::uint64_t numbered(std::uint64_t call, std::uint64_t value) {
  return std::uint64_t{flag_of(call)} << 32 | (value & 0xffff'ffffu);
}
SWITCHYARD_HOST_DEVICE constexpr bool is_of(std::uint64_t word, std::uint64_t call) {
  return word >> 32 == flag_of(call);
}

// The layout of such a heap. Trivially copyable, for kernels.
class ExchangeHeap {
 public:
  struct Shape {
    int num_ranks = 1;
    int most_experts = 0;  // the most of any rank
    int max_tokens = 0;
    int top_k = 0;
    std::uint64_t code_bytes = 0;    // of a token, without scales
    std::uint64_t scale_bytes = 0;   // of a token's scales
    std::uint64_t result_bytes = 0;  // of a row of results
    // The bytes of a row as its source describes it. An engine may have entries of its own.
    std::uint64_t entry_bytes = sizeof(ExchangeEntry);
  };

  ExchangeHeap() = default;
  explicit ExchangeHeap(const Shape& shape)
      : num_ranks_(u(shape.num_ranks)), max_tokens_(u(shape.max_tokens)), top_k_(u(shape.top_k)) {
    const std::uint64_t slots =
        u(shape.top_k < shape.most_experts ? shape.top_k : shape.most_experts);
    counts_row_ = round_up<std::uint64_t>(u(shape.most_experts), 16);
    list_ = max_tokens_ * slots;
    scale_offset_ = round_up<std::uint64_t>(shape.code_bytes, 16);
    token_bytes_ = scale_offset_ + round_up<std::uint64_t>(shape.scale_bytes, 16);
    cell_bytes_ = round_up<std::uint64_t>(shape.result_bytes, 16);
    std::uint64_t at = sizeof(Control);
    const auto place = [&at](std::uint64_t bytes) {
      const std::uint64_t offset = round_up<std::uint64_t>(at, 1024);
      at = offset + bytes;
      return offset;
    };
    counts_ = place(2 * num_ranks_ * counts_row_ * sizeof(std::uint64_t));
    arrived_ = place(2 * num_ranks_ * kFlagBytes);
    returned_ = place(2 * num_ranks_ * kFlagBytes);
    headers_ = place(2 * num_ranks_ * kFlagBytes);
    parts_ = ceil_div<std::uint64_t>(max_tokens_, kPartTokens);
    part_arrived_ = place(2 * num_ranks_ * parts_ * kFlagBytes);
    entry_bytes_ = shape.entry_bytes;
    entries_ = place(2 * num_ranks_ * list_ * entry_bytes_);
    pool_ = place(2 * num_ranks_ * max_tokens_ * token_bytes_);
    cells_ = place(2 * max_tokens_ * top_k_ * cell_bytes_);
    bytes_ = at;
  }

  std::uint64_t bytes() const { return bytes_; }
  // The bytes, from the start, that must be zero before the first call.
  std::uint64_t flag_bytes() const { return entries_; }
  std::uint64_t list() const { return list_; }  // the most entries of one source
  static constexpr std::uint32_t kPartTokens = 64;
  SWITCHYARD_HOST_DEVICE std::uint64_t scale_offset() const { return scale_offset_; }

  // Regions for call number `call` of its kind.
  SWITCHYARD_HOST_DEVICE Region<std::uint64_t> counts(std::uint64_t call, int source) const {
    return Region<std::uint64_t>{counts_} + part(call, source) * counts_row_;
  }
  SWITCHYARD_HOST_DEVICE Region<std::uint64_t> arrived(std::uint64_t call, int source) const {
    return {arrived_ + part(call, source) * kFlagBytes};
  }
  SWITCHYARD_HOST_DEVICE Region<std::uint64_t> returned(std::uint64_t call, int source) const {
    return {returned_ + part(call, source) * kFlagBytes};
  }
  // A header lies at a 16-byte boundary.
  SWITCHYARD_HOST_DEVICE Region<std::uint64_t> header(std::uint64_t call, int source) const {
    return {headers_ + part(call, source) * kFlagBytes};
  }
  SWITCHYARD_HOST_DEVICE Region<std::uint64_t> part_arrived(std::uint64_t call, int source,
                                                            std::uint64_t token) const {
    return {part_arrived_ + (part(call, source) * parts_ + token / kPartTokens) * kFlagBytes};
  }
  template <typename Entry = ExchangeEntry>
  SWITCHYARD_HOST_DEVICE Region<Entry> entries(std::uint64_t call, int source) const {
    return Region<Entry>{entries_} + part(call, source) * list_;
  }
  SWITCHYARD_HOST_DEVICE Region<std::byte> pool(std::uint64_t call, int source,
                                                std::uint64_t position) const {
    return {pool_ + (part(call, source) * max_tokens_ + position) * token_bytes_};
  }
  SWITCHYARD_HOST_DEVICE Region<std::byte> cell(std::uint64_t call, std::uint64_t token,
                                                std::uint64_t k) const {
    const std::uint64_t first = (call & 1) * max_tokens_;
    return {cells_ + ((first + token) * top_k_ + k) * cell_bytes_};
  }

 private:
  // Each flag has a line of its own: its reader polls it while other ranks write theirs.
  static constexpr std::uint64_t kFlagBytes = 64;

  SWITCHYARD_HOST_DEVICE static constexpr std::uint64_t u(int value) {
    return static_cast<std::uint64_t>(value);
  }
  SWITCHYARD_HOST_DEVICE std::uint64_t part(std::uint64_t call, int source) const {
    return (call & 1) * num_ranks_ + u(source);
  }

  std::uint64_t num_ranks_ = 0, max_tokens_ = 0, top_k_ = 0;
  std::uint64_t counts_row_ = 0;  // words of one source
  std::uint64_t list_ = 0;        // entries of one source
  std::uint64_t entry_bytes_ = 0;
  std::uint64_t scale_offset_ = 0, token_bytes_ = 0, cell_bytes_ = 0;
  std::uint64_t parts_ = 0;  // parts of one source's tokens
  std::uint64_t counts_ = 0, arrived_ = 0, returned_ = 0, headers_ = 0, part_arrived_ = 0,
                entries_ = 0, pool_ = 0, cells_ = 0, bytes_ = 0;
};

}  // namespace switchyard::protocol
