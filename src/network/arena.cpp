#include "network/arena.h"

#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "base/posix.h"
#include "switchyard/error.h"

namespace switchyard::network {
namespace {

// Bytes in front of the windows: the target of signals, which need one on some networks.
constexpr std::uint64_t kScratchBytes = 64;

}  // namespace

void check(const WindowOptions& options) {
  const auto refuse = [](const char* what, std::uint32_t value, std::uint32_t least,
                         std::uint32_t most) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is {}; use {} to {}", what, value, least, most));
  };
  if (options.chunk_bytes < WindowOptions::kLeastChunk ||
      options.chunk_bytes > WindowOptions::kMostChunk) {
    refuse("the network's chunk_bytes", options.chunk_bytes, WindowOptions::kLeastChunk,
           WindowOptions::kMostChunk);
  }
  if (options.chunk_bytes % 64 != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the network's chunk_bytes is {}; use a multiple of 64", options.chunk_bytes));
  }
  if (options.window < 1 || options.window > WindowOptions::kMostWindow) {
    refuse("the network's window", options.window, 1, WindowOptions::kMostWindow);
  }
}

Arena::Arena(const Hosts& hosts, int rank, const WindowOptions& options)
    : chunk_bytes_(options.chunk_bytes),
      window_bytes_(std::uint64_t{options.chunk_bytes} * options.window) {
  check(options);
  bytes_ = kScratchBytes + hosts.sources_of(rank).size() * kNumLanes * window_bytes_;
  for (int host = 0; host < hosts.num_hosts(); ++host) {
    outgoing_.push_back(bytes_);
    if (host != hosts.host_of(rank)) bytes_ += kNumLanes * window_bytes_;
  }
  void* const memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(
        ErrorCode::kCapacityExceeded,
        fmt::format("cannot map {} bytes for the windows of {} other hosts: {}; use smaller "
                    "chunks or windows",
                    bytes_, hosts.num_hosts() - 1, errno_text(errno)));
  }
  data_ = static_cast<std::byte*>(memory);
}

Arena::~Arena() { ::munmap(data_, bytes_); }

std::uint64_t Arena::window_at(const Hosts& hosts, const WindowOptions& options, int receiver,
                               int sender, Lane lane) {
  const std::vector<int> sources = hosts.sources_of(receiver);
  const auto place = static_cast<std::uint64_t>(std::find(sources.begin(), sources.end(), sender) -
                                                sources.begin());
  return kScratchBytes + (place * kNumLanes + static_cast<std::uint64_t>(lane)) *
                             options.chunk_bytes * options.window;
}

}  // namespace switchyard::network
