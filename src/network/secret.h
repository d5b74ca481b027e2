// How two processes on different hosts prove to each other that they are of the same world: each
// answers the other's random number with an HMAC-SHA256 under a secret that both have. The secret
// itself never travels.
//
//   joiner   -> listener   Opening: magic, version, rank, size, nonce
//   listener -> joiner     Challenge: nonce, and its proof over both nonces, rank, size, version
//   joiner   -> listener   Answer: the joiner's proof over the same
//
// Proofs of the two sides differ by a word, so that neither can be sent back as the other's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::network {

using Secret = std::vector<std::byte>;
using Digest = std::array<std::byte, 32>;
using Nonce = std::array<std::byte, 32>;

inline constexpr std::size_t kLeastSecretBytes = 16;

// HMAC-SHA256, by OpenSSL.
Digest hmac(const Secret& secret, std::span<const std::byte> text);
// Takes a time that does not depend on where they differ.
bool equal(const Digest& a, const Digest& b);

Nonce random_nonce();  // throws Error{kSystem}

// The secret of this process's environment: the contents of the file that SWITCHYARD_SECRET_FILE
// names, or SWITCHYARD_SECRET itself. White space at the end does not count. Throws
// Error{kInvalidArgument} if neither is set, or the secret is shorter than kLeastSecretBytes, and
// Error{kInvalidFile} if the file cannot be read or others may read it.
Secret secret_from_environment(const std::function<const char*(const char*)>& lookup);
// `given` as it is, or if that is empty secret_from_environment(). Throws Error{kInvalidArgument}
// if it is shorter than kLeastSecretBytes.
Secret secret_of(std::string_view given, const std::function<const char*(const char*)>& lookup);

// The messages, as they lie in memory; both ends are little-endian, which the magic number shows.
struct Opening {
  std::uint64_t magic = kMagic;
  std::uint32_t version = 0;
  std::uint32_t purpose = 0;  // of the connection
  std::int32_t rank = 0;
  std::int32_t size = 0;
  Nonce nonce{};

  static constexpr std::uint64_t kMagic = 0x6e65'706f'7374'7773;  // "swtsopen", little-endian
};
static_assert(sizeof(Opening) == 56, "no padding: every byte of it is sent");

struct Challenge {
  Nonce nonce{};
  Digest proof{};
};
static_assert(sizeof(Challenge) == 64);

struct Answer {
  Digest proof{};
};

enum class Side : std::uint32_t { kListener = 1, kJoiner };
Digest prove(const Secret& secret, Side side, const Opening& opening, const Nonce& listeners);

// True if a process that speaks this version may be at the other end.
bool is_opening(const Opening& opening, std::uint32_t version);

}  // namespace switchyard::network
