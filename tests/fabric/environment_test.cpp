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
       invalid,
       "LOCAL_WORLD_SIZE=8 with WORLD_SIZE=16"},
      {{{"OMPI_COMM_WORLD_RANK", "1"},
        {"OMPI_COMM_WORLD_SIZE", "2"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}},
       invalid,
       "set MASTER_ADDR to its host"},
      {{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_NUM_NODES", "2"}},
       invalid,
       "SWITCHYARD_RENDEZVOUS to tcp://HOST:PORT"},
  };
  for (const Case& c : cases) {
    EXPECT_THAT(error_of(c.code, [&] { parse_launched_rank(lookup_in(c.variables)); }),
                HasSubstr(c.named));
  }
}

TEST(Environment, SeveralHostsMeetAtAPort) {
  const auto rendezvous = [](const Variables& variables) {
    return parse_launched_rank(lookup_in(variables))->rendezvous;
  };
  const Variables torch{{"RANK", "3"},
                        {"WORLD_SIZE", "4"},
                        {"LOCAL_WORLD_SIZE", "2"},
                        {"MASTER_ADDR", "node1"},
                        {"MASTER_PORT", "29500"}};
  Variables other_job = torch;
  other_job["MASTER_PORT"] = "29501";
  ASSERT_TRUE(rendezvous(torch));
  EXPECT_THAT(*rendezvous(torch), ::testing::StartsWith("tcp://node1:2"));
  EXPECT_EQ(rendezvous(torch), rendezvous(torch));
  EXPECT_NE(rendezvous(torch), rendezvous(other_job));

  Variables given = torch;
  given["SWITCHYARD_RENDEZVOUS"] = "tcp://10.0.0.1:5000";
  EXPECT_EQ(rendezvous(given), "tcp://10.0.0.1:5000");
  given["LOCAL_WORLD_SIZE"] = "4";
  EXPECT_EQ(rendezvous(given), std::nullopt);

  const Variables six{
      {"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALNRANKS", "1"}, {"MASTER_ADDR", "fd00::7"}};
  EXPECT_THAT(*rendezvous(six), ::testing::StartsWith("tcp://[fd00::7]:2"));

  Variables slurm{{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_NUM_NODES", "2"}};
  for (const auto& [list, first] :
       {std::pair("node3,node4", "node3"), std::pair("gpu[007-009,12],x", "gpu007"),
        std::pair("r[1,3-4]-n,x", "r1-n"), std::pair("alone", "alone")}) {
    slurm["SLURM_STEP_NODELIST"] = list;
    EXPECT_THAT(*rendezvous(slurm), ::testing::StartsWith(std::string("tcp://") + first + ":2"));
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
  expect_processes(1, [](int) {
    ::setenv("PMI_RANK", "0", 1);
    ::setenv("PMI_SIZE", "2", 1);
    EXPECT_THAT(
        timeout_of(ErrorCode::kTimeout, 1, [] { World::from_environment(with_deadline(kShort)); }),
        ::testing::AllOf(HasSubstr("rank 1 of 2 did not arrive"),
                         HasSubstr("PMI_RANK=0 and PMI_SIZE=2 in the environment"),
                         HasSubstr("unset both")));
  });
}

TEST(Environment, MakesAWorldOfOneWithoutALauncher) {
  World world = World::from_environment();
  EXPECT_EQ(world.size(), 1);
}

TEST(Environment, MakesSeveralWorldsInOrder) {
  expect_processes(3, [](int rank) {
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
}

}  // namespace
}  // namespace switchyard::test
