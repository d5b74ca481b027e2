// A network carries bytes from one host to another. Each rank has one object, used by its proxy
// thread only.
//
// A put writes into memory of another rank and brings a 32-bit number, its immediate, with it. When
// the receiver gets the immediate, the bytes of the same put are there. Nothing is assumed of the
// order of two puts, because networks give none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace switchyard::network {

struct Event {
  enum class Kind : std::uint8_t {
    kSent,     // the source of the put with `context` may be written again
    kArrived,  // a put with `immediate` of some rank is complete here
    kLost,     // nothing more comes from or goes to `rank`
  };
  Kind kind = Kind::kSent;
  int rank = -1;  // kLost; -1 where the network cannot tell
  std::uint32_t immediate = 0;
  std::uint64_t context = 0;
  std::string why;  // kLost
};

using Blob = std::vector<std::byte>;

// A rank tells others this of a region of its memory, so that they can put bytes there.
struct RegionKey {
  std::uint64_t key = 0;
  std::uint64_t base = 0;  // 0 where remote addresses are offsets
};

// Copies `bytes` from offset `from` of a region of this rank to offset `to` of one of `rank`.
struct Put {
  int rank = 0;
  std::uint32_t region = 0;
  std::uint64_t from = 0;
  std::uint32_t bytes = 0;
  std::optional<RegionKey> key{};  // of the other rank's region; none: its first
  std::uint64_t to = 0;
  std::uint32_t immediate = 0;
  std::uint64_t context = 0;
};

class Network {
 public:
  virtual ~Network() = default;

  // Registers memory that puts of this rank read, or that those of others write. Regions number
  // from 0 on; the first, for which address() says where it is, comes before address(), and stays.
  // The memory is the caller's until remove(). `dmabuf`: a descriptor of the memory if it is a
  // device's, which needs takes_device_memory(); -1: host memory. Throws Error{kSystem}.
  virtual std::uint32_t add(std::span<std::byte> memory, int dmabuf = -1) = 0;
  virtual void remove(std::uint32_t region) = 0;
  virtual RegionKey key(std::uint32_t region) = 0;
  virtual bool takes_device_memory() const = 0;

  // The data that others need to reach this rank: the same number of bytes on every rank.
  virtual Blob address() = 0;
  // `by_rank`: the addresses of all ranks, in order; empty ones are not connected to.
  virtual void connect(std::span<const Blob> by_rank) = 0;
  // Keeps strangers out: from now on this rank takes no connection. Call it when a message of every
  // rank that this one talks to has come, and has gone to it. Networks without ports do nothing.
  virtual void refuse_connections() {}

  // Starts to copy. The source must stay as it is until kSent with the put's context. Returns false
  // if the queue is full: poll(), and try again.
  virtual bool put(const Put& put) = 0;
  // Sends an immediate without bytes. It has no kSent.
  virtual bool signal(int rank, std::uint32_t immediate) = 0;

  // Fills in the events that happened, and returns their number.
  virtual std::size_t poll(std::span<Event> events) = 0;

  // A descriptor that becomes readable when poll() has something to tell; -1: there is none, and
  // the proxy looks now and then.
  virtual int wait_fd() const = 0;
  // Call it right before waiting for the descriptor. False: poll() first.
  virtual bool may_sleep() = 0;

  virtual std::string name() const = 0;
};

// Options of the windows between two ranks. Both numbers are the same on all ranks.
struct WindowOptions {
  // Bytes that cross at once. A window's chunks are as many as may be on their way between two
  // ranks, in each direction and lane; chunk times window should exceed bandwidth times round-trip
  // time (1 MB at 50 GB/s and 20 us).
  std::uint32_t chunk_bytes = 256 << 10;
  std::uint32_t window = 4;

  static constexpr std::uint32_t kLeastChunk = 2 << 10, kMostChunk = 1 << 30;
  static constexpr std::uint32_t kMostWindow = 1 << 15;
};

// Throws Error{kInvalidArgument} naming the value that makes no sense.
void check(const WindowOptions& options);

// The contents of an immediate: 2 bits of kind, 14 of the sender's rank, 16 of a slot or a number.
struct Immediate {
  enum class Kind : std::uint8_t {
    kDispatchChunk,  // `value`: the window's slot that was written; kRows: a put of rows came
    kCombineChunk,
    // `value`: so many chunks were read, and their slots are free; or a greeting.
    kDispatchCredit,
    kCombineCredit,
  };
  static constexpr std::uint32_t kRows = 1 << 15;  // above all slots
  // Values of kDispatchCredit above all numbers of credits, by which two ranks find out that both
  // directions between them work.
  static constexpr std::uint32_t kGreeting = 0xfffe, kAnswer = 0xffff;
  static_assert(WindowOptions::kMostWindow < kGreeting);
  Kind kind;
  int source;
  std::uint32_t value;

  constexpr std::uint32_t pack() const {
    return static_cast<std::uint32_t>(kind) << 30 | static_cast<std::uint32_t>(source) << 16 |
           value;
  }
  static constexpr Immediate unpack(std::uint32_t word) {
    return {static_cast<Kind>(word >> 30), static_cast<int>(word >> 16 & 0x3fff), word & 0xffff};
  }
};

// True if this build can join several hosts.
bool is_built_in();
// Throws Error{kUnsupported} unless is_built_in(), with the packages that are missing.
void require_built_in();

// Describes the library, its version, and its providers that reach other hosts; or says why there
// are none.
std::string describe();

// Reaches ranks through libfabric. `local_address` is the IP address of this host that the others
// reach; providers that have addresses of their own do not use it. FI_PROVIDER chooses among
// providers, as everywhere in libfabric. Throws Error{kSystem} if no provider is there, and what
// require_built_in() throws.
std::unique_ptr<Network> make_libfabric(const std::string& local_address);

}  // namespace switchyard::network
