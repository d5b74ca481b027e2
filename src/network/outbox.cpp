#include "network/outbox.h"

#include <algorithm>
#include <utility>

namespace switchyard::network {
namespace {

// A shorter piece of a payload waits for the next chunk: its header would cost as much.
constexpr std::size_t kLeastPiece = 256;

}  // namespace

Outbox::Outbox(const Arena& arena, const WindowOptions& options, const Place& place,
               CommandRing& ring, std::function<void()> wake)
    : arena_(arena),
      window_(options.window),
      chunk_bytes_(options.chunk_bytes),
      place_(place),
      ring_(ring),
      wake_(std::move(wake)),
      sent_(options.window) {}

bool Outbox::has_slot() const {
  return next_.load(std::memory_order_relaxed) <
         released_.load(std::memory_order_acquire) + window_;
}

bool Outbox::may_append() const { return is_open_.load(std::memory_order_acquire) || has_slot(); }

bool Outbox::open() {
  if (!has_slot()) return false;
  const std::uint64_t number = next_.load(std::memory_order_relaxed);
  chunk_ = ChunkWriter(arena_.chunk(place_.from + number % window_ * chunk_bytes_), number);
  next_.store(number + 1, std::memory_order_relaxed);
  is_open_.store(true, std::memory_order_release);
  return true;
}

void Outbox::close() {
  chunk_.finish(rows_.load(std::memory_order_acquire));
  const std::uint64_t slot = (next_.load(std::memory_order_relaxed) - 1) % window_;
  Command command;
  command.from = place_.from + slot * chunk_bytes_;
  command.to = place_.to + slot * chunk_bytes_;
  command.bytes = chunk_.bytes();
  Immediate immediate = place_.immediate;
  immediate.value = static_cast<std::uint32_t>(slot);
  command.immediate = immediate.pack();
  command.rank = place_.gateway;
  command.outbox = place_.number;
  command.context = slot;
  bytes_sent_.fetch_add(command.bytes, std::memory_order_relaxed);
  chunk_ = {};
  is_open_.store(false, std::memory_order_release);
  ring_.push(command);
  wake_();
}

bool Outbox::append(RecordKind kind, std::uint32_t segment, std::span<const Target> targets,
                    const void* payload, std::size_t bytes, std::size_t& done) {
  const std::lock_guard lock(mutex_);
  while (done < bytes) {
    if (!chunk_.is_open() && !open()) return false;
    const std::size_t left = bytes - done;
    const std::size_t room = chunk_.room(targets.size());
    if (room < left && room < kLeastPiece && chunk_.has_records()) {
      close();
      continue;
    }
    const std::size_t piece = std::min(left, room);
    chunk_.add(kind, segment, targets, done, static_cast<const std::byte*>(payload) + done, piece);
    done += piece;
  }
  return true;
}

void Outbox::flush() {
  const std::lock_guard lock(mutex_);
  if (chunk_.is_open() && chunk_.has_records()) close();
}

void Outbox::sent(std::uint32_t slot) {
  sent_[slot] = true;
  release();
}

bool Outbox::credited(std::uint32_t chunks) {
  if (credits_ + chunks > next_.load(std::memory_order_relaxed)) return false;
  credits_ += chunks;
  release();
  return true;
}

void Outbox::release() {
  std::uint64_t released = released_.load(std::memory_order_relaxed);
  while (released < credits_ && sent_[released % window_]) {
    sent_[released % window_] = false;
    ++released;
  }
  released_.store(released, std::memory_order_release);
}

bool Outbox::is_idle() const {
  return released_.load(std::memory_order_acquire) == next_.load(std::memory_order_relaxed);
}

}  // namespace switchyard::network
