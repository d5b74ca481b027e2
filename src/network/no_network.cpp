// A build without libfabric or without OpenSSL: worlds of one host only.
#include "network/network.h"
#include "network/secret.h"
#include "switchyard/error.h"

namespace switchyard::network {

bool is_built_in() { return false; }

void require_built_in() {
  throw Error(ErrorCode::kUnsupported,
              "this build of Switchyard joins ranks of one host only: libfabric or OpenSSL was "
              "missing; install libfabric-dev, libssl-dev and pkg-config and build again, or start "
              "all ranks on one host");
}

std::string describe() { return "none: built without libfabric or OpenSSL"; }

std::unique_ptr<Network> make_libfabric(const std::string&) {
  require_built_in();
  return nullptr;
}

Digest hmac(const Secret&, std::span<const std::byte>) {
  require_built_in();
  return {};
}

bool equal(const Digest&, const Digest&) {
  require_built_in();
  return false;
}

}  // namespace switchyard::network
