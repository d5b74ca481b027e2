#include "machine/description.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/plural.h"
#include "gpu/device.h"
#include "machine/host.h"

namespace switchyard::machine {

std::string describe_machine(Backend backend, int ranks) {
  if (backend == Backend::kCpu) {
    return fmt::format("{}, {}", cpu_name(), plural(hardware_threads(), "hardware thread"));
  }
  const gpu::DeviceInfo info = gpu::device_info(gpu::current_device());
  const int used = std::min(ranks, gpu::device_count());
  return fmt::format("{}{}, {}, CUDA {}.{}", used == 1 ? "" : fmt::format("{} x ", used), info.name,
                     plural(info.num_sms, "SM"), info.driver_version / 1000,
                     info.driver_version % 1000 / 10);
}

std::string_view processor_of(std::string_view description) {
  const std::size_t digits = description.find_first_not_of("0123456789");
  constexpr std::string_view kTimes = " x ";
  if (digits != 0 && digits != std::string_view::npos &&
      description.substr(digits).starts_with(kTimes)) {
    description.remove_prefix(digits + kTimes.size());
  }
  return description.substr(0, description.find(", "));
}

}  // namespace switchyard::machine
