// How this host's ranks sum the rows that they have for tokens of a rank of another host
// (protocol/host_sums.h), in layers and exchanges.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/rank_link.h"
#include "protocol/control.h"
#include "protocol/host_sums.h"

namespace switchyard::cpu {

// The rows of a token in the order of k, and their weights.
struct Summands {
  const void* rows[protocol::kMaxTopK];
  float weights[protocol::kMaxTopK];
  int count = 0;

  void add(const void* row, float weight) {
    rows[count] = row;
    weights[count++] = weight;
  }
};

// The shape of an engine's region, whose rows have `row_bytes`.
inline protocol::HostSums::Shape host_sums_shape(const network::Hosts& hosts, int windows,
                                                 int max_tokens, int top_k,
                                                 std::uint64_t row_bytes) {
  protocol::HostSums::Shape shape;
  shape.num_sources = hosts.max_sources();
  shape.windows = windows;
  shape.max_tokens = static_cast<std::uint64_t>(max_tokens);
  shape.max_slots = shape.max_tokens * static_cast<std::uint64_t>(top_k);
  shape.rows_bytes = shape.max_slots * row_bytes;
  return shape;
}

// Writes the sum of rows of `hidden` elements to the targets.
template <typename To>
void send_sum(To& to, const Summands& rows, DType dtype, int hidden) {
  const std::size_t bytes = static_cast<std::size_t>(hidden) * size_of(dtype);
  to.make(bytes, [&](std::byte* sum) {
    kernels().combine(rows.rows, rows.weights, rows.count, dtype, sum, dtype, hidden, 1, false);
  });
}

// The sums for one source.
class HostSum {
 public:
  HostSum(const protocol::HostSums::Part& part, int top_k, std::size_t row_bytes)
      : part_(part), top_k_(static_cast<std::size_t>(top_k)), row_bytes_(row_bytes) {}

  // The slots of a token on this host, as its source says: a bit for each k.
  std::uint32_t slots(std::uint32_t token) const { return part_.slots[token]; }
  std::byte* row(std::uint32_t token, std::uint32_t k) const {
    return part_.rows + slot(token, k) * row_bytes_;
  }
  // Stores the rows `mine` of a token, and their weights.
  void store(std::uint32_t token, std::uint32_t mine, const Summands& rows) const {
    int i = 0;
    for_each_k(mine, [&](std::uint32_t k) {
      std::memcpy(row(token, k), rows.rows[i], row_bytes_);
      part_.weights[slot(token, k)] = rows.weights[i++];
    });
  }
  // Marks the rows `mine` of a token as stored. Returns true if `all` are: then this rank sends
  // their sum, and `rows` has all of them; `weighted`: with their weights.
  bool complete(std::uint32_t token, std::uint32_t mine, std::uint32_t all, bool weighted,
                Summands& rows) const {
    if (!part_.complete(token, mine, all)) return false;
    rows.count = 0;
    for_each_k(all, [&](std::uint32_t k) {
      rows.add(row(token, k), weighted ? part_.weights[slot(token, k)] : 1.0f);
    });
    return true;
  }

 private:
  template <typename Visit>
  static void for_each_k(std::uint32_t slots, Visit&& visit) {
    for (; slots != 0; slots &= slots - 1) {
      visit(static_cast<std::uint32_t>(std::countr_zero(slots)));
    }
  }
  std::size_t slot(std::uint32_t token, std::uint32_t k) const { return token * top_k_ + k; }

  protocol::HostSums::Part part_;
  std::size_t top_k_;
  std::size_t row_bytes_;
};

}  // namespace switchyard::cpu
