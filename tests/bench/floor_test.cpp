// Which GPU has a floor, and what is said where there is none.
#include "bench/floor.h"

#include <gmock/gmock.h>

#include "model/errors.h"

namespace switchyard::bench {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

machine::GpuFacts facts_of(const std::string& gpu) {
  machine::GpuFacts facts{.gpu = gpu};
  facts.launch_seconds = {8e-6, "a test"};
  facts.read_bytes_per_second = {2e12, "a test"};
  facts.bf16_flops_per_second = machine::Roof{500e12, "a test"};
  return facts;
}

TEST(BenchFloor, IsThatOfTheGpuItself) {
  const FloorChoice choice = choose_floor("NVIDIA H200", 1, 1, DType::kBF16, {});
  ASSERT_TRUE(choice.facts.has_value());
  EXPECT_EQ(choice.facts->gpu, "NVIDIA H200");
  EXPECT_EQ(choice.why_not, "");
}

// An H100 PCIe has half the bandwidth of an H100 SXM: that one's floor would make it look slow.
TEST(BenchFloor, OtherGpusHaveNone) {
  for (const char* gpu : {"NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H20", ""}) {
    const FloorChoice choice = choose_floor(gpu, 8, 1, DType::kBF16, {});
    EXPECT_FALSE(choice.facts.has_value()) << gpu;
    EXPECT_THAT(choice.why_not,
                AllOf(HasSubstr("no floor"), HasSubstr(gpu), HasSubstr("--machine-facts")));
  }
}

TEST(BenchFloor, GivenFactsAreUsed) {
  const std::string gpu = "NVIDIA H100 80GB HBM3";
  const FloorChoice choice = choose_floor(gpu, 1, 1, DType::kBF16, facts_of(gpu));
  ASSERT_TRUE(choice.facts.has_value());
  EXPECT_EQ(choice.facts->read_bytes_per_second.value, 2e12);
  // Also in place of known ones.
  const FloorChoice own = choose_floor("NVIDIA H200", 1, 1, DType::kBF16, facts_of("NVIDIA H200"));
  ASSERT_TRUE(own.facts.has_value());
  EXPECT_EQ(own.facts->read_bytes_per_second.value, 2e12);
}

TEST(BenchFloor, FactsOfAnotherGpuAreRefused) {
  EXPECT_ERROR(choose_floor("NVIDIA H100 80GB HBM3", 1, 1, DType::kBF16, facts_of("NVIDIA H200")),
               kInvalidArgument, "'NVIDIA H200'", "'NVIDIA H100 80GB HBM3'");
}

TEST(BenchFloor, RanksThatShareAGpuHaveNone) {
  const FloorChoice choice = choose_floor("NVIDIA H200", 1, 2, DType::kBF16, {});
  EXPECT_FALSE(choice.facts.has_value());
  EXPECT_THAT(choice.why_not, HasSubstr("2 ranks share 1 GPU"));
  EXPECT_TRUE(choose_floor("NVIDIA H200", 2, 2, DType::kBF16, {}).facts.has_value());
}

TEST(BenchFloor, NamesTheRoofsThatAreMissing) {
  const std::string gpu = "NVIDIA H100 80GB HBM3";
  const FloorChoice fp8 = choose_floor(gpu, 2, 2, DType::kF8E4M3, facts_of(gpu));
  EXPECT_FALSE(fp8.facts.has_value());
  EXPECT_THAT(fp8.why_not, AllOf(HasSubstr("fp8_tflop_per_s"), HasSubstr("ranks_launch_us"),
                                 HasSubstr("nvlink_gb_per_s"), HasSubstr("--machine-facts")));
}

}  // namespace
}  // namespace switchyard::bench
