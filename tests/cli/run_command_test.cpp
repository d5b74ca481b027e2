// `switchyard run`: what it computes and what it tells.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include "cli/command.h"
#include "cli/format.h"
#include "fabric/namespaces.h"
#include "gpu/device.h"
#include "models/matrix_file.h"
#include "models/model_table.h"
#include "network/network.h"
#include "switchyard/error.h"

namespace switchyard::cli {
namespace {

// No number of ranks gets whole tiles of them.
constexpr const char* kTokens = "37";

// The processes that this one has started, as /proc has them.
std::vector<std::string> children() {
  std::istringstream names(
      read_file("/proc/self/task/" + std::to_string(::getpid()) + "/children"));
  return {std::istream_iterator<std::string>(names), {}};
}

nlohmann::json run_json(const Arguments& arguments) {
  const Completed done = run_well(join({"run", "--json"}, arguments));
  return nlohmann::json::parse(done.out);
}

TEST(Run, SameBytesOnOneAndFourRanks) {
  const TemporaryDirectory directory;
  const std::string one = (directory / "one.safetensors").string();
  const std::string four = (directory / "four.safetensors").string();
  for (const auto& [ranks, path] : {std::pair{"1", one}, std::pair{"4", four}}) {
    const Completed done = run_well(join({"run", "--tokens", kTokens, "--ranks", ranks, "--threads",
                                          "1", "--output", path, "--quiet"},
                                         kTiny));
    EXPECT_EQ(done.out, "");
  }
  EXPECT_EQ(read_file(one), read_file(four));
  const std::string output = tensor_bytes(one, "output");
  EXPECT_EQ(output.size(), 37u * 64 * 2);
  EXPECT_NE(output, std::string(output.size(), '\0'));
}

TEST(Run, AnotherSeedGivesOtherBytes) {
  const TemporaryDirectory directory;
  for (const char* seed : {"0", "1"}) {
    run_well(join({"run", "--tokens", "16", "--seed", seed, "--quiet", "--output",
                   (directory / seed).string()},
                  kTiny));
  }
  EXPECT_NE(tensor_bytes(directory / "0", "output"), tensor_bytes(directory / "1", "output"));
}

TEST(Run, TellsWhereTheOutputIs) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "y.safetensors").string();
  const Completed done =
      run_well(join({"run", "--tokens", "8", "--threads", "1", "--output", path}, kTiny));
  EXPECT_THAT(done.out, ::testing::HasSubstr("file        " + path + ", with output"));
}

TEST(Run, LaunchedProcessesGiveTheBytesOfThreads) {
  const TemporaryDirectory directory;
  const Arguments layer = join({"run", "--tokens", kTokens, "--threads", "1", "--json"}, kTiny);
  const Completed threads =
      run_well(join(layer, {"--ranks", "3", "--output", (directory / "threads").string()}));
  Arguments launch = {"launch", "-n", "3", "--", SWITCHYARD_COMMAND};
  launch = join(join(launch, layer), {"--output", (directory / "processes").string(), "--verify"});
  const Completed processes = run_well(launch);
  EXPECT_EQ(read_file(directory / "threads"), read_file(directory / "processes"));

  const auto of_threads = nlohmann::json::parse(threads.out);
  // Only one rank reports, or this would not parse.
  const auto of_processes = nlohmann::json::parse(processes.out);
  EXPECT_FALSE(of_threads["world"]["processes"]);
  EXPECT_TRUE(of_processes["world"]["processes"]);
  EXPECT_EQ(of_processes["world"]["ranks"], 3);
  EXPECT_EQ(of_processes["world"]["threads"], 3);
  for (const char* field : {"dispatch_bytes", "combine_bytes", "signal_bytes"}) {
    EXPECT_EQ(of_threads["crossing"][field], of_processes["crossing"][field]) << field;
  }
}

TEST(Run, SumsPerHostSendFewerBytesBetweenHosts) {
  if (!network::is_built_in()) GTEST_SKIP() << "this build joins ranks of one host only";
  try {
    const NetworkNamespaces probe(1);
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  const TemporaryDirectory directory;
  const auto run = [&](const char* name, const Arguments& options) {
    const Arguments launch = {"launch", "-n", "4", "--namespaces", "2", "--", SWITCHYARD_COMMAND};
    const Completed done = run_well(
        join(join(join(launch, {"run", "--tokens", kTokens, "--threads", "1", "--json", "--verify",
                                "--repeat", "1", "--output", (directory / name).string()}),
                  kTiny),
             options));
    return nlohmann::json::parse(done.out)["crossing"]["combine_bytes"].get<std::int64_t>();
  };
  const std::int64_t rows = run("rows", {});
  EXPECT_LT(run("sums", {"--pre-sum-per-host"}), rows);
  // A rounding more, so other bits.
  EXPECT_NE(tensor_bytes(directory / "rows", "output"), tensor_bytes(directory / "sums", "output"));
}

TEST(Run, SumsPerHostChangeNothingOnOneHost) {
  const TemporaryDirectory directory;
  for (const Arguments& options : {Arguments{}, Arguments{"--pre-sum-per-host"}}) {
    run_well(join(join({"run", "--tokens", kTokens, "--ranks", "2", "--threads", "1", "--quiet",
                        "--output", (directory / std::to_string(options.size())).string()},
                       kTiny),
                  options));
  }
  EXPECT_EQ(tensor_bytes(directory / "0", "output"), tensor_bytes(directory / "1", "output"));
}

TEST(Run, LauncherWithoutDashesPassesOptionsOn) {
  const Completed done = run_well(
      join({"launch", "-n", "2", SWITCHYARD_COMMAND, "run", "--tokens", "8", "--json"}, kTiny));
  EXPECT_EQ(nlohmann::json::parse(done.out)["world"]["ranks"], 2);
}

TEST(Run, RanksGivenUnderALauncherAreThreads) {
  // Also where the launcher's words make no sense: they are not asked for.
  for (const Arguments& stray : {Arguments{"RANK=0", "WORLD_SIZE=4"}, Arguments{"RANK=7"},
                                 Arguments{"RANK=9", "WORLD_SIZE=4"}}) {
    const Completed done =
        run_well(join({"run", "--ranks", "2", "--tokens", "8", "--json"}, kTiny), stray);
    EXPECT_FALSE(nlohmann::json::parse(done.out)["world"]["processes"]);
  }
}

// Before anything is run, and of the trace, too.
TEST(Run, DoesNotWriteWhatItReadsNorIntoAPipe) {
  const TemporaryDirectory directory;
  const std::string input = (directory / "x.safetensors").string();
  const std::string pipe = (directory / "pipe").string();
  std::ofstream(input) << "activations";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const auto refused = [](const Arguments& arguments, const char* part) {
    expect_told(arguments, 2, part);
  };
  for (const auto& [command, option] : {std::pair{"run", "--output"}, {"trace", "--out"}}) {
    refused(join({command, "--input", input, option, input}, kTiny), "which is also read");
    refused({command, "--checkpoint", std::filesystem::path(input).parent_path().string(), option,
             input},
            "which is in the checkpoint's directory");
    // A new file, too: it could pass for a shard.
    refused({command, "--checkpoint", directory.path().string(), option,
             (directory / "new.safetensors").string()},
            "name a file in another directory");
    refused(join({command, option, pipe}, kTiny), "which is a pipe");
  }
  EXPECT_EQ(std::filesystem::file_size(input), 11u);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
}

TEST(Run, JsonTellsEverything) {
  const auto json = run_json(join(
      {"--tokens", "100", "--ranks", "4", "--threads", "1", "--repeat", "3", "--verify"}, kTiny));
  EXPECT_EQ(json["layer"]["experts"], 16);
  EXPECT_EQ(json["layer"]["hidden"], 64);
  EXPECT_EQ(json["weights"]["bytes"], 16 * 3 * 64 * 32 * 2);
  EXPECT_EQ(json["batch"]["tokens"], 100);
  EXPECT_EQ(json["world"]["ranks"], 4);
  EXPECT_EQ(json["world"]["threads"], 4);
  EXPECT_EQ(json["world"]["compute"], "bf16");
  EXPECT_EQ(json["time"]["pass_seconds"].size(), 3u);
  const double median = json["time"]["median_seconds"];
  EXPECT_LE(json["time"]["min_seconds"], median);
  EXPECT_GE(json["time"]["max_seconds"], median);
  EXPECT_GT(median, 0);
  EXPECT_EQ(json["compute"]["flops"], 100 * 8 * 3 * 2.0 * 64 * 32);
  for (const char* field : {"flops_per_second", "gemm_flops_per_second", "gemm_fraction"}) {
    EXPECT_GT(json["compute"][field], 0) << field;
  }
  for (const char* field : {"touched_weight_bytes", "bytes_per_second", "read_bytes_per_second"}) {
    EXPECT_GT(json["streaming"][field], 0) << field;
  }
  const std::vector<std::int64_t> counts = json["experts"]["tokens_per_expert"];
  ASSERT_EQ(counts.size(), 16u);
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), 800);
  EXPECT_EQ(json["experts"]["max"], *std::max_element(counts.begin(), counts.end()));
  EXPECT_EQ(json["experts"]["min"], *std::min_element(counts.begin(), counts.end()));
  EXPECT_EQ(json["experts"]["mean"], 50);
  EXPECT_GT(json["experts"]["balancedness"], 0.5);
  for (const char* field :
       {"dispatch_bytes", "combine_bytes", "signal_bytes", "padded_all_to_all_bytes"}) {
    EXPECT_GT(json["crossing"][field], 0) << field;
  }
  for (const char* field : {"used_bytes", "reserved_bytes"}) EXPECT_GT(json["heap"][field], 0);
  EXPECT_EQ(json["heap"]["token_buffer_bytes"], 100 * 64 * 2);
  EXPECT_GT(json["memory"]["peak_resident_bytes"], 1'000'000);
  EXPECT_EQ(json["dropped_slots"], 0);
  EXPECT_EQ(json["nan_logits"], 0);
  EXPECT_TRUE(json["verification"]["ok"]);
  EXPECT_GT(json["verification"]["bf16_yardstick"], 0);
}

TEST(Run, Fp8WeightsComputeInFp8UnlessToldOtherwise) {
  const Arguments fp8 =
      join({"--dtype", "fp8", "--backend", "cpu", "--ranks", "2", "--verify"}, kTiny);
  const auto json = run_json(fp8);
  EXPECT_EQ(json["world"]["compute"], "f8_e4m3");
  EXPECT_TRUE(json["verification"]["ok"]);
  EXPECT_GT(json["verification"]["fp8_yardstick"], 0);
  const auto wide = run_json(join({"--compute", "bf16"}, fp8));
  EXPECT_EQ(wide["world"]["compute"], "bf16");
  EXPECT_TRUE(wide["verification"]["ok"]);
  EXPECT_LT(json["crossing"]["dispatch_bytes"], wide["crossing"]["dispatch_bytes"]);
  EXPECT_EQ(json["crossing"]["combine_bytes"], wide["crossing"]["combine_bytes"]);

  expect_told(join({"run", "--compute", "fp8"}, kTiny), 2, "is bf16");
}

TEST(Run, FourBitWeightsComputeInBf16UnlessToldOtherwise) {
  const Arguments common = join({"--ranks", "2", "--verify"}, kTiny);
  for (const auto& [name, exact, scale_bytes] :
       {std::tuple("mxfp4", "f4_e2m1", 1), std::tuple("int4", "u4", 2)}) {
    for (const char* dtype : {name, exact}) {
      const auto json = run_json(join({"--dtype", dtype}, common));
      EXPECT_EQ(json["world"]["backend"], "cpu");
      EXPECT_EQ(json["world"]["compute"], "bf16");
      EXPECT_EQ(json["weights"]["dtype"], exact);
      EXPECT_EQ(json["weights"]["bytes"], 16 * 3 * 64 * 32 * (16 + scale_bytes) / 32);
      EXPECT_TRUE(json["verification"]["ok"]);
    }
  }
  const auto fp8 = run_json(join({"--dtype", "mxfp4", "--compute", "fp8"}, common));
  EXPECT_EQ(fp8["world"]["compute"], "f8_e4m3");
  EXPECT_TRUE(fp8["verification"]["ok"]);
  const auto usual = run_json({"--model", "gpt-oss-20b", "--experts", "4", "--hidden", "64",
                               "--intermediate", "32", "--tokens", "5"});
  EXPECT_EQ(usual["weights"]["dtype"], "f4_e2m1");

  expect_told(join({"run", "--dtype", "int4", "--compute", "fp8"}, kTiny), 2, "is u4");
  for (const char* dtype : {"nf4", "fp4", "mxfp8", "MXFP4", "f8_e8m0"}) {
    expect_told(join({"run", "--dtype", dtype}, kTiny), 2,
                "use bf16, f32, f16, fp8, mxfp4 or int4");
  }
  expect_told(join({"run", "--compute", "mxfp4"}, kTiny), 2, "use bf16, f32 or fp8");
  expect_told({"run", "--model", "olmoe", "--hidden", "72", "--dtype", "mxfp4"}, 2,
              "hidden 72 and intermediate 1024 must be multiples");
}

TEST(Run, BackendIsToldAndTheCpuWithoutAGpu) {
  const auto json = run_json(join({"--tokens", "10", "--backend", "cpu"}, kTiny));
  EXPECT_EQ(json["world"]["backend"], "cpu");
  EXPECT_FALSE(json["world"].contains("device"));
  const auto chosen = run_json(join({"--tokens", "10"}, kTiny));
  EXPECT_EQ(chosen["world"]["backend"], gpu::device_count() > 0 ? "cuda" : "cpu");
}

TEST(Run, CudaGivesTheOutputOfTheCpu) {
  if (gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
  for (const char* tokens : {"1", kTokens, "300"}) {
    const auto json = run_json(
        join({"--tokens", tokens, "--backend", "cuda", "--reserved-sms", "4", "--verify"}, kTiny));
    EXPECT_EQ(json["world"]["backend"], "cuda");
    EXPECT_THAT(json["world"]["device"], HasSubstr("GPU 0"));
    EXPECT_GT(json["time"]["median_seconds"], 0);
    EXPECT_GT(json["streaming"]["bytes_per_second"], 0);
    EXPECT_GT(json["compute"]["flops_per_second"], 0);
    EXPECT_GT(json["memory"]["workspace_bytes"], 0);
    EXPECT_TRUE(json["verification"]["ok"]);
  }
  const Completed text = run_well(join({"run", "--tokens", "64"}, kTiny));
  for (const char* part : {"GPU 0", "one launch", "touched weights", "workspace on the GPU"}) {
    EXPECT_THAT(text.out, HasSubstr(part));
  }
}

TEST(Run, CudaRanksGiveTheBytesOfOne) {
  if (gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
  const TemporaryDirectory directory;
  // More ranks than most machines have GPUs, so that some share one; one rank has no token.
  for (const char* ranks : {"1", "2", "4"}) {
    const auto json = run_json(join({"--tokens", "3", "--backend", "cuda", "--ranks", ranks,
                                     "--verify", "--output", (directory / ranks).string()},
                                    kTiny));
    EXPECT_EQ(json["world"]["ranks"], std::atoi(ranks));
    EXPECT_TRUE(json["verification"]["ok"]);
    EXPECT_EQ(json["crossing"]["total_bytes"] > 0, std::string(ranks) != "1");
  }
  EXPECT_EQ(read_file(directory / "1"), read_file(directory / "2"));
  EXPECT_EQ(read_file(directory / "1"), read_file(directory / "4"));

  const Completed launched =
      run_well(join({"launch", "-n", "2", "--", SWITCHYARD_COMMAND, "run", "--tokens", "3",
                     "--backend", "cuda", "--verify", "--json"},
                    kTiny));
  const auto json = nlohmann::json::parse(launched.out);
  EXPECT_TRUE(json["world"]["processes"]);
  EXPECT_TRUE(json["verification"]["ok"]);
}

TEST(Run, OneRankSendsNothing) {
  const auto json = run_json(join({"--tokens", "10"}, kTiny));
  EXPECT_EQ(json["crossing"]["total_bytes"], 0);
}

TEST(Run, VerifiesEveryModelAndDType) {
  for (const ModelEntry& entry : model_table()) {
    for (const char* dtype : {"bf16", "fp8", "f32", "mxfp4", "int4"}) {
      const Completed done =
          run_switchyard({"run", "--model",        entry.name, "--experts", "16",  "--hidden",
                          "128", "--intermediate", "64",       "--dtype",   dtype, "--tokens",
                          "20",  "--ranks",        "2",        "--backend", "cpu", "--repeat",
                          "1",   "--verify",       "--quiet"});
      EXPECT_EQ(done.exit_code, 0) << entry.name << " " << dtype << ": " << done.err;
    }
  }
}

TEST(Run, ReportFitsAHundredColumnsWithManyExperts) {
  const Completed done = run_well({"run", "--model", "qwen3.5-397b", "--hidden", "64",
                                   "--intermediate", "32", "--tokens", "300", "--ranks", "4",
                                   "--repeat", "1", "--verify", "--backend", "cpu"});
  std::istringstream lines(done.out);
  int bars = 0;
  for (std::string line; std::getline(lines, line);) {
    EXPECT_LE(display_width(line), kReportColumns) << line;
    bars += line.find("▁") != std::string::npos || line.find("█") != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(bars, 8);  // 512 experts, 64 to a line
  for (const char* part : {"512 experts", "median of 1", "GFLOP/s", "balancedness", "crossing",
                           "padded all-to-all", "heap", "peak resident", "ok"}) {
    EXPECT_THAT(done.out, HasSubstr(part));
  }
}

TEST(Run, BalancednessIsTheOneAskedFor) {
  for (const double beta : {0.7, 0.95}) {
    const auto json =
        run_json({"--model", "olmoe", "--hidden", "64", "--intermediate", "32", "--tokens", "2000",
                  "--repeat", "1", "--balancedness", std::to_string(beta)});
    EXPECT_NEAR(json["experts"]["balancedness"], beta, 0.02);
    EXPECT_THAT(json["batch"]["routing"], HasSubstr("synthetic"));
  }
}

TEST(Run, CapacityFactorDropsAndTellsSo) {
  const Arguments arguments = join({"--tokens", "200", "--ranks", "2", "--balancedness", "0.8",
                                    "--capacity-factor", "1", "--verify"},
                                   kTiny);
  const auto json = run_json(arguments);
  const std::int64_t dropped = json["dropped_slots"];
  EXPECT_GT(dropped, 0);
  const std::vector<std::int64_t> counts = json["experts"]["tokens_per_expert"];
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), dropped), 1600);
  EXPECT_TRUE(json["verification"]["ok"]);
  const Completed text = run_switchyard(join({"run"}, arguments));
  EXPECT_THAT(text.out, HasSubstr("of 1,600 slots"));
}

// A batch with `seed`, [tokens, 64] in fp32.
std::vector<float> activations(int tokens, unsigned seed) {
  std::vector<float> x(static_cast<std::size_t>(tokens) * 64);
  std::uint32_t state = seed;
  for (float& v : x) {
    state = state * 1664525u + 1013904223u;
    v = static_cast<float>(static_cast<std::int32_t>(state)) * 0x1p-31f;
  }
  return x;
}

MatrixView matrix(const void* data, DType dtype, std::int64_t rows, std::int64_t cols) {
  return {data, dtype, rows, cols, cols};
}

TEST(Run, OutputOfOneRunRoutesTheNext) {
  const TemporaryDirectory directory;
  const std::vector<float> x = activations(33, 1);
  const MatrixView view = matrix(x.data(), DType::kF32, 33, 64);
  const std::string input = (directory / "x").string();
  const std::string first = (directory / "first").string();
  write_matrices(input, {{"anything", view}});  // the only tensor needs no name
  run_well(
      join({"run", "--dtype", "f32", "--input", input, "--output", first, "--verify", "--quiet"},
           kTiny));

  const OwnedMatrix ids = read_matrix(first, "topk_ids");
  const OwnedMatrix weights = read_matrix(first, "topk_weights");
  std::vector<std::int64_t> wide_ids;
  for (int i = 0; i < 33 * 8; ++i) {
    wide_ids.push_back(static_cast<const std::int32_t*>(ids.view.data)[i]);
  }
  const std::string routed = (directory / "routed").string();
  const std::string second = (directory / "second").string();
  write_matrices(routed, {{"activations", view},
                          {"topk_ids", matrix(wide_ids.data(), DType::kI64, 33, 8)},
                          {"topk_weights", weights.view}});
  const auto json = run_json(
      join({"--dtype", "f32", "--input", routed, "--output", second, "--ranks", "2", "--verify"},
           kTiny));
  EXPECT_EQ(json["batch"]["routing"], "given");
  EXPECT_TRUE(json["verification"]["ok"]);
  EXPECT_EQ(read_file(first), read_file(second));
}

TEST(Run, GivenRoutingIsUsed) {
  const TemporaryDirectory directory;
  const std::vector<float> x = activations(4, 2);
  const std::vector<std::int32_t> ids = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4,  5,  6,  7,
                                         8, 9, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, -1, -1, -1, -1};
  const std::vector<float> weights(32, 0.125f);
  const std::string input = (directory / "x").string();
  write_matrices(input, {{"activations", matrix(x.data(), DType::kF32, 4, 64)},
                         {"topk_ids", matrix(ids.data(), DType::kI32, 4, 8)},
                         {"topk_weights", matrix(weights.data(), DType::kF32, 4, 8)}});
  const std::string output = (directory / "y").string();
  const auto json = run_json(join({"--input", input, "--output", output, "--verify"}, kTiny));
  EXPECT_EQ(json["experts"]["tokens_per_expert"],
            nlohmann::json({3, 3, 4, 4, 3, 3, 3, 3, 1, 1, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(json["experts"]["unpicked"], 6);
  EXPECT_TRUE(json["verification"]["ok"]);
  EXPECT_EQ(tensor_bytes(output, "topk_ids"), tensor_bytes(input, "topk_ids"));
}

TEST(Run, TokenIdsRouteHashedLayers) {
  const TemporaryDirectory directory;
  const std::vector<float> x = activations(6, 3);
  const Arguments layer = {"--model", "deepseek-v4-flash", "--experts", "16",       "--hidden",
                           "64",      "--intermediate",    "32",        "--verify", "--repeat",
                           "1"};
  const auto counts = [&](const std::vector<std::int32_t>& token_ids) {
    const std::string input = (directory / "x").string();
    write_matrices(input, {{"activations", matrix(x.data(), DType::kF32, 6, 64)},
                           {"token_ids", matrix(token_ids.data(), DType::kI32, 1, 6)}});
    const auto json = run_json(join({"--input", input}, layer));
    EXPECT_TRUE(json["verification"]["ok"]);
    return json["experts"]["tokens_per_expert"].get<std::vector<std::int64_t>>();
  };
  const auto same = counts({7, 7, 7, 7, 7, 7});
  EXPECT_EQ(std::count(same.begin(), same.end(), 6), 6);  // one row of the table: six experts
  const auto mixed = counts({7, 8, 9, 10, 11, 12});
  EXPECT_NE(same, mixed);
}

// Reading what was cut off raises SIGBUS, which ends a process without a word.
TEST(Run, ACheckpointThatIsCutWhileItIsUsedIsNamed) {
  const TemporaryDirectory directory;
  const std::string path = (directory / "model").string();
  run_well(join({"make-checkpoint", "--dtype", "f32", "--quiet", "--out", path}, kTiny));
  const std::string shard = path + "/model.safetensors";
  // Cuts the shard shortly after the command has mapped it.
  const std::jthread cutter([&](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      for (const std::string& process : children()) {
        if (read_file("/proc/" + process + "/maps").find(shard) == std::string::npos) continue;
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        std::filesystem::resize_file(shard, 4096);
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  });
  const Completed done = run_switchyard({"run", "--checkpoint", path, "--repeat", "1000000",
                                         "--ranks", "2", "--quiet", "--tokens", "64"});
  EXPECT_EQ(done.exit_code, 2);
  EXPECT_THAT(done.err, HasSubstr("switchyard: error (invalid_file): " + shard));
  EXPECT_THAT(done.err, HasSubstr("4096"));
}

TEST(Run, NamesThatAreNotUtf8AreReported) {
  const TemporaryDirectory directory;
  const std::string input = (directory / "x\xff\x1b[2J").string();
  const std::vector<float> x = activations(4, 2);
  write_matrices(input, {{"activations", matrix(x.data(), DType::kF32, 4, 64)}});
  EXPECT_THAT(run_json(join({"--input", input}, kTiny))["batch"]["activations"].get<std::string>(),
              HasSubstr("x\ufffd\x1b[2J"));
  const Completed text = run_well(join({"run", "--input", input}, kTiny));
  EXPECT_THAT(text.out, HasSubstr("x\\xff\\x1b[2J"));
}

TEST(Run, NaNIsToldAndFailsVerification) {
  const TemporaryDirectory directory;
  std::vector<float> x = activations(4, 2);
  x[70] = NAN;
  std::vector<std::int32_t> ids;
  for (int i = 0; i < 32; ++i) ids.push_back(i % 8);
  const std::vector<float> weights(32, 0.125f);
  const MatrixView view = matrix(x.data(), DType::kF32, 4, 64);
  const std::string gated = (directory / "gated").string();
  write_matrices(gated, {{"activations", view}});
  const auto json = run_json(join({"--input", gated}, kTiny));
  EXPECT_EQ(json["nan_logits"], 16);
  EXPECT_EQ(json["nan_tokens"], 1);
  const std::string told = "1 token with NaN logits (16 logits in all) lost experts";
  EXPECT_THAT(run_switchyard(join({"run", "--input", gated}, kTiny)).out, HasSubstr(told));
  // Nobody sees the text report here.
  for (const char* option : {"--quiet", "--json"}) {
    const Completed done = run_well(join({"run", "--input", gated, option}, kTiny));
    EXPECT_THAT(done.err, HasSubstr("switchyard: " + told));
  }
  // The reference leaves out the same experts, so the outputs agree.
  for (const char* ranks : {"1", "2"}) {
    const Completed done = run_switchyard(
        join({"run", "--input", gated, "--verify", "--quiet", "--ranks", ranks}, kTiny));
    EXPECT_EQ(done.exit_code, 1);
    EXPECT_THAT(done.err, HasSubstr(told));
    EXPECT_THAT(done.err, HasSubstr("0 misrouted tokens, 1 token with NaN logits"));
  }

  const std::string routed = (directory / "routed").string();
  write_matrices(routed, {{"activations", view},
                          {"topk_ids", matrix(ids.data(), DType::kI32, 4, 8)},
                          {"topk_weights", matrix(weights.data(), DType::kF32, 4, 8)}});
  const Completed failed = run_switchyard(join({"run", "--input", routed, "--verify"}, kTiny));
  EXPECT_EQ(failed.exit_code, 1);
  EXPECT_THAT(failed.out, HasSubstr("FAILED"));
  EXPECT_THAT(failed.err, HasSubstr("verification failed"));
}

TEST(Models, ListsEveryRow) {
  const Completed text = run_well({"models"});
  const auto json = nlohmann::json::parse(run_switchyard({"models", "--json"}).out);
  ASSERT_EQ(json.size(), model_table().size());
  for (std::size_t i = 0; i < json.size(); ++i) {
    EXPECT_EQ(json[i]["name"], model_table()[i].name);
    EXPECT_GT(json[i]["layer_bytes"], 1'000'000);
    EXPECT_GT(json[i]["moe_layers"], 0);
    EXPECT_THAT(text.out, HasSubstr(std::string("\n") + model_table()[i].name + " "));
  }
  EXPECT_EQ(json[0]["experts"], 64);
  EXPECT_EQ(json[0]["top_k"], 8);
}

}  // namespace
}  // namespace switchyard::cli
