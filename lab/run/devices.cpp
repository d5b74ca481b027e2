#include "run/devices.h"

#include <fmt/core.h>

#include <algorithm>

#include "base/plural.h"
#include "base/printable.h"
#include "common/numbers.h"
#include "gpu/device.h"
#include "switchyard/error.h"

namespace switchyard::run {

RankDevice rank_device(int local_rank, int num_ranks, std::optional<int> reserved_sms) {
  const int num_devices = gpu::device_count();
  RankDevice mine;
  mine.device = num_devices > 0 ? local_rank % num_devices : gpu::current_device();
  mine.reserved_sms = reserved_sms ? *reserved_sms
                                   : sms_of_others(gpu::device_info(mine.device).num_sms,
                                                   mine.device, num_ranks, num_devices);
  return mine;
}

int sms_of_others(int num_sms, int device, int num_ranks, int num_devices) {
  const int ranks_there = num_ranks / num_devices + (device < num_ranks % num_devices ? 1 : 0);
  if (ranks_there <= 1) return 0;
  // A pair of blocks needs neighbouring multiprocessors. The blocks of other ranks may leave one
  // multiprocessor of each GPC without a neighbour.
  constexpr int kParted = 8;
  return num_sms - std::max(2, num_sms / ranks_there - kParted);
}

int local_rank(const EnvironmentLookup& lookup, int rank) {
  for (const char* const name :
       {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"}) {
    const char* const text = lookup(name);
    if (text == nullptr) continue;
    const std::optional<std::int64_t> value = parse_whole(text);
    if (value && *value >= 0 && *value <= 1 << 20) return static_cast<int>(*value);
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}='{}' in the environment; it must be the number of this process "
                            "among those of its host",
                            name, printable(text)));
  }
  return rank;
}

std::string describe_devices(const RankDevice& of_one_rank, int num_ranks) {
  const gpu::DeviceInfo info = gpu::device_info(of_one_rank.device);
  const int used = std::min(num_ranks, gpu::device_count());
  const std::string which =
      used == 1 ? fmt::format("GPU {}", of_one_rank.device) : fmt::format("GPUs 0 to {}", used - 1);
  return fmt::format("{} ({}, {} of {}{})", which, info.name,
                     info.num_sms - of_one_rank.reserved_sms, plural(info.num_sms, "SM"),
                     num_ranks == 1 ? "" : " for each rank");
}

}  // namespace switchyard::run
