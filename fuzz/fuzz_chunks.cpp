// Chunks and control messages as another host may send them: whatever the bytes are, nothing is
// stored outside the heaps of this host's ranks.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "network/control_channel.h"
#include "network/records.h"

namespace {

namespace network = switchyard::network;

constexpr int kRanks = 3;

// Heaps of the size that the input asks for, each an allocation of its own, so that
// AddressSanitizer sees any byte beside it.
class Heaps final : public network::Landing {
 public:
  explicit Heaps(std::size_t words) {
    for (auto& heap : heaps_) heap.resize(words);
  }
  std::byte* at(std::uint32_t segment, const network::Target& target, std::uint64_t bytes,
                std::string& fault) override {
    if (segment > 1) fault = "a heap that never was";
    if (segment != 1) return nullptr;
    const bool is_rank = target.rank >= 0 && target.rank < kRanks;
    const std::size_t size = is_rank ? heaps_[static_cast<std::size_t>(target.rank)].size() * 8 : 0;
    if (!is_rank || target.offset > size || bytes > size - target.offset) {
      fault = "outside";
      return nullptr;
    }
    return reinterpret_cast<std::byte*>(heaps_[static_cast<std::size_t>(target.rank)].data()) +
           target.offset;
  }

 private:
  std::array<std::vector<std::uint64_t>, kRanks> heaps_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::size_t words = data[0];
  // A copy at the address that a window's slot would have.
  std::vector<std::uint64_t> aligned((size - 1 + 7) / 8 + 1);
  std::memcpy(aligned.data(), data + 1, size - 1);
  const std::span<const std::byte> chunk(reinterpret_cast<const std::byte*>(aligned.data()),
                                         size - 1);
  Heaps heaps(words);
  network::apply(chunk, 0, heaps);

  std::array<std::byte, sizeof(network::ControlMessage)> message{};
  std::memcpy(message.data(), data + 1, std::min(message.size(), size - 1));
  const auto read = network::read_control_message(message.data(), kRanks);
  if (read && read->kind == network::ControlMessage::Kind::kAbort) {
    const auto failed = static_cast<std::int64_t>(read->word & 0xffff'ffffu) - 1;
    if (failed < 0 || failed >= kRanks) std::abort();
  }
  if (read && read->kind == network::ControlMessage::Kind::kPropose) {
    const int accused = read->record.peer;
    if (accused < 0 || accused >= kRanks) std::abort();
  }
  return 0;
}
