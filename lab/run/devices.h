// Chooses the GPU of a rank, and how many of its multiprocessors the rank uses.
#pragma once

#include <optional>
#include <string>

#include "fabric/environment.h"

namespace switchyard::run {

struct RankDevice {
  int device = 0;
  int reserved_sms = 0;  // CudaOptions::reserved_sms
};

// Chooses the GPU of rank `local_rank` of `num_ranks`. Ranks are dealt to the GPUs of this machine
// in turn. Without `reserved_sms`, a rank leaves free all but its part of the GPU. Throws
// Error{kUnsupported} if there is no GPU.
RankDevice rank_device(int local_rank, int num_ranks, std::optional<int> reserved_sms);

// Returns how many of the `num_sms` multiprocessors of `device` a rank leaves free for the other
// ranks that use it. A kernel that waits for another rank's kernel keeps its multiprocessors. So
// the kernels of all ranks of a GPU must fit on it at the same time.
int sms_of_others(int num_sms, int device, int num_ranks, int num_devices);

// Returns this process's number among those of its host. It is the first of LOCAL_RANK,
// OMPI_COMM_WORLD_LOCAL_RANK, MPI_LOCALRANKID and SLURM_LOCALID that is set. If none is, it is
// `rank`. Throws Error{kInvalidArgument} if the value is not a number.
int local_rank(const EnvironmentLookup& lookup, int rank);

// Describes the devices in words: "GPU 0 (NVIDIA H200, 132 of 132 SMs)", "GPUs 0 to 3 (NVIDIA H200,
// 66 of 132 SMs for each rank)".
std::string describe_devices(const RankDevice& of_one_rank, int num_ranks);

}  // namespace switchyard::run
