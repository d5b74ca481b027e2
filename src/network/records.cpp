#include "network/records.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>

#include "protocol/atomics.h"

namespace switchyard::network {
namespace {

template <typename T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

}  // namespace

ChunkWriter::ChunkWriter(std::span<std::byte> memory, std::uint64_t number)
    : memory_(memory), number_(number), used_(sizeof(ChunkHeader)) {}

std::size_t ChunkWriter::room(std::size_t num_targets) const {
  const std::size_t around = sizeof(RecordHeader) + num_targets * sizeof(Target);
  const std::size_t left = memory_.size() - std::min(memory_.size(), used_);
  // Payloads end at multiples of 16 bytes.
  return left <= around ? 0 : (left - around) / 16 * 16;
}

void ChunkWriter::add(RecordKind kind, std::uint32_t segment, std::span<const Target> targets,
                      std::uint64_t skipped, const void* payload, std::size_t bytes) {
  std::byte* to = memory_.data() + used_;
  const auto append = [&to](const void* from, std::size_t count) {
    std::memcpy(to, from, count);
    to += count;
  };
  const RecordHeader header{kind, segment, static_cast<std::uint32_t>(bytes),
                            static_cast<std::uint32_t>(targets.size())};
  append(&header, sizeof header);
  for (Target target : targets) {
    target.offset += skipped;
    append(&target, sizeof target);
  }
  append(payload, bytes);
  // Memory of earlier passes is not sent.
  std::memset(to, 0, padded(bytes) - bytes);
  used_ += sizeof header + targets.size_bytes() + padded(bytes);
}

void ChunkWriter::finish(std::uint64_t rows) {
  ChunkHeader header;
  header.number = number_;
  header.rows = rows;
  header.bytes = bytes();
  std::memcpy(memory_.data(), &header, sizeof header);
}

std::uint64_t rows_before(std::span<const std::byte> memory) {
  return memory.size() < sizeof(ChunkHeader) ? 0 : read<ChunkHeader>(memory.data()).rows;
}

std::string apply(std::span<const std::byte> memory, std::uint64_t number, Landing& landing) {
  if (memory.size() < sizeof(ChunkHeader)) return "a chunk without a header";
  const auto chunk = read<ChunkHeader>(memory.data());
  if (chunk.magic != ChunkHeader::kMagic) return "a chunk of another protocol";
  if (chunk.number != number) {
    return fmt::format("chunk {} in the place of chunk {}", chunk.number, number);
  }
  if (chunk.bytes < sizeof chunk || chunk.bytes > memory.size()) {
    return fmt::format("a chunk of {} bytes in a slot of {}", chunk.bytes, memory.size());
  }
  std::string fault;
  std::size_t at = sizeof chunk;
  while (at < chunk.bytes) {
    const std::size_t left = chunk.bytes - at;
    if (left < sizeof(RecordHeader)) return fmt::format("{} bytes behind the last record", left);
    const auto record = read<RecordHeader>(memory.data() + at);
    const std::uint64_t length =
        sizeof record + std::uint64_t{record.num_targets} * sizeof(Target) + padded(record.bytes);
    if (length > left) {
      return fmt::format("a record of {} bytes, where {} are left", length, left);
    }
    const std::byte* const targets = memory.data() + at + sizeof record;
    const std::byte* const payload = targets + record.num_targets * sizeof(Target);
    switch (record.kind) {
      case RecordKind::kCopy:
      case RecordKind::kWords:
        for (std::uint32_t t = 0; t < record.num_targets; ++t) {
          const auto target = read<Target>(targets + t * sizeof(Target));
          const bool words = record.kind == RecordKind::kWords;
          if (words && (target.offset % 8 != 0 || record.bytes % 8 != 0)) {
            return fmt::format("{} bytes of words for offset {}", record.bytes, target.offset);
          }
          std::byte* const to = landing.at(record.segment, target, record.bytes, fault);
          if (!fault.empty()) return fault;
          if (to == nullptr) continue;
          if (!words) {
            std::memcpy(to, payload, record.bytes);
            continue;
          }
          for (std::size_t i = 0; i < record.bytes; i += sizeof(std::uint64_t)) {
            // Release: a word says that what this rank stored before is there.
            protocol::store_release(reinterpret_cast<std::uint64_t*>(to + i),
                                    read<std::uint64_t>(payload + i));
          }
        }
        break;
      case RecordKind::kStores:
        if (record.num_targets != 0 || record.bytes % sizeof(Store) != 0) {
          return fmt::format("{} bytes of stores with {} targets", record.bytes,
                             record.num_targets);
        }
        for (std::size_t i = 0; i < record.bytes; i += sizeof(Store)) {
          const auto store = read<Store>(payload + i);
          if (store.offset % 4 != 0) return fmt::format("a store at offset {}", store.offset);
          std::byte* const to =
              landing.at(record.segment, {store.offset, store.rank, 0}, sizeof store.value, fault);
          if (!fault.empty()) return fault;
          // Release, because it may be a flag; stores that are none cost no more for it.
          if (to != nullptr) {
            protocol::store_release(reinterpret_cast<std::uint32_t*>(to), store.value);
          }
        }
        break;
      default: return fmt::format("a record of kind {}", static_cast<std::uint32_t>(record.kind));
    }
    at += length;
  }
  return "";
}

}  // namespace switchyard::network
