#include "fabric/environment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "support/ranks.h"

namespace switchyard::test {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

EnvironmentLookup lookup_in(const Variables& variables) {
  return [&variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

TEST(Environment, FindsRankAndSize) {
  struct Case {
    Variables variables;
    int rank;
    int size;
  };
  const Case cases[] = {
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}}, 0, 1},
      {{{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "3"}, {"LOCAL_WORLD_SIZE", "4"}}, 3, 4},
      {{{"OMPI_COMM_WORLD_RANK", "1"},
        {"OMPI_COMM_WORLD_SIZE", "2"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
       1,
       2},
      {{{"PMI_RANK", "6"}, {"PMI_SIZE", "8"}}, 6, 8},
      {{{"SLURM_PROCID", "2"}, {"SLURM_NTASKS", "3"}, {"SLURM_STEP_NUM_NODES", "1"}}, 2, 3},
      {{{"RANK", "63"}, {"WORLD_SIZE", "64"}}, 63, 64},
      // torchrun under srun: the innermost launcher counts.
      {{{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}, 1, 2},
  };
  for (const Case& c : cases) {
    const auto found = parse_launched_rank(lookup_in(c.variables));
    ASSERT_TRUE(found.has_value()) << c.variables.begin()->first;
    EXPECT_EQ(found->rank, c.rank) << c.variables.begin()->first;
    EXPECT_EQ(found->size, c.size) << c.variables.begin()->first;
  }
}

TEST(Environment, IsSilentWithoutALauncher) {
  EXPECT_FALSE(parse_launched_rank(lookup_in({})));
  const Variables allocation_shell{{"SLURM_JOB_ID", "7"}, {"SLURM_NTASKS", "4"}};
  EXPECT_FALSE(parse_launched_rank(lookup_in(allocation_shell)));
}

TEST(Environment, NamesTheVariableAndItsValue) {
  struct Case {
    Variables variables;
    ErrorCode code;
    const char* named;
  };
  const auto invalid = ErrorCode::kInvalidArgument;
  const Case cases[] = {
      {{{"RANK", "0"}}, invalid, "WORLD_SIZE is not"},
      {{{"WORLD_SIZE", "2"}}, invalid, "RANK is not"},
      {{{"SLURM_PROCID", "2"}}, invalid, "SLURM_NTASKS is not"},
      {{{"OMPI_COMM_WORLD_SIZE", "2"}}, invalid, "OMPI_COMM_WORLD_RANK is not"},
      {{{"RANK", "two"}, {"WORLD_SIZE", "4"}}, invalid, "RANK='two'"},
      {{{"RANK", ""}, {"WORLD_SIZE", "4"}}, invalid, "RANK=''"},
      {{{"RANK", "1 "}, {"WORLD_SIZE", "4"}}, invalid, "RANK='1 '"},
      {{{"RANK", "+1"}, {"WORLD_SIZE", "4"}}, invalid, "RANK='+1'"},
      {{{"RANK", "0x1"}, {"WORLD_SIZE", "4"}}, invalid, "RANK='0x1'"},
      {{{"RANK", "-1"}, {"WORLD_SIZE", "4"}}, invalid, "RANK='-1'"},
      {{{"RANK", "99999999999"}, {"WORLD_SIZE", "4"}},
       invalid,
       "RANK='99999999999' in the environment is too large; a world can have 64 ranks"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "99999999999"}},
       invalid,
       "WORLD_SIZE='99999999999' in the environment is too large"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "-99999999999"}}, invalid, "at least 1"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "99999999999x"}}, invalid, "decimal number"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "0"}}, invalid, "WORLD_SIZE='0'"},
      {{{"RANK", "4"}, {"WORLD_SIZE", "4"}}, invalid, "RANK=4"},
      {{{"PMI_RANK", "9"}, {"PMI_SIZE", "2"}}, invalid, "PMI_RANK=9"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "65"}}, invalid, "WORLD_SIZE=65"},
      {{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2147483647"}}, invalid, "more than the 64 ranks"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "3"}},
       invalid,
       "LOCAL_WORLD_SIZE=3"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "x"}},
       invalid,
       "LOCAL_WORLD_SIZE='x'"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "2"}}, invalid, "LOCAL_RANK=2"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "16"}, {"LOCAL_WORLD_SIZE", "8"}},
       ErrorCode::kUnsupported,
       "LOCAL_WORLD_SIZE=8"},
      {{{"OMPI_COMM_WORLD_RANK", "1"},
        {"OMPI_COMM_WORLD_SIZE", "2"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}},
       ErrorCode::kUnsupported,
       "OMPI_COMM_WORLD_LOCAL_SIZE=1"},
      {{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_NUM_NODES", "2"}},
       ErrorCode::kUnsupported,
       "SLURM_STEP_NUM_NODES=2"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(error_of(c.code, [&] { parse_launched_rank(lookup_in(c.variables)); }),
                HasSubstr(c.named));
  }
}

TEST(Environment, IdentifiesTheJob) {
  const Variables torch{{"TORCHELASTIC_RUN_ID", "none"}, {"MASTER_PORT", "29500"}};
  const Variables other_torch{{"TORCHELASTIC_RUN_ID", "none"}, {"MASTER_PORT", "29501"}};
  EXPECT_EQ(job_identity(lookup_in(torch)), job_identity(lookup_in(torch)));
  EXPECT_NE(job_identity(lookup_in(torch)), job_identity(lookup_in(other_torch)));
  const Variables step_0{{"SLURM_JOB_ID", "8"}, {"SLURM_STEP_ID", "0"}};
  const Variables step_1{{"SLURM_JOB_ID", "8"}, {"SLURM_STEP_ID", "1"}};
  EXPECT_NE(job_identity(lookup_in(step_0)), job_identity(lookup_in(step_1)));
  const Variables given{{"SWITCHYARD_RENDEZVOUS", "here"}, {"MASTER_PORT", "29500"}};
  EXPECT_EQ(job_identity(lookup_in(given)), "here");
  EXPECT_EQ(job_identity(lookup_in({})), "parent=" + std::to_string(::getppid()));
}

TEST(Environment, KnowsTheJobOnlyIfALauncherTellsIt) {
  EXPECT_EQ(launched_job(lookup_in({})), "");
  EXPECT_EQ(launched_job(lookup_in({{"RANK", "0"}, {"WORLD_SIZE", "2"}})), "");
  const Variables slurm{{"SLURM_JOB_ID", "8"}, {"SLURM_STEP_ID", "0"}};
  EXPECT_EQ(launched_job(lookup_in(slurm)), job_identity(lookup_in(slurm)));
}

TEST(Environment, RanksThatDoNotComeAreBlamedOnTheVariables) {
  const auto codes = run_processes(1, [](int) {
    ::setenv("PMI_RANK", "0", 1);
    ::setenv("PMI_SIZE", "2", 1);
    EXPECT_THAT(
        timeout_of(ErrorCode::kTimeout, 1, [] { World::from_environment(with_deadline(kShort)); }),
        ::testing::AllOf(HasSubstr("rank 1 of 2 did not arrive"),
                         HasSubstr("PMI_RANK=0 and PMI_SIZE=2 in the environment"),
                         HasSubstr("unset both")));
  });
  EXPECT_THAT(codes, ::testing::Each(0));
}

TEST(Environment, MakesAWorldOfOneWithoutALauncher) {
  World world = World::from_environment();
  EXPECT_EQ(world.size(), 1);
}

TEST(Environment, MakesSeveralWorldsInOrder) {
  const auto codes = run_processes(3, [](int rank) {
    ::setenv("OMPI_COMM_WORLD_RANK", std::to_string(rank).c_str(), 1);
    ::setenv("OMPI_COMM_WORLD_SIZE", "3", 1);
    for (int i = 0; i < 5; ++i) {
      World world = World::from_environment(with_deadline(kGenerous));
      World second = World::from_environment(with_deadline(kGenerous));
      EXPECT_EQ(world.rank(), rank);
      EXPECT_EQ(world.size(), 3);
      check_all_gather(second, 10);
      check_all_gather(world, 10);
    }
  });
  EXPECT_THAT(codes, ::testing::Each(0));
}

}  // namespace
}  // namespace switchyard::test
