#include "fabric/port.h"

#include <fmt/core.h>

#include <cstdint>

#include "base/posix.h"
#include "fabric/place.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

constexpr int kTrials = 200;

bool is_free(int port) {
  for (const char* const any : {"::", "0.0.0.0"}) {
    try {
      return static_cast<bool>(listen_tcp(any, port));
    } catch (const Error&) {
      // A host without IPv6 refuses every port.
    }
  }
  return false;
}

}  // namespace

int random_port() {
  std::uint32_t number = 0;
  fill_random(&number, sizeof number, "a port");
  return kFirstPort + static_cast<int>(number % kNumPorts);
}

int free_port() {
  for (int i = 0; i < kTrials; ++i) {
    if (const int port = random_port(); is_free(port)) return port;
  }
  throw Error(ErrorCode::kSystem,
              fmt::format("no free port was found among {} to {}; name one with --master-port",
                          kFirstPort, kFirstPort + kNumPorts - 1));
}

}  // namespace switchyard
