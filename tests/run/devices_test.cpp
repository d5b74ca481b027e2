// Which GPU a rank uses, as far as that can be told without one.
#include "run/devices.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "switchyard/error.h"

namespace switchyard::run {
namespace {

TEST(Devices, RanksOfOneGpuFitOnItTogether) {
  constexpr int kSms = 132;
  for (const int num_devices : {1, 2, 3, 8}) {
    for (int num_ranks = 1; num_ranks <= 16; ++num_ranks) {
      std::map<int, int> taken;
      for (int r = 0; r < num_ranks; ++r) {
        const int device = r % num_devices;
        taken[device] += kSms - sms_of_others(kSms, device, num_ranks, num_devices);
      }
      for (const auto& [device, sms] : taken) {
        // No rank uses the SMs that do not divide evenly, nor those that may lack a neighbour in
        // their pair.
        const int ranks_there = (num_ranks - device + num_devices - 1) / num_devices;
        EXPECT_LE(sms, kSms);
        EXPECT_GT(sms, ranks_there == 1 ? kSms - 1 : kSms - 9 * ranks_there);
      }
    }
  }
  EXPECT_EQ(sms_of_others(kSms, 1, 2, 2), 0);
  EXPECT_EQ(sms_of_others(kSms, 0, 3, 2), 74);
  EXPECT_EQ(sms_of_others(kSms, 1, 3, 2), 0);
}

TEST(Devices, LocalRankIsTheLaunchers) {
  const auto rank_in = [](const std::map<std::string, std::string>& environment) {
    return local_rank(
        [&](const char* name) {
          const auto found = environment.find(name);
          return found == environment.end() ? nullptr : found->second.c_str();
        },
        7);
  };
  EXPECT_EQ(rank_in({}), 7);
  EXPECT_EQ(rank_in({{"SLURM_LOCALID", "3"}}), 3);
  EXPECT_EQ(rank_in({{"MPI_LOCALRANKID", "2"}, {"SLURM_LOCALID", "3"}}), 2);
  EXPECT_EQ(rank_in({{"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"MPI_LOCALRANKID", "2"}}), 1);
  EXPECT_EQ(rank_in({{"LOCAL_RANK", "0"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}}), 0);
  for (const char* text : {"", "-1", "one", "99999999999"}) {
    EXPECT_THROW(rank_in({{"LOCAL_RANK", text}}), Error) << text;
  }
}

}  // namespace
}  // namespace switchyard::run
