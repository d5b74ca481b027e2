// A channel: bytes that it takes from its peer, and when it stops listening.
#include "fabric/channel.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fabric/frames.h"
#include "fabric/rendezvous.h"

namespace switchyard::test {
namespace {

const Intake kHello = intake_before_hello();
const Intake kData = intake_of_contributions({CallKind::kAllGather, 10});

class ChannelTest : public ::testing::Test {
 protected:
  ChannelTest() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    peer_ = UniqueFd(ends[0]);
    channel_ = Channel(UniqueFd(ends[1]), {});
  }

  void send(const void* bytes, std::size_t count) {
    ASSERT_EQ(::send(peer_.get(), bytes, count, MSG_NOSIGNAL), static_cast<ssize_t>(count));
  }
  void send_header(FrameKind kind, std::uint64_t payload_bytes) {
    FrameHeader header{.kind = kind, .payload_bytes = payload_bytes};
    send(&header, sizeof header);
  }
  void send_frame(FrameKind kind, const std::string& payload) {
    send_header(kind, payload.size());
    send(payload.data(), payload.size());
  }

  UniqueFd peer_;
  Channel channel_;
};

TEST_F(ChannelTest, AFrameComesInPieces) {
  channel_.set_intake(kData);
  FrameHeader header{.kind = FrameKind::kContribution, .payload_bytes = 3};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  bytes += "abc";
  for (std::size_t i = 0; i + 1 < bytes.size(); ++i) {
    send(&bytes[i], 1);
    EXPECT_FALSE(channel_.receive()) << i;
  }
  send(&bytes.back(), 1);
  const std::optional<Frame> frame = channel_.receive();
  ASSERT_TRUE(frame);
  EXPECT_TRUE(frame->has_payload());
  EXPECT_EQ(std::memcmp(frame->payload->data(), "abc", 3), 0);
  EXPECT_FALSE(channel_.finished());
}

TEST_F(ChannelTest, AHelloOf625MegabytesEndsWithItsHeader) {
  channel_.set_intake(kHello);
  send_header(FrameKind::kHello, 625'000'000);
  EXPECT_FALSE(channel_.receive());
  EXPECT_TRUE(channel_.garbled());
}

TEST_F(ChannelTest, AKindThatIsNotExpectedEndsWithItsHeader) {
  for (const std::uint32_t kind : {1u, 2u, 3u, 4u, 5u, 6u, 31u, 32u, 33u, 64u, ~0u}) {
    Channel& channel = channel_;
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
    peer_ = UniqueFd(ends[0]);
    channel = Channel(UniqueFd(ends[1]), kHello);
    send_header(static_cast<FrameKind>(kind), 0);
    EXPECT_FALSE(channel.receive()) << kind;
    EXPECT_TRUE(channel.garbled()) << kind;
  }
}

TEST_F(ChannelTest, ALongerPayloadThanExpectedIsDroppedAndTheNextFrameRead) {
  channel_.set_intake(kData);
  send_frame(FrameKind::kContribution, std::string(11, 'x'));
  send_frame(FrameKind::kContribution, std::string(10, 'y'));
  std::optional<Frame> frame = channel_.receive();
  ASSERT_TRUE(frame);
  EXPECT_EQ(frame->header.payload_bytes, 11U);
  EXPECT_FALSE(frame->has_payload());
  EXPECT_TRUE(frame->payload->empty());
  frame = channel_.receive();
  ASSERT_TRUE(frame);
  ASSERT_TRUE(frame->has_payload());
  EXPECT_EQ(frame->payload->at(9), std::byte{'y'});
}

TEST_F(ChannelTest, ADroppedPayloadCostsNoMemory) {
  channel_.set_intake(kData);
  constexpr std::size_t kBytes = 300'000'000;
  send_header(FrameKind::kContribution, kBytes);
  const auto peak_kilobytes = [] {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmHWM:")) return std::stol(line.substr(6));
    }
    return 0L;
  };
  const long before = peak_kilobytes();
  const std::string some(1 << 16, 'x');
  std::optional<Frame> frame;
  for (std::size_t sent = 0; sent < kBytes;) {
    const ssize_t took =
        ::send(peer_.get(), some.data(), std::min(some.size(), kBytes - sent), MSG_NOSIGNAL);
    if (took > 0) sent += static_cast<std::size_t>(took);
    frame = channel_.receive();
  }
  ASSERT_TRUE(frame);
  EXPECT_EQ(frame->header.payload_bytes, kBytes);
  EXPECT_LT(peak_kilobytes() - before, 20'000);
}

TEST_F(ChannelTest, AFailureReportHasABoundOfItsOwn) {
  channel_.set_intake(kData);
  send_frame(FrameKind::kFailure, std::string(kMaxFailureBytes, 'x'));
  const std::optional<Frame> frame = channel_.receive();
  ASSERT_TRUE(frame);
  EXPECT_TRUE(frame->has_payload());
  send_header(FrameKind::kFailure, kMaxFailureBytes + 1);
  EXPECT_FALSE(channel_.receive());
  EXPECT_TRUE(channel_.garbled());
}

TEST_F(ChannelTest, OfAnotherVersionOnlyTheVersionIsRead) {
  channel_.set_intake(kHello);
  FrameHeader header{
      .version = kProtocolVersion + 1, .kind = static_cast<FrameKind>(77), .payload_bytes = 5};
  // A header of another version may be shorter.
  send(&header, offsetof(FrameHeader, kind));
  const std::optional<Frame> frame = channel_.receive();
  ASSERT_TRUE(frame);
  EXPECT_EQ(frame->header.version, kProtocolVersion + 1);
  EXPECT_TRUE(frame->payload->empty());
  EXPECT_TRUE(channel_.garbled());
  EXPECT_FALSE(channel_.receive());
}

TEST_F(ChannelTest, DescriptorsAreTakenOnlyWhereTheyAreExpected) {
  for (const bool expected : {false, true}) {
    Intake intake = kData;
    intake.take_descriptors = expected;
    channel_.set_intake(intake);
    const std::size_t fds_before = num_open_fds();
    Channel sender(UniqueFd(::fcntl(peer_.get(), F_DUPFD_CLOEXEC, 0)), {});
    Frame frame;
    frame.header.kind = FrameKind::kContribution;
    frame.fd = std::make_shared<const UniqueFd>(::fcntl(peer_.get(), F_DUPFD_CLOEXEC, 0));
    sender.queue(std::move(frame));
    sender.flush();
    sender = Channel();
    const std::optional<Frame> received = channel_.receive();
    ASSERT_TRUE(received);
    EXPECT_EQ(received->fd != nullptr, expected);
    EXPECT_EQ(num_open_fds(), fds_before + (expected ? 1 : 0));
  }
}

}  // namespace
}  // namespace switchyard::test
