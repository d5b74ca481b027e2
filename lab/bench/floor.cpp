#include "bench/floor.h"

#include <fmt/core.h>

#include "base/join.h"
#include "base/plural.h"
#include "base/printable.h"
#include "switchyard/error.h"

namespace switchyard::bench {

FloorChoice choose_floor(const std::string& gpu, int num_gpus, int ranks, DType compute,
                         std::optional<machine::GpuFacts> given) {
  if (given && given->gpu != gpu) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--machine-facts are of '{}', but the GPU here is '{}'; give the facts "
                            "of this one, or leave the option out",
                            printable(given->gpu), printable(gpu)));
  }
  if (ranks > num_gpus) {
    return {{},
            fmt::format("no floor: {} share {}, and a floor is a whole GPU's; give "
                        "each rank its own",
                        plural(ranks, "rank"), plural(num_gpus, "GPU"))};
  }
  FloorChoice choice{.facts = given ? std::move(given) : machine::known_gpu_facts(gpu)};
  if (!choice.facts) {
    choice.why_not = fmt::format(
        "no floor: the roofs of {} are not known here; measure them, write them to a file as "
        "'switchyard bench --help' shows, and give it with --machine-facts",
        printable(gpu));
    return choice;
  }
  const std::vector<std::string> missing = machine::missing_roofs(*choice.facts, compute, ranks);
  if (!missing.empty()) {
    choice.why_not = fmt::format(
        "no floor: the facts of {} have no {}; add what is missing to the file of --machine-facts",
        printable(gpu), join(missing, ", "));
    choice.facts.reset();
  }
  return choice;
}

std::optional<double> links_floor_us(double bytes, int ranks, int num_gpus) {
  constexpr double kFlagUs = 1.37, kBytesPerUs = 330e3;
  if (ranks < 2 || num_gpus < ranks) return {};
  return 2 * kFlagUs + bytes / kBytesPerUs;
}

}  // namespace switchyard::bench
