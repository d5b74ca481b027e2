// Facts of GPUs: what a file may be, and the floor that they set.
#include "machine/gpu_facts.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "model/errors.h"
#include "model/temporary_directory.h"

namespace switchyard::machine {
namespace {

using nlohmann::json;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

GpuFacts h200() { return known_gpu_facts("NVIDIA H200").value(); }

TEST(GpuFloor, IsTheLargerOfStreamingAndArithmetic) {
  for (const DType compute : {DType::kBF16, DType::kF8E4M3}) {
    EXPECT_NEAR(*floor_us(h200(), {0, 0, 0}, compute, 1), 7, 1e-9);
    EXPECT_NEAR(*floor_us(h200(), {4'600'000'000, 0, 0}, compute, 1), 1007, 1e-6);
  }
  EXPECT_NEAR(*floor_us(h200(), {4'600'000, 750e9, 0}, DType::kBF16, 1), 1000, 1e-6);
  EXPECT_NEAR(*floor_us(h200(), {4'600'000, 1300e9, 0}, DType::kF8E4M3, 1), 1000, 1e-6);
}

TEST(GpuFloor, OfRanksHasNvlink) {
  for (const DType compute : {DType::kBF16, DType::kF8E4M3}) {
    EXPECT_NEAR(*floor_us(h200(), {0, 0, 0}, compute, 2), 10, 1e-9);
    EXPECT_NEAR(*floor_us(h200(), {4'600'000'000, 0, 330'000'000}, compute, 2), 1010, 1e-6);
    EXPECT_NEAR(*floor_us(h200(), {4'600'000'000, 0, 660'000'000}, compute, 2), 2000, 1e-6);
  }
  EXPECT_NEAR(*floor_us(h200(), {0, 1500e9, 330'000'000}, DType::kBF16, 8), 2000, 1e-6);
}

// The numbers that earlier results were divided by.
TEST(GpuFacts, OfTheH200) {
  const GpuFacts facts = h200();
  EXPECT_DOUBLE_EQ(facts.launch_seconds.value, 7e-6);
  EXPECT_DOUBLE_EQ(facts.ranks_launch_seconds->value, 10e-6);
  EXPECT_DOUBLE_EQ(facts.read_bytes_per_second.value, 4.6e12);
  EXPECT_DOUBLE_EQ(facts.nvlink_bytes_per_second->value, 330e9);
  EXPECT_DOUBLE_EQ(facts.bf16_flops_per_second->value, 750e12);
  EXPECT_DOUBLE_EQ(facts.fp8_flops_per_second->value, 1300e12);
  EXPECT_FALSE(known_gpu_facts("NVIDIA H100 PCIe").has_value());
  EXPECT_FALSE(known_gpu_facts("NVIDIA H200 NVL").has_value());
}

TEST(GpuFacts, OfTheH100) {
  const GpuFacts facts = known_gpu_facts("NVIDIA H100 80GB HBM3").value();
  EXPECT_DOUBLE_EQ(facts.launch_seconds.value, 6e-6);
  EXPECT_DOUBLE_EQ(facts.read_bytes_per_second.value, 3.2e12);
  EXPECT_DOUBLE_EQ(facts.bf16_flops_per_second->value, 760e12);
  EXPECT_DOUBLE_EQ(facts.fp8_flops_per_second->value, 1330e12);
}

json roof(double value) { return {{"value", value}, {"source", "a test"}}; }

json good_facts() {
  return {{"gpu", "NVIDIA H100 80GB HBM3"},
          {"roofs",
           {{"launch_us", roof(6)},
            {"ranks_launch_us", roof(9)},
            {"read_gb_per_s", roof(2900)},
            {"nvlink_gb_per_s", roof(320)},
            {"bf16_tflop_per_s", roof(600)},
            {"fp8_tflop_per_s", roof(1100)}}}};
}

TEST(GpuFacts, AreReadInUnitsOfOne) {
  const test::TemporaryDirectory directory;
  test::write_file(directory / "h100.json", good_facts().dump());
  const GpuFacts facts = read_gpu_facts(directory / "h100.json");
  EXPECT_EQ(facts.gpu, "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(facts.read_bytes_per_second.source, "a test");
  EXPECT_NEAR(*floor_us(facts, {2'900'000'000, 0, 0}, DType::kBF16, 1), 1006, 1e-6);
  EXPECT_NEAR(*floor_us(facts, {0, 600e9, 0}, DType::kBF16, 1), 1000, 1e-6);
  EXPECT_NEAR(*floor_us(facts, {0, 2200e9, 0}, DType::kF8E4M3, 1), 2000, 1e-6);
  EXPECT_NEAR(*floor_us(facts, {0, 0, 640'000'000}, DType::kBF16, 2), 2000, 1e-6);
  EXPECT_NEAR(*floor_us(facts, {0, 0, 0}, DType::kBF16, 2), 9, 1e-9);
}

TEST(GpuFacts, WhatAPassNeedsMayBeMissing) {
  json little = good_facts();
  for (const char* name : {"ranks_launch_us", "nvlink_gb_per_s", "fp8_tflop_per_s"}) {
    little["roofs"].erase(name);
  }
  const GpuFacts facts = parse_gpu_facts(little.dump(), "a.json");
  EXPECT_THAT(missing_roofs(facts, DType::kBF16, 1), IsEmpty());
  EXPECT_TRUE(floor_us(facts, {}, DType::kBF16, 1).has_value());
  EXPECT_THAT(missing_roofs(facts, DType::kF8E4M3, 1), ElementsAre("fp8_tflop_per_s"));
  EXPECT_FALSE(floor_us(facts, {}, DType::kF8E4M3, 1).has_value());
  EXPECT_THAT(missing_roofs(facts, DType::kBF16, 2),
              ElementsAre("ranks_launch_us", "nvlink_gb_per_s"));
  EXPECT_FALSE(floor_us(facts, {}, DType::kBF16, 2).has_value());
}

TEST(GpuFacts, EverythingElseIsRefused) {
  const auto refused = [](const std::string& text, std::initializer_list<const char*> parts) {
    SCOPED_TRACE(text);
    EXPECT_ERROR(parse_gpu_facts(text, "a.json"), kInvalidFile, "a.json",
                 "switchyard bench --help");
    test::expect_error([&] { parse_gpu_facts(text, "a.json"); }, ErrorCode::kInvalidFile, parts);
  };
  const auto without = [](const char* pointer) {
    const json::json_pointer at(pointer);
    json facts = good_facts();
    facts[at.parent_pointer()].erase(at.back());
    return facts.dump();
  };
  const auto with = [](const char* pointer, const json& value) {
    json facts = good_facts();
    facts[json::json_pointer(pointer)] = value;
    return facts.dump();
  };
  refused("", {"not JSON"});
  refused("[]", {"the file is [], not an object"});
  refused(std::string(100'000, '['), {"nests too deep"});
  refused(without("/gpu"), {"no 'gpu'"});
  refused(without("/roofs"), {"no 'roofs'"});
  refused(without("/roofs/launch_us"), {"no 'launch_us'"});
  refused(without("/roofs/read_gb_per_s"), {"no 'read_gb_per_s'"});
  refused(without("/roofs/read_gb_per_s/source"), {"'read_gb_per_s' has no 'source'"});
  refused(without("/roofs/fp8_tflop_per_s/value"), {"'fp8_tflop_per_s' has no 'value'"});
  refused(with("/gpu", ""), {"'gpu'"});
  refused(with("/gpu", 200), {"'gpu'", "200"});
  refused(with("/roofs", 7), {"'roofs' is 7, not an object"});
  refused(with("/roofs/launch_us", 7), {"'launch_us' is 7, not an object"});
  refused(with("/roofs/launch_us/value", 0), {"'launch_us'", "above 0"});
  refused(with("/roofs/launch_us/value", "7"), {"'launch_us'", "above 0"});
  refused(with("/roofs/launch_us/source", ""), {"'launch_us'", "'source'"});
  refused(with("/roofs/read_tb_per_s", roof(4.6)), {"'read_tb_per_s', which is unknown"});
  refused(with("/roofs/launch_us/unit", "us"), {"'unit', which is unknown"});
  refused(with("/note", "x"), {"'note', which is unknown"});
}

TEST(GpuFacts, FilesThatAreNotThere) {
  const test::TemporaryDirectory directory;
  EXPECT_ERROR(read_gpu_facts(directory / "none.json"), kInvalidFile, "none.json",
               "check its name");
}

}  // namespace
}  // namespace switchyard::machine
