// `switchyard make-checkpoint`, and running what it wrote.
#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <tuple>

#include "cli/command.h"
#include "switchyard/checkpoint.h"
#include "switchyard/weights.h"

namespace switchyard::cli {
namespace {

TEST(MakeCheckpoint, WritesShardsAndTellsSo) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "model").string();
  const Completed done = run_well(join(
      {"make-checkpoint", "--layers", "2", "--max-shard-size", "100kB", "--out", path}, kTiny));
  EXPECT_THAT(done.out, HasSubstr(path));
  EXPECT_THAT(done.out, HasSubstr("2 MoE layers of olmoe in bf16"));
  EXPECT_THAT(done.out, HasSubstr("16 experts"));
  const Checkpoint checkpoint = Checkpoint::open(path);
  EXPECT_EQ(checkpoint.moe_layers(), (std::vector<int>{0, 1}));
  int shards = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    shards += entry.path().extension() == ".safetensors" ? 1 : 0;
  }
  EXPECT_GT(shards, 2);
  EXPECT_THAT(done.out, HasSubstr(std::to_string(shards) + " safetensors files"));
}

TEST(MakeCheckpoint, TellsOfFourBits) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "model").string();
  const Completed done = run_well({"make-checkpoint", "--model", "gpt-oss-20b", "--experts", "4",
                                   "--hidden", "64", "--intermediate", "32", "--out", path});
  EXPECT_THAT(done.out, HasSubstr("1 MoE layer of gpt-oss-20b in mxfp4"));
  EXPECT_THAT(read_file(path + "/config.json"), HasSubstr("\"quant_method\": \"mxfp4\""));
  expect_told({"make-checkpoint", "--model", "gpt-oss-20b", "--dtype", "int4", "--out",
               (directory / "other").string()},
              2, "gpt_oss has no published int4 layout");
}

TEST(MakeCheckpoint, FourBitsRunFromTheirFiles) {
  for (const auto& [model, name, exact] :
       {std::tuple("gpt-oss-20b", "mxfp4", "f4_e2m1"),
        std::tuple("deepseek-v4-flash", "mxfp4", "f4_e2m1"),
        std::tuple("kimi-k3", "mxfp4", "f4_e2m1"), std::tuple("kimi-k2-thinking", "int4", "u4")}) {
    SCOPED_TRACE(model);
    const TemporaryDirectory directory;
    const std::string path = (directory / "model").string();
    const Arguments sizes = {"--model",  model, "--experts",      "16",
                             "--hidden", "160", "--intermediate", "96"};
    const Completed made = run_well(join({"make-checkpoint", "--seed", "5", "--out", path}, sizes));
    EXPECT_THAT(made.out, HasSubstr(std::string(model) + " in " + name));
    const std::string loaded = (directory / "loaded").string();
    const std::string generated = (directory / "generated").string();
    const Arguments common = {"run", "--tokens",  "37",  "--seed",   "5",       "--ranks",
                              "2",   "--backend", "cpu", "--verify", "--output"};
    const Completed ran = run_well(join(join(common, {loaded}), {"--checkpoint", path}));
    EXPECT_THAT(ran.out, HasSubstr(std::string("model; ") + exact));
    EXPECT_THAT(ran.out, HasSubstr("  ok  "));
    run_well(join(join(common, {generated, "--quiet"}), sizes));
    EXPECT_EQ(read_file(loaded), read_file(generated));
  }
}

// The checkpoint would have 3 GB. The command is interrupted after some milliseconds and must leave
// nothing.
TEST(MakeCheckpoint, InterruptedItLeavesNothing) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "model").string();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::execl(SWITCHYARD_COMMAND, SWITCHYARD_COMMAND, "make-checkpoint", "--model", "olmoe",
            "--layers", "4", "--quiet", "--out", path.c_str(), nullptr);
    ::_exit(126);
  }
  const auto writing = [&] {
    for (const std::string& name : names_in(directory.path())) {
      if (std::filesystem::exists(directory / (name + "/config.json"))) return true;
    }
    return false;
  };
  int status = 0;
  while (!writing() && ::waitpid(child, &status, WNOHANG) == 0) ::usleep(1000);
  EXPECT_TRUE(writing());
  ::kill(child, SIGINT);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT) << status;
  EXPECT_THAT(names_in(directory.path()), ::testing::IsEmpty());
}

TEST(MakeCheckpoint, RunsLikeTheGeneratedModel) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "model").string();
  run_well(
      join({"make-checkpoint", "--layers", "2", "--seed", "5", "--quiet", "--out", path}, kTiny));
  const Arguments common = {"run",    "--layer", "1",       "--tokens", "64",
                            "--seed", "5",       "--quiet", "--output"};
  const std::string loaded = (directory / "loaded").string();
  const std::string generated = (directory / "generated").string();
  run_well(join(join(common, {loaded}), {"--checkpoint", path}));
  run_well(join(join(common, {generated}), kTiny));
  EXPECT_EQ(read_file(loaded), read_file(generated));
}

TEST(MakeCheckpoint, RanksOfACheckpointAgree) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "model").string();
  run_well(join({"make-checkpoint", "--out", path}, kTiny));
  for (const char* ranks : {"1", "4"}) {
    run_well({"run", "--checkpoint", path, "--tokens", "37", "--ranks", ranks, "--threads", "1",
              "--verify", "--quiet", "--output", (directory / ranks).string()});
  }
  EXPECT_EQ(read_file(directory / "1"), read_file(directory / "4"));
}

TEST(MakeCheckpoint, LeavesFullDirectoriesAlone) {
  const TemporaryDirectory directory;
  test::write_file(directory / "precious", "x");
  expect_told(join({"make-checkpoint", "--out", directory.path().string()}, kTiny), 2,
              "error (invalid_argument)");
  EXPECT_EQ(read_file(directory / "precious"), "x");
}

}  // namespace
}  // namespace switchyard::cli
