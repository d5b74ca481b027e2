// A fixture for tests that need a GPU. By itself, for tests that nvcc compiles: it takes little of
// the library's other headers.
#pragma once

#include <gtest/gtest.h>

#include "gpu/device.h"

namespace switchyard::testing {

template <typename Fixture>
class OnGpu : public Fixture {
 protected:
  void SetUp() override {
    if (gpu::device_count() == 0) GTEST_SKIP() << "this machine has no GPU";
  }
};

}  // namespace switchyard::testing
