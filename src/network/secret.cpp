#include "network/secret.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "switchyard/error.h"

namespace switchyard::network {

Digest hmac(const Secret& secret, std::span<const std::byte> text) {
  Digest digest;
  unsigned int bytes = 0;
  if (::HMAC(::EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
             reinterpret_cast<const unsigned char*>(text.data()), text.size(),
             reinterpret_cast<unsigned char*>(digest.data()), &bytes) == nullptr ||
      bytes != digest.size()) {
    throw Error(ErrorCode::kSystem,
                "OpenSSL cannot compute HMAC-SHA256; is its configuration restricted?");
  }
  return digest;
}

bool equal(const Digest& a, const Digest& b) {
  return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace switchyard::network
