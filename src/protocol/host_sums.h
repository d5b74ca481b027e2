// The region where a host's ranks sum the results that they have for one token of another host, so
// that one row crosses for them all.
//
// The region follows the heap of the gateway (network/hosts.h), the rank that takes what the
// token's rank sends to this host. All ranks of the host reach it. Nobody waits there: a rank
// stores its rows, and marks them done. The rank that marks the last of a token's rows sums them,
// in the order of k, and sends the sum before it raises its own flags. The token's rank waits for
// the flags of all its experts' ranks, as it does without sums. Among these is the flag of the rank
// that has sent the sum. So sums add no flag, no wait and no credit.
//
//   region     index                   written by
//   slots      [source][token]         the source: a bit for each k whose expert is on this host
//   done       [source][token]         the owners of these experts: a bit for each stored row
//   weights    [source][token][k]      the source (layer), or the expert's owner (exchange)
//   rows       [source][token][k]      the expert's owner
//
// A source writes here again, or causes others to, when it has the flags of all that it sent. Every
// rank that looks at its words does so before it raises its flag. Each window stands for itself: a
// layer has one. An exchange has two, as its heap (exchange_heap.h): by the parity of the dispatch
// for `slots`, and of the combine for all else.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "protocol/atomics.h"
#include "protocol/partition.h"

namespace switchyard::protocol {

class HostSums {
 public:
  struct Shape {
    int num_sources = 0;  // the most that any rank is the gateway of; 0: nothing is summed
    int windows = 1;
    std::uint64_t max_tokens = 0;  // of a source
    std::uint64_t max_slots = 0;
    std::uint64_t rows_bytes = 0;  // of all slots' rows of a source

    // Has room for both, which are of the same world. Layers of different shapes may work in it
    // one after the other: the parts of sources are those of the whole (heap.h).
    static constexpr Shape largest(const Shape& a, const Shape& b) {
      const auto greatest = [](auto x, auto y) { return x < y ? y : x; };
      return {greatest(a.num_sources, b.num_sources), greatest(a.windows, b.windows),
              greatest(a.max_tokens, b.max_tokens), greatest(a.max_slots, b.max_slots),
              greatest(a.rows_bytes, b.rows_bytes)};
    }
    bool operator==(const Shape&) const = default;
  };

  // The part of one source in one window.
  struct Part {
    std::uint32_t* slots;
    std::uint32_t* done;
    float* weights;
    std::byte* rows;

    // Marks rows of the token that are there, a bit for each k. Returns true if `all` are: then all
    // ranks' rows can be read, and the word is ready for the next pass.
    bool complete(std::uint64_t token, std::uint32_t mine, std::uint32_t all) const {
      // Acquire and release: the rank that marks the last rows sees the others', as with
      // fetch_add().
      const std::uint32_t before =
          SystemAtomic<std::uint32_t>(done[token]).fetch_or(mine, order::memory_order_acq_rel);
      if ((before | mine) != all) return false;
      // Relaxed: the source sends this token's next rows when it has seen flags that follow.
      store_relaxed(done + token, std::uint32_t{0});
      return true;
    }
  };

  HostSums() = default;
  // The region begins behind `first` bytes of a heap.
  HostSums(const Shape& shape, std::uint64_t first)
      : sources_(static_cast<std::uint64_t>(shape.num_sources)),
        max_tokens_(shape.max_tokens),
        max_slots_(shape.max_slots),
        rows_bytes_(round_up<std::uint64_t>(shape.rows_bytes, 64)) {
    const std::uint64_t parts = sources_ * static_cast<std::uint64_t>(shape.windows);
    std::uint64_t at = first;
    const auto place = [&at](std::uint64_t bytes) {
      const std::uint64_t offset = bytes == 0 ? at : round_up<std::uint64_t>(at, 1024);
      at = offset + bytes;
      return offset;
    };
    slots_ = place(parts * max_tokens_ * sizeof(std::uint32_t));
    done_ = place(parts * max_tokens_ * sizeof(std::uint32_t));
    weights_ = place(parts * max_slots_ * sizeof(float));
    rows_ = place(parts * rows_bytes_);
    end_ = at;
  }

  explicit operator bool() const { return sources_ != 0; }
  // The bytes of the heap with this region. `done` words must be zero at first, as fresh memory is.
  std::uint64_t end() const { return end_; }

  // `source`: its place among the sources of the heap's rank.
  Part part(std::byte* base, int source, std::uint64_t window = 0) const {
    const std::uint64_t i = window * sources_ + static_cast<std::uint64_t>(source);
    return {reinterpret_cast<std::uint32_t*>(base + slots_) + i * max_tokens_,
            reinterpret_cast<std::uint32_t*>(base + done_) + i * max_tokens_,
            reinterpret_cast<float*>(base + weights_) + i * max_slots_,
            base + rows_ + i * rows_bytes_};
  }

 private:
  std::uint64_t sources_ = 0, max_tokens_ = 0, max_slots_ = 0, rows_bytes_ = 0;
  std::uint64_t slots_ = 0, done_ = 0, weights_ = 0, rows_ = 0, end_ = 0;
};

}  // namespace switchyard::protocol
