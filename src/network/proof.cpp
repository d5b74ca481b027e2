#include <fmt/core.h>
#include <sys/stat.h>

#include <cctype>
#include <cstring>

#include "base/posix.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "network/secret.h"
#include "switchyard/error.h"

namespace switchyard::network {
namespace {

constexpr const char* kRemedy =
    "put at least 16 random characters into a file that only you can read, such as `umask 077; "
    "openssl rand -hex 32 > secret`, and set SWITCHYARD_SECRET_FILE to its name on every rank";

Secret bytes_of(std::string_view text) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
  return Secret(bytes, bytes + text.size());
}

}  // namespace

Nonce random_nonce() {
  Nonce nonce;
  fill_random(nonce.data(), nonce.size(), "a rank's proof");
  return nonce;
}

Secret secret_from_environment(const std::function<const char*(const char*)>& lookup) {
  std::string text;
  std::string source = "SWITCHYARD_SECRET";
  if (const char* const path = lookup("SWITCHYARD_SECRET_FILE"); path != nullptr && *path != 0) {
    source = fmt::format("the file {} (SWITCHYARD_SECRET_FILE)", printable(path));
    struct stat status {};
    if (::stat(path, &status) == 0 && (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
      throw Error(ErrorCode::kInvalidFile,
                  fmt::format("other users can read or write {}; run `chmod 600` on it", source));
    }
    constexpr std::size_t kMostBytes = 4096;
    text = read_named(path, kMostBytes);
  } else if (const char* const value = lookup("SWITCHYARD_SECRET"); value != nullptr) {
    text = value;
  }
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())) != 0) {
    text.pop_back();
  }
  if (text.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("ranks on several hosts need a shared secret, and neither "
                            "SWITCHYARD_SECRET_FILE nor SWITCHYARD_SECRET has one; {}",
                            kRemedy));
  }
  if (text.size() < kLeastSecretBytes) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the secret of {} has {} bytes; {}", source, text.size(), kRemedy));
  }
  return bytes_of(text);
}

Secret secret_of(std::string_view given, const std::function<const char*(const char*)>& lookup) {
  if (given.empty()) return secret_from_environment(lookup);
  if (given.size() < kLeastSecretBytes) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("the secret of the world's options has {} bytes; use at least {} random "
                    "ones, the same on all ranks",
                    given.size(), kLeastSecretBytes));
  }
  return bytes_of(given);
}

Digest prove(const Secret& secret, Side side, const Opening& opening, const Nonce& listeners) {
  std::vector<std::byte> text(sizeof side + sizeof opening + sizeof listeners);
  std::memcpy(text.data(), &side, sizeof side);
  std::memcpy(text.data() + sizeof side, &opening, sizeof opening);
  std::memcpy(text.data() + sizeof side + sizeof opening, &listeners, sizeof listeners);
  return hmac(secret, text);
}

bool is_opening(const Opening& opening, std::uint32_t version) {
  return opening.magic == Opening::kMagic && opening.version == version;
}

}  // namespace switchyard::network
