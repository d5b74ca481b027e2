// Exchange on the GPU: not there yet, and every exchange that is asked for says so.
#include "exchange/engine.h"
#include "switchyard/error.h"

namespace switchyard::gpu {

std::unique_ptr<ExchangeEngine> make_exchange(const World&, const ExchangeProblem&,
                                              const ExchangeOptions&) {
  throw Error(ErrorCode::kUnsupported,
              "there are no exchanges on GPUs in this build; use Backend::kCpu");
}

}  // namespace switchyard::gpu
