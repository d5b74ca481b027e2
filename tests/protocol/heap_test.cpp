// The symmetric heap: no two ranks write the same bytes of a third one's.
#include "protocol/heap.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace switchyard::protocol {
namespace {

Heap::Shape small_shape(int ranks, int experts, int max_tokens, bool scaled) {
  Heap::Shape shape;
  shape.num_ranks = ranks;
  shape.num_experts = experts;
  shape.hidden = 272;
  shape.max_tokens = max_tokens;
  shape.element_bytes = scaled ? 1 : 2;
  shape.scaled = scaled;
  shape.weighs_input = !scaled;
  shape.cell_bytes = static_cast<std::uint64_t>(max_tokens) * 2 * 272 * 2;
  shape.few_hidden = 272;
  return shape;
}

// Bytes that were claimed, and by whom.
class Claims {
 public:
  explicit Claims(std::uint64_t size) : memory_(size) {}

  std::byte* base() { return memory_.data(); }

  void claim(const void* begin, std::uint64_t bytes, int writer) {
    const auto from =
        static_cast<std::uint64_t>(static_cast<const std::byte*>(begin) - memory_.data());
    ASSERT_LE(from + bytes, memory_.size());
    const auto after = ends_.upper_bound(from);
    if (after != ends_.end()) {
      ASSERT_LE(from + bytes, after->second.begin) << "by " << writer;
    }
    ASSERT_TRUE(ends_.emplace(from + bytes, Claim{from, writer}).second);
  }

 private:
  struct Claim {
    std::uint64_t begin;
    int writer;
  };
  std::map<std::uint64_t, Claim> ends_;  // by where they end
  std::vector<std::byte> memory_;
};

TEST(HeapTest, EveryByteHasOneWriter) {
  for (const bool scaled : {false, true}) {
    for (const int ranks : {2, 3, 8}) {
      for (const int experts : {2, 7, 24}) {
        const Heap::Shape shape = small_shape(ranks, experts, 5, scaled);
        const Heap heap(shape);
        const ExpertPartition partition{experts, ranks};
        const auto of_owner = static_cast<std::uint32_t>(partition.max_count());
        Claims claims(heap.bytes());
        std::byte* const base = claims.base();
        claims.claim(base, sizeof(Control), 0);
        for (int source = 0; source < ranks; ++source) {
          for (const std::uint64_t epoch : {4, 5}) {
            // Two at a time.
            const auto pairs = static_cast<std::uint64_t>(ceil_div(experts, 2));
            claims.claim(heap.counts(epoch, source).in(base), 16 * pairs, source);
          }
        }
        for (std::uint32_t distance = 1; distance < static_cast<std::uint32_t>(ranks); ++distance) {
          const int source = static_cast<int>(distance);
          for (std::uint32_t e = 0; e < of_owner; ++e) {
            claims.claim(heap.arrived(e, distance).in(base), 4, source);
            claims.claim(heap.entries(e, distance).in(base), 4 * 5, source);
            if (shape.weighs_input) claims.claim(heap.weights(e, distance).in(base), 4 * 5, source);
          }
          for (std::uint32_t token = 0; token < 5; ++token) {
            claims.claim(heap.pool(distance, token).in(base), heap.token_bytes(), source);
          }
        }
        for (int source = 1; source < ranks; ++source) {
          claims.claim(heap.ahead(source).in(base), 4, source);
        }
        for (std::uint32_t e = 0; e < static_cast<std::uint32_t>(experts); ++e) {
          claims.claim(heap.finished(e).in(base), 4, 0);
        }
        claims.claim(heap.cells().in(base), shape.cell_bytes, 0);
        const auto rows = static_cast<std::uint32_t>(kMostFewRows / ranks);
        for (std::uint32_t row = 0; row < rows * static_cast<std::uint32_t>(ranks); ++row) {
          const int source = static_cast<int>(row / rows);
          for (const std::uint64_t epoch : {4, 5}) {
            claims.claim((heap.few_slots(epoch) + 2 * row * 8).in(base), 8 * 16, source);
            claims.claim(heap.few_row(epoch, row).in(base), 272 / 2 * 8, source);
          }
          claims.claim(heap.few_sums(row).in(base), 272 * 8, source);
        }
      }
    }
  }
}

TEST(HeapTest, FlagsComeFirst) {
  const Heap heap(small_shape(4, 10, 8, true));
  std::vector<std::byte> memory(heap.bytes());
  std::byte* const base = memory.data();
  const auto offset = [&](const void* p) {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(p) - base);
  };
  EXPECT_LT(offset(heap.counts(1, 3).in(base) + 9), heap.flag_bytes());
  EXPECT_LT(offset(heap.arrived(2, 3).in(base)), heap.flag_bytes());
  EXPECT_LT(offset(heap.ahead(3).in(base)), heap.flag_bytes());
  EXPECT_LT(offset(heap.finished(9).in(base)), heap.flag_bytes());
  EXPECT_LE(offset((heap.few_sums(kMostFewRows - 1) + 272).in(base)), heap.flag_bytes());
  EXPECT_GE(offset(heap.entries(0, 1).in(base)), heap.flag_bytes());
}

TEST(HeapTest, QuantisedTokensAreCodesThenScales) {
  for (const int hidden : {8, 40, 128, 136, 7168}) {
    Heap::Shape shape = small_shape(2, 8, 4, false);
    shape.hidden = hidden;
    const auto columns = static_cast<std::uint64_t>(hidden);
    EXPECT_EQ(Heap(shape).token_bytes(), round_up<std::uint64_t>(2 * columns, 16));
    shape.element_bytes = 1;
    shape.scaled = true;
    const Heap heap(shape);
    EXPECT_EQ(heap.token_bytes() % 16, 0u);
    EXPECT_EQ(heap.scale_offset() % 16, 0u);
    EXPECT_GE(heap.scale_offset(), columns);
    EXPECT_GE(heap.token_bytes(), heap.scale_offset() + ceil_div<std::uint64_t>(columns, 128) * 4);
    EXPECT_LT(heap.token_bytes(), columns + columns / 32 + 40);
  }
}

TEST(HeapTest, UsedBytesNeverExceedTheReservation) {
  for (const int ranks : {1, 2, 5}) {
    for (const bool scaled : {false, true}) {
      const Heap::Shape shape = small_shape(ranks, 16, 33, scaled);
      const Heap heap(shape);
      const auto others = static_cast<std::uint64_t>(ranks - 1);
      const auto of_owner = static_cast<std::uint64_t>(ceil_div(16, ranks));
      EXPECT_LE(heap.bytes_used(others * 33, others * 33 * of_owner, shape.cell_bytes),
                heap.bytes());
      EXPECT_LT(heap.bytes_used(0, 0, 0), heap.bytes());
    }
  }
}

TEST(SlotEntry, KeepsTokenAndK) {
  for (const std::uint32_t token : {0u, 1u, 8191u, (1u << 27) - 1}) {
    for (const std::uint32_t k : {0u, 7u, static_cast<std::uint32_t>(kMaxTopK) - 1}) {
      EXPECT_EQ(SlotEntry::token(SlotEntry::pack(token, k)), token);
      EXPECT_EQ(SlotEntry::k(SlotEntry::pack(token, k)), k);
    }
  }
}

// DeepSeek-V4-Flash's geometry on 8 ranks with 8192 tokens each, in FP8: less than the 700 MiB that
// the smallest of the fused rivals takes.
TEST(HeapTest, IsAsLargeAsWhatMayArrive) {
  Heap::Shape shape;
  shape.num_ranks = 8;
  shape.num_experts = 256;
  shape.hidden = 4096;
  shape.max_tokens = 8192;
  shape.element_bytes = 1;
  shape.scaled = true;
  shape.cell_bytes = std::uint64_t{8192} * 6 * 4096 * 2;
  constexpr std::uint64_t kMiB = 1 << 20;
  EXPECT_EQ(Heap(shape).bytes() / kMiB, 622u);
  // A world of one needs nothing but cells.
  shape.num_ranks = 1;
  EXPECT_LT(Heap(shape).bytes() - shape.cell_bytes, 8192u);
}

}  // namespace
}  // namespace switchyard::protocol
