// The host's view of a GPU; skipped where there is none.
#include "gpu/device.h"

#include <gtest/gtest.h>

#include <numeric>
#include <stdexcept>
#include <vector>

#include "model/errors.h"

namespace switchyard::gpu {
namespace {

class Device : public ::testing::Test {
 protected:
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << "no GPU";
  }
};

TEST_F(Device, TellsWhatItIs) {
  const DeviceInfo info = device_info(0);
  EXPECT_FALSE(info.name.empty());
  EXPECT_GT(info.num_sms, 0);
  EXPECT_GT(info.memory_bytes, info.l2_bytes);
  EXPECT_GE(info.memory_bytes, info.free_bytes);
  EXPECT_GT(info.max_shared_bytes, 48u << 10);
  EXPECT_GE(info.driver_version, info.runtime_version / 1000 * 1000);
  EXPECT_EQ(current_device(), 0);
  EXPECT_ERROR(device_info(-1), kInvalidArgument, "device -1");
  EXPECT_ERROR(set_device(99), kInvalidArgument, "device 99");
}

TEST_F(Device, BuffersHoldWhatIsPutThere) {
  std::vector<int> values(1000);
  std::iota(values.begin(), values.end(), 0);
  DeviceBuffer buffer(4000);
  EXPECT_EQ(residence_of(buffer.data()), Residence::kHere);
  EXPECT_EQ(residence_of(values.data()), Residence::kHost);
  buffer.upload(values.data(), 4000);
  std::vector<int> back(1000);
  buffer.download(back.data(), 4000);
  EXPECT_EQ(back, values);
  buffer.download(back.data(), 8, 40);
  EXPECT_EQ(back[0], 10);
  EXPECT_EQ(back[1], 11);

  const Stream stream;
  buffer.fill(0xff, stream);
  stream.synchronize();
  buffer.upload(values.data(), 4, 8);
  buffer.download(back.data(), 4000);
  EXPECT_EQ(back[1], -1);
  EXPECT_EQ(back[2], 0);

  EXPECT_ERROR(buffer.upload(values.data(), 8, 3996), kInvalidArgument, "8 bytes", "offset 3996",
               "4000");
  DeviceBuffer moved = std::move(buffer);
  EXPECT_EQ(moved.bytes(), 4000u);
  EXPECT_EQ(DeviceBuffer(0).data(), nullptr);
}

TEST_F(Device, TooMuchMemoryIsTold) {
  EXPECT_ERROR(DeviceBuffer(std::size_t{1} << 50), kCapacityExceeded, "1125899906842624", "free");
  DeviceBuffer still_works(16);
}

TEST_F(Device, EventsTime) {
  const Stream stream;
  DeviceBuffer buffer(std::size_t{256} << 20);
  Event start;
  Event end;
  buffer.fill(0, stream);
  start.record(stream);
  for (int i = 0; i < 10; ++i) buffer.fill(1, stream);
  end.record(stream);
  const double us = Event::elapsed_us(start, end);
  EXPECT_GT(us, 10 * 256e6 / 20e12 * 1e6);  // no GPU writes 20 TB/s
  EXPECT_LT(us, 1e6);
  flush_l2(stream);
  stream.synchronize();
}

TEST_F(Device, GraphsReplayWhatWasEnqueued) {
  const Stream stream;
  DeviceBuffer a(64);
  DeviceBuffer b(64);
  a.fill(0, stream);
  b.fill(0, stream);
  stream.synchronize();
  Graph graph = Graph::capture(stream, [&] {
    a.fill(1, stream);
    b.fill(2, stream);
  });
  EXPECT_EQ(graph.num_nodes(), 2);
  EXPECT_EQ(graph.num_kernel_nodes(), 0);
  std::uint8_t byte = 7;
  a.download(&byte, 1);
  EXPECT_EQ(byte, 0);
  graph.launch(stream);
  stream.synchronize();
  a.download(&byte, 1);
  EXPECT_EQ(byte, 1);
  b.download(&byte, 1, 63);
  EXPECT_EQ(byte, 2);
}

TEST_F(Device, CaptureForbidsAllocationAndSynchronisation) {
  const Stream stream;
  EXPECT_ERROR(Graph::capture(stream, [&] { const DeviceBuffer buffer(64); }), kSystem,
               "cudaMalloc", "cudaErrorStreamCaptureUnsupported");
  EXPECT_ERROR(Graph::capture(stream, [&] { stream.synchronize(); }), kSystem,
               "cudaStreamSynchronize");
  EXPECT_THROW(Graph::capture(stream, [] { throw std::runtime_error("mine"); }),
               std::runtime_error);
  DeviceBuffer buffer(64);
  buffer.fill(3, stream);
  stream.synchronize();
}

}  // namespace
}  // namespace switchyard::gpu
