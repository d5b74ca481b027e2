// The commands of a rank's threads to its proxy: a ring of lines that many write and one reads.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>

namespace switchyard::network {

// One line, so that a device can write it in one transaction.
struct alignas(64) Command {
  std::uint64_t from = 0;  // offset in this rank's memory
  std::uint64_t to = 0;    // offset in the memory of `rank`
  std::uint32_t bytes = 0;
  std::uint32_t immediate = 0;
  std::int32_t rank = 0;
  std::uint32_t outbox = 0;
  std::uint64_t context = 0;
  // 1 + the ticket that the line was written for. Written last.
  std::uint64_t turn = 0;
};
static_assert(sizeof(Command) == 64);

// A chunk has at most one command under way: its slot is used again only after its credit, and the
// credit follows the put. So a ring with a line for every slot is never full, and a writer never
// waits.
class CommandRing {
 public:
  explicit CommandRing(std::uint64_t slots)
      : mask_(std::bit_ceil(slots < 2 ? 2 : slots) - 1),
        lines_(std::make_unique<Command[]>(mask_ + 1)) {}

  // Any thread may call it.
  void push(const Command& command) {
    // Acquire and release: that a line is free was seen by the writer of some earlier ticket.
    const std::uint64_t ticket = tail_.fetch_add(1, std::memory_order_acq_rel);
    Command& line = lines_[ticket & mask_];
    line.from = command.from;
    line.to = command.to;
    line.bytes = command.bytes;
    line.immediate = command.immediate;
    line.rank = command.rank;
    line.outbox = command.outbox;
    line.context = command.context;
    // The proxy that sees the turn sees the line, and the chunk that it speaks of. Sequentially
    // consistent, because the writer then looks if the proxy sleeps, and the proxy looks here after
    // it has said so: one of them sees the other.
    std::atomic_ref(line.turn).store(ticket + 1, std::memory_order_seq_cst);
  }

  // The proxy calls it.
  bool pop(Command& command) {
    if (empty()) return false;
    command = lines_[head_ & mask_];
    ++head_;
    return true;
  }
  bool empty() const {
    return std::atomic_ref(lines_[head_ & mask_].turn).load(std::memory_order_seq_cst) != head_ + 1;
  }

 private:
  std::uint64_t mask_;
  std::unique_ptr<Command[]> lines_;
  alignas(64) std::atomic<std::uint64_t> tail_{0};
  alignas(64) std::uint64_t head_ = 0;
};

}  // namespace switchyard::network
