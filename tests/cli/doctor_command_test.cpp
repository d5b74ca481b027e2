#include <gmock/gmock.h>

#include <set>

#include "cli/command.h"
#include "gpu/device.h"

namespace switchyard::cli {
namespace {

TEST(Doctor, JsonPassesHere) {
  const Completed done = run_switchyard({"doctor", "--json"});
  EXPECT_EQ(done.exit_code, 0) << done.out << done.err;
  const auto json = nlohmann::json::parse(done.out);
  EXPECT_TRUE(json["ok"]);
  std::set<std::string> checks;
  for (const auto& check : json["checks"]) {
    EXPECT_TRUE(check["ok"]) << check;
    checks.insert(check["name"]);
  }
  std::set<std::string> expected = {"thread_ranks_f32", "thread_ranks_bf16", "thread_ranks_fp8",
                                    "abstract_sockets", "process_ranks"};
  if (gpu::device_count() == 0) {
    EXPECT_TRUE(json["machine"].contains("gpu"));
  } else {
    EXPECT_GT(json["machine"]["gpu_0"]["num_sms"], 0);
    if (gpu::device_count() > 1) {
      EXPECT_GT(json["machine"]["gpu_0_to_1"]["write_bytes_per_second"], 1e9);
    }
    if (json["machine"]["gpu_0"]["usable"]) {
      expected.insert({"cuda_bf16", "cuda_fp8"});
      if (gpu::device_count() > 1) expected.insert({"cuda_ranks_bf16", "cuda_ranks_fp8"});
    }
  }
  EXPECT_EQ(checks, expected);
  for (const char* rate : {"memory_read", "gemm_bf16", "gemm_f32"}) {
    EXPECT_GT(json["machine"][rate], 1e6) << rate;
  }
  EXPECT_GT(json["machine"]["memory"]["total_bytes"], 1'000'000);
  for (const char* text : {"cpu", "gemm_isa", "kernel_isa", "huge_pages"}) {
    EXPECT_FALSE(json["machine"][text].get<std::string>().empty()) << text;
  }
}

TEST(Doctor, TextNamesEveryCheck) {
  const Completed done = run_switchyard({"doctor"});
  EXPECT_EQ(done.exit_code, 0) << done.out << done.err;
  for (const char* part : {"native bf16", "memory read", "gemm bf16", "thread ranks f32",
                           "process ranks", "2 ranks, verified", "gpu"}) {
    EXPECT_THAT(done.out, HasSubstr(part));
  }
}

TEST(Doctor, AMachineShortOfMemoryIsDescribed) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer maps more than the limit";
#endif
  if (gpu::device_count() > 0) GTEST_SKIP() << "CUDA maps more than the limit";
  const Completed done = run_switchyard({"launch", "-n", "1", "--", "sh", "-c",
                                         "ulimit -v 400000; exec " SWITCHYARD_COMMAND " doctor"});
  EXPECT_EQ(done.exit_code, 1);
  EXPECT_THAT(done.out, HasSubstr("FAIL  rates"));
  EXPECT_THAT(done.out, HasSubstr("remedy: free some memory"));
  EXPECT_THAT(done.out, HasSubstr("ok    abstract sockets"));
}

}  // namespace
}  // namespace switchyard::cli
