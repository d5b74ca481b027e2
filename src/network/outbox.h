// The records that a rank sends to another host in one lane. The rank's threads pack them into
// chunks, and its proxy sends these as the window allows.
//
// A chunk's slot here stands for one slot of the receiver's window. It is written again only when
// its own put has left and its own credit has come: the receiver reads chunks in order, so the n-th
// credit is that of chunk n, whatever order credits come in.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "network/arena.h"
#include "network/records.h"
#include "network/ring.h"

namespace switchyard::network {

class Outbox {
 public:
  struct Place {
    int gateway = 0;           // the rank that takes the chunks
    std::uint32_t number = 0;  // of this outbox among those of the rank
    std::uint64_t from = 0;    // offset of the slots in this rank's arena
    std::uint64_t to = 0;      // offset of the window in the gateway's
    Immediate immediate;       // `value` is the slot
  };

  Outbox(const Arena& arena, const WindowOptions& options, const Place& place, CommandRing& ring,
         std::function<void()> wake);

  int gateway() const { return place_.gateway; }

  // Appends payloads from `done` bytes on, and advances `done`. Returns true when all is appended,
  // and false when there is no room: wait until may_append(), and go on. The rank's threads call
  // it, and the next three.
  bool append(RecordKind kind, std::uint32_t segment, std::span<const Target> targets,
              const void* payload, std::size_t bytes, std::size_t& done);
  // Sends what is appended, although the chunk has room for more.
  void flush();
  // True if append() can go on.
  bool may_append() const;
  // So many puts of rows are started: records that are appended from now on are applied behind
  // them.
  void count_rows(std::uint64_t puts) { rows_.fetch_add(puts, std::memory_order_release); }

  // The proxy calls the following.
  void sent(std::uint32_t slot);
  // Returns false if that many chunks were not sent.
  bool credited(std::uint32_t chunks);
  // Every chunk that was sent has been read by its receiver.
  bool is_idle() const;
  std::uint64_t bytes_sent() const { return bytes_sent_.load(std::memory_order_relaxed); }

 private:
  bool has_slot() const;
  bool open();   // returns false without a free slot
  void close();  // hands the chunk to the proxy
  void release();

  const Arena& arena_;
  const std::uint32_t window_, chunk_bytes_;
  const Place place_;
  CommandRing& ring_;
  const std::function<void()> wake_;

  std::mutex mutex_;
  ChunkWriter chunk_;                   // the one that is being filled
  std::atomic<bool> is_open_{false};    // chunk_ is; a waiter may then add to another's chunk
  std::atomic<std::uint64_t> next_{0};  // the number of the next chunk to be opened
  // Chunks whose slots are free again. Release by the proxy, acquire by the thread that fills the
  // slot.
  std::atomic<std::uint64_t> released_{0};
  std::atomic<std::uint64_t> bytes_sent_{0};
  std::atomic<std::uint64_t> rows_{0};

  // The proxy's alone.
  std::uint64_t credits_ = 0;
  std::vector<bool> sent_;  // by slot
};

}  // namespace switchyard::network
