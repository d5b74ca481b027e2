// The symmetric heap of a layer, for both engines: where everything is, and who may write it.
//
// Conflict freedom (after the FlashDMoE thesis, theorem 5.3.1, restated for lists of exact length).
// Every region is cut by source rank. So a source can write its part without knowing anything of
// the other sources: neither counts nor offsets. Let a write be (s, d, i): rank s writes index i of
// a region of rank d's heap. In one epoch no two distinct ranks write the same (d, i):
//
//   region     index                        written by s
//   counts     [epoch parity][s][expert]    its row of the counts matrix, the epoch in every word
//   arrived    [expert of d][s]             the epoch, when all these rows' entries and tokens came
//   ahead      [s]                          the epoch, when s computes without having waited for
//                                           the counts of d (on GPUs)
//   finished   [expert]                     the epoch, when s has stored all cells of d's slots
//                                           with its expert (numbered over all ranks)
//   entries    [expert of d][s][position]   which slot (token, k) of s the row is of: a SlotEntry
//   weights    [expert of d][s][position]   its routing weight, in layers that weight the input
//   pool       [s][token]                   tokens of s that have an expert of d, each once
//   cells      [token][k]                   outputs, by the owner of the expert of slot (token, k)
//   few_slots  [epoch parity][s][token][k]  passes of few tokens on GPUs: place and routing weight
//   few_rows   [epoch parity][s][token]     such a pass's tokens, in bf16
//   few_sums   [s][token]                   rank s's part of such a pass's output, in f32
//   control    own words only; but see abort_world
//
// Only counts are doubled, and few_slots and few_rows. A pass of rank s begins when its previous
// pass has ended. That pass ended when all its cells had arrived, and the ranks that computed them
// no longer need what s had sent. So s may send for epoch n + 1 while others still work on epoch n.
// It cannot end epoch n + 1 before it has everybody's counts of that epoch, and a rank that sends
// these has ended epoch n. So no rank is lapped, there is no exit barrier, and the counts are the
// only credit. Flags are compared for equality: when a flag of epoch n + 1 arrives, no rank waits
// for that of epoch n any more. In a pass of few tokens few_slots are the credit, in place of the
// counts.
//
// Words of few_slots, few_rows and few_sums hold 32 bits of data and the flag of their epoch. So
// each shows by itself that it has arrived.
//
// Layers of different shapes may work in the same heap one after the other. Then one rank may be a
// pass ahead in another layer's layout, so what keeps ranks apart must not depend on the layout:
// the regions, and the part of each source within them, are those of the heap as it was allocated
// (within()). So a flag is always one of some earlier epoch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/quantize.h"
#include "protocol/control.h"
#include "protocol/region.h"

namespace switchyard::protocol {

// The value that flags of an epoch are raised to. Epochs count from 1, so flags in fresh memory are
// down.
SWITCHYARD_HOST_DEVICE constexpr std::uint32_t flag_of(std::uint64_t epoch) {
  return static_cast<std::uint32_t>(epoch);
}

// The most tokens and slots that all ranks of a pass of few tokens have together.
inline constexpr int kMostFewRows = 8, kMostFewSlots = 64;

// A slot (token, k) in one word.
struct SlotEntry {
  static constexpr int kBits = 5;
  static_assert(kMaxTopK <= 1 << kBits);
  SWITCHYARD_HOST_DEVICE static constexpr std::uint32_t pack(std::uint32_t token, std::uint32_t k) {
    return token << kBits | k;
  }
  SWITCHYARD_HOST_DEVICE static constexpr std::uint32_t token(std::uint32_t entry) {
    return entry >> kBits;
  }
  SWITCHYARD_HOST_DEVICE static constexpr std::uint32_t k(std::uint32_t entry) {
    return entry & ((1u << kBits) - 1);
  }
};

// The layout of a heap. Trivially copyable, for kernels. A source other than the owner is
// identified by its distance from the owner: (source - owner) modulo the number of ranks.
class Heap {
 public:
  struct Shape {
    int num_ranks = 1;
    int num_experts = 0;
    int hidden = 0;
    int max_tokens = 0;
    int element_bytes = 0;  // per element of a token
    bool scaled = false;    // tokens have a scale for every kQuantGroup columns
    bool weighs_input = false;
    std::uint64_t cell_bytes = 0;
    int few_hidden = 0;  // columns of the tokens of passes of few tokens; 0: there are none
    bool operator==(const Shape&) const = default;
  };

  Heap() = default;
  explicit Heap(const Shape& shape)
      : others_(u(shape.num_ranks - 1)),
        num_experts_(u(shape.num_experts)),
        max_tokens_(u(shape.max_tokens)),
        weighs_input_(shape.weighs_input) {
    shape_tokens(shape);
    pool_part_ = max_tokens_ * token_bytes_;
    const std::uint64_t ranks = others_ == 0 ? 0 : others_ + 1;
    const ExpertPartition experts{shape.num_experts, shape.num_ranks};
    const std::uint64_t lists = others_ * u(experts.max_count());
    std::uint64_t at = sizeof(Control);
    const auto place = [&at](std::uint64_t bytes) {
      const std::uint64_t offset = round_up<std::uint64_t>(at, 1024);
      at = offset + bytes;
      return offset;
    };
    counts_ = place(2 * ranks * counts_row_bytes());
    arrived_ = place(4 * lists);
    ahead_ = place(4 * ranks);
    finished_ = place(ranks == 0 ? 0 : 4 * num_experts_);
    few_row_bytes_ = ranks == 0 ? 0 : 4 * u(shape.few_hidden);
    few_part_ = few_row_bytes_ == 0 ? 0 : 16 * kMostFewSlots + kMostFewRows * few_row_bytes_;
    few_ = place(2 * few_part_);
    few_sums_ = place(2 * kMostFewRows * few_row_bytes_);
    entries_ = place(4 * lists * max_tokens_);
    weights_ = place(shape.weighs_input ? 4 * lists * max_tokens_ : 0);
    pool_ = place(others_ * pool_part_);
    cells_ = place(shape.cell_bytes);
    bytes_ = at;
  }

  // The bytes of a token as it travels: its activations, or codes and their scales.
  static constexpr std::uint64_t bytes_of_token(const Shape& shape) {
    if (!shape.scaled) return bytes_of_codes(shape);
    const std::uint64_t scales = u(ceil_div(shape.hidden, kQuantGroup));
    return round_up<std::uint64_t>(bytes_of_codes(shape) + 4 * scales, 16);
  }
  // The shape of a heap with room for layers of both shapes, which are of the same world.
  static Shape largest(const Shape& a, const Shape& b) {
    // The wider token is that of one of them.
    Shape shape = bytes_of_token(a) < bytes_of_token(b) ? b : a;
    shape.num_experts = greatest(a.num_experts, b.num_experts);
    shape.max_tokens = greatest(a.max_tokens, b.max_tokens);
    shape.weighs_input = a.weighs_input || b.weighs_input;
    shape.cell_bytes = greatest(a.cell_bytes, b.cell_bytes);
    shape.few_hidden = greatest(a.few_hidden, b.few_hidden);
    return shape;
  }
  // The layout of passes of a layer in the heap of a shape that is at least as large: largest() of
  // both shapes is `whole`.
  static Heap within(const Shape& whole, const Shape& shape) {
    Heap heap(whole);
    heap.shape_tokens(shape);
    heap.weighs_input_ = shape.weighs_input;
    return heap;
  }

  std::uint64_t bytes() const { return bytes_; }
  // The bytes of the heap that a pass really uses if it receives `tokens` tokens and `rows` rows of
  // other ranks and has `cell_bytes` bytes of cells.
  std::uint64_t bytes_used(std::uint64_t tokens, std::uint64_t rows,
                           std::uint64_t cell_bytes) const {
    return finished_ + (others_ == 0 ? 0 : 4 * num_experts_) + rows * entry_bytes() +
           tokens * token_bytes_ + cell_bytes;
  }
  // The bytes of a row beside its token: a SlotEntry and, in layers that weight the input, its
  // weight.
  std::uint64_t entry_bytes() const { return weighs_input_ ? 8 : 4; }
  // The bytes, from the start, that must be zero when the first pass begins; the rest may hold
  // anything.
  std::uint64_t flag_bytes() const { return entries_; }
  // The bytes of the counts that one rank sends another.
  SWITCHYARD_HOST_DEVICE std::uint64_t counts_row_bytes() const {
    return round_up<std::uint64_t>(sizeof(std::uint64_t) * num_experts_, 128);
  }
  SWITCHYARD_HOST_DEVICE std::uint64_t token_bytes() const { return token_bytes_; }
  SWITCHYARD_HOST_DEVICE std::uint64_t scale_offset() const { return scale_offset_; }

  // A row of counts has a word for every expert: c(source, e) in the lower half, and the epoch's
  // flag value in the upper. So a count shows by itself that it has arrived, and no signal has to
  // follow it.
  SWITCHYARD_HOST_DEVICE Region<std::uint64_t> counts(std::uint64_t epoch, int source) const {
    const std::uint64_t row = (epoch & 1) * (others_ + 1) + u(source);
    return {counts_ + row * counts_row_bytes()};
  }
  SWITCHYARD_HOST_DEVICE Region<std::uint32_t> arrived(std::uint32_t expert_of_owner,
                                                       std::uint32_t distance) const {
    return Region<std::uint32_t>{arrived_} + list(expert_of_owner, distance);
  }
  SWITCHYARD_HOST_DEVICE Region<std::uint32_t> ahead(int source) const {
    return Region<std::uint32_t>{ahead_} + u(source);
  }
  SWITCHYARD_HOST_DEVICE Region<std::uint32_t> finished(std::uint32_t expert) const {
    return Region<std::uint32_t>{finished_} + expert;
  }
  SWITCHYARD_HOST_DEVICE Region<std::uint32_t> entries(std::uint32_t expert_of_owner,
                                                       std::uint32_t distance) const {
    return Region<std::uint32_t>{entries_} + list(expert_of_owner, distance) * max_tokens_;
  }
  SWITCHYARD_HOST_DEVICE Region<float> weights(std::uint32_t expert_of_owner,
                                               std::uint32_t distance) const {
    return Region<float>{weights_} + list(expert_of_owner, distance) * max_tokens_;
  }
  SWITCHYARD_HOST_DEVICE Region<std::byte> pool(std::uint32_t distance, std::uint32_t token) const {
    return {pool_ + (distance - 1) * pool_part_ + token * token_bytes_};
  }
  SWITCHYARD_HOST_DEVICE Region<std::byte> cells() const { return {cells_}; }
  // Two words for each slot (row, k). Rows are numbered over all sources.
  SWITCHYARD_HOST_DEVICE Region<std::uint64_t> few_slots(std::uint64_t epoch) const {
    return {few_ + (epoch & 1) * few_part_};
  }
  // A word for every two columns.
  SWITCHYARD_HOST_DEVICE Region<std::uint64_t> few_row(std::uint64_t epoch,
                                                       std::uint32_t row) const {
    return {few_ + (epoch & 1) * few_part_ + 16 * kMostFewSlots + row * few_row_bytes_};
  }
  // A word for every column. `row`: a token of the owner, of all that one source may sum.
  SWITCHYARD_HOST_DEVICE Region<std::uint64_t> few_sums(std::uint32_t row) const {
    return {few_sums_ + 2 * row * few_row_bytes_};
  }

 private:
  SWITCHYARD_HOST_DEVICE static constexpr std::uint64_t u(int value) {
    return static_cast<std::uint64_t>(value);
  }
  template <typename T>
  static constexpr T greatest(T a, T b) {
    return a < b ? b : a;
  }
  static constexpr std::uint64_t bytes_of_codes(const Shape& shape) {
    return round_up<std::uint64_t>(u(shape.hidden * shape.element_bytes), 16);
  }
  void shape_tokens(const Shape& shape) {
    scale_offset_ = bytes_of_codes(shape);
    token_bytes_ = bytes_of_token(shape);
  }
  SWITCHYARD_HOST_DEVICE std::uint64_t list(std::uint32_t expert_of_owner,
                                            std::uint32_t distance) const {
    return expert_of_owner * others_ + distance - 1;
  }

  std::uint64_t others_ = 0, num_experts_ = 0, max_tokens_ = 0, scale_offset_ = 0, token_bytes_ = 0;
  std::uint64_t pool_part_ = 0;                     // bytes of one source
  std::uint64_t few_row_bytes_ = 0, few_part_ = 0;  // few_part_: of each parity
  std::uint64_t counts_ = 0, arrived_ = 0, ahead_ = 0, finished_ = 0, few_ = 0, few_sums_ = 0,
                entries_ = 0, weights_ = 0, pool_ = 0, cells_ = 0, bytes_ = 0;
  bool weighs_input_ = false;
};

}  // namespace switchyard::protocol
