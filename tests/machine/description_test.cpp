#include "machine/description.h"

#include <gtest/gtest.h>

#include "switchyard/layer.h"

namespace switchyard::machine {
namespace {

TEST(MachineDescription, NamesItsGpu) {
  EXPECT_EQ(processor_of("NVIDIA H200, 132 SMs, CUDA 13.0"), "NVIDIA H200");
  EXPECT_EQ(processor_of("8 x NVIDIA H200, 132 SMs, CUDA 13.0"), "NVIDIA H200");
  EXPECT_EQ(processor_of("16 x NVIDIA H100 80GB HBM3, 132 SMs"), "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(processor_of("x NVIDIA, 1 SMs"), "x NVIDIA");
  EXPECT_EQ(processor_of("12"), "12");
  EXPECT_EQ(processor_of(""), "");
}

TEST(MachineDescription, OfTheProcessorHasItsThreads) {
  EXPECT_NE(describe_machine(Backend::kCpu, 1).find(" hardware threads"), std::string::npos);
}

}  // namespace
}  // namespace switchyard::machine
