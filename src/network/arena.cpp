#include "network/arena.h"

#include <fmt/core.h>

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
  std::uint64_t bytes = kScratchBytes + hosts.sources_of(rank).size() * kNumLanes * window_bytes_;
  for (int host = 0; host < hosts.num_hosts(); ++host) {
    outgoing_.push_back(bytes);
    if (host != hosts.host_of(rank)) bytes += kNumLanes * window_bytes_;
  }
  memory_ = Mapping::anonymous(bytes, "use smaller chunks or windows between hosts");
}

std::uint64_t Arena::window_at(const Hosts& hosts, const WindowOptions& options, int receiver,
                               int sender, Lane lane) {
  const auto place =
      static_cast<std::uint64_t>(hosts.source_index(sender, hosts.host_of(receiver)));
  return kScratchBytes + (place * kNumLanes + static_cast<std::uint64_t>(lane)) *
                             options.chunk_bytes * options.window;
}

}  // namespace switchyard::network
