// The contents of a chunk: a header, then records, each of which says what to store where in the
// heaps of the receiving host's ranks.
//
// The receiver applies chunks of one sender and lane in the order of their numbers, and the records
// of a chunk in order. So a flag that was written after its data is raised after its data, whatever
// order the network brought the chunks in. Everything here comes from another host, so the reader
// takes nothing for granted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace switchyard::network {

// A place in the heap of a rank.
struct Target {
  std::uint64_t offset = 0;
  std::int32_t rank = 0;
  std::int32_t reserved = 0;
};
static_assert(sizeof(Target) == 16, "no padding: every byte of it is sent");

// A 32-bit word and its place.
struct Store {
  std::uint64_t offset = 0;
  std::int32_t rank = 0;
  std::uint32_t value = 0;
};
static_assert(sizeof(Store) == 16, "no padding: every byte of it is sent");

struct ChunkHeader {
  std::uint64_t number = 0;  // of the chunk among those of its sender and lane, from 0
  // Puts of rows of the sender and lane that must have come before the chunk is applied: those that
  // were started before it was closed. So a flag is raised behind them, too.
  std::uint64_t rows = 0;
  std::uint32_t bytes = 0;  // with this header
  std::uint32_t magic = kMagic;
  std::uint64_t reserved = 0;

  static constexpr std::uint32_t kMagic = 0x6b68'6373;  // "schk", little-endian
};
static_assert(sizeof(ChunkHeader) == 32);

enum class RecordKind : std::uint32_t {
  kCopy,    // `bytes` go to each target
  kWords,   // as kCopy, in 64-bit words, each of which is a flag by itself
  kStores,  // `bytes` of Stores; no targets. Each is stored with release
};

struct RecordHeader {
  RecordKind kind = RecordKind::kCopy;
  std::uint32_t segment = 0;      // which heap of the ranks
  std::uint32_t bytes = 0;        // of the payload
  std::uint32_t num_targets = 0;  // targets follow, then the payload, padded to 16 bytes
};
static_assert(sizeof(RecordHeader) == 16);

constexpr std::size_t padded(std::size_t bytes) { return (bytes + 15) / 16 * 16; }

// Fills a chunk.
class ChunkWriter {
 public:
  ChunkWriter() = default;
  // An empty chunk.
  ChunkWriter(std::span<std::byte> memory, std::uint64_t number);

  bool is_open() const { return !memory_.empty(); }
  bool has_records() const { return used_ > sizeof(ChunkHeader); }
  std::uint32_t bytes() const { return static_cast<std::uint32_t>(used_); }

  // The most payload bytes that a record with so many targets can have here; 0 if it has no room.
  std::size_t room(std::size_t num_targets) const;
  // `bytes` must not exceed room(). Targets are those of the payload's first byte, advanced by
  // `skipped` bytes.
  void add(RecordKind kind, std::uint32_t segment, std::span<const Target> targets,
           std::uint64_t skipped, const void* payload, std::size_t bytes);
  // Writes the header.
  void finish(std::uint64_t rows);

 private:
  std::span<std::byte> memory_;
  std::uint64_t number_ = 0;
  std::size_t used_ = 0;
};

// Where the receiver stores.
class Landing {
 public:
  virtual ~Landing() = default;
  // The first byte of [offset, offset + bytes) of the rank's heap. Null if the heap was given up,
  // which is no error: a late record has nowhere to go. `fault` gets a text if no such place ever
  // was.
  virtual std::byte* at(std::uint32_t segment, const Target& target, std::uint64_t bytes,
                        std::string& fault) = 0;
};

// ChunkHeader::rows of a chunk that has arrived.
std::uint64_t rows_before(std::span<const std::byte> memory);

// Applies the records of a chunk of `memory`, which must be number `number` of its sender and lane.
// Returns what is wrong with it, or nothing. Records before the fault are stored.
std::string apply(std::span<const std::byte> memory, std::uint64_t number, Landing& landing);

}  // namespace switchyard::network
