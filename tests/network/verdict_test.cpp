// The decision on what ended a world over hosts: the proxy of one rank of three, each on a host of
// its own. The test plays the other two.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "network/proxy.h"
#include "protocol/atomics.h"
#include "support/chaos.h"
#include "support/ranks.h"

namespace switchyard::network {
namespace {

using protocol::Control;
using protocol::FailureRecord;
using protocol::Phase;
using std::chrono::milliseconds;
using Kind = ControlMessage::Kind;

constexpr int kRanks = 3;

FailureRecord record_of(int waiter, int peer, Phase phase) {
  FailureRecord record{};
  record.waiter = record.witness = waiter;
  record.peer = peer;
  record.phase = phase;
  record.epoch = 5;
  return record;
}

class VerdictTest : public ::testing::Test {
 protected:
  void play(int rank, milliseconds verdict_time = test::kGenerous) {
    rank_ = rank;
    ChaosOptions calm;
    calm.full_queue = 0;
    const auto chaos = std::make_shared<Chaos>(kRanks, calm);
    std::vector<ControlChannel> channels(kRanks);
    std::vector<std::byte*> bases;
    for (int r = 0; r < kRanks; ++r) {
      const auto i = static_cast<std::size_t>(r);
      bases.push_back(reinterpret_cast<std::byte*>(&controls_[i]));
      if (r == rank) continue;
      std::array<int, 2> ends{};
      ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
      channels[i] = ControlChannel(UniqueFd(ends[0]), kRanks);
      peers_[i] = ControlChannel(UniqueFd(ends[1]), kRanks);
      networks_[i] = chaos->attach(r);
      networks_[i]->add(memory_);
    }
    ProxyOptions options;
    options.windows = {WindowOptions::kLeastChunk, 1};
    options.verdict_time = verdict_time;
    std::vector<std::uint64_t*> alive(kRanks);
    alive[static_cast<std::size_t>(rank)] = &alive_;
    proxy_ = std::make_shared<Proxy>(Hosts({0, 1, 2}), rank, options, chaos->attach(rank),
                                     std::move(alive), nullptr, std::move(channels),
                                     std::vector<std::string>{"a", "b", "c"});
    proxy_->start(std::vector<Blob>(kRanks, Blob(1)));
    heap_.emplace(proxy_, bases, sizeof(Control));
  }
  void TearDown() override {
    heap_.reset();
    for (ControlChannel& peer : peers_) peer.close();
    proxy_.reset();
  }

  // As rank `from`.
  void say(int from, Kind kind, const FailureRecord& record = {}, std::uint32_t segment = 0) {
    ControlMessage message;
    message.kind = kind;
    message.segment = segment;
    message.record = record;
    if (kind == Kind::kAbort) message.word = static_cast<std::uint64_t>(from) + 1;
    peers_[static_cast<std::size_t>(from)].send(message);
  }
  // The next message that rank `at` hears, apart from beats.
  ControlMessage heard(int at) {
    ControlMessage found;
    EXPECT_TRUE(test::eventually([&] {
      while (const auto message = peers_[static_cast<std::size_t>(at)].receive()) {
        found = *message;
        if (found.kind != Kind::kAlive && found.kind != Kind::kBeat) return true;
      }
      return false;
    })) << "rank "
        << at << " hears nothing";
    return found;
  }
  void expect_heard(int at, Kind kind, int waiter, int peer) {
    const ControlMessage message = heard(at);
    EXPECT_EQ(message.kind, kind);
    EXPECT_EQ(message.record.waiter, waiter);
    EXPECT_EQ(message.record.peer, peer);
  }

  bool is_decided() {
    return protocol::load_acquire(&controls_[static_cast<std::size_t>(rank_)].abort) != 0;
  }
  void expect_verdict(int waiter, int peer) {
    ASSERT_TRUE(test::eventually([&] { return is_decided(); }));
    const Control& mine = controls_[static_cast<std::size_t>(rank_)];
    EXPECT_EQ(mine.abort, static_cast<std::uint64_t>(rank_) + 1);
    EXPECT_EQ(mine.failure.waiter, waiter);
    EXPECT_EQ(mine.failure.peer, peer);
  }

  int rank_ = 0;
  std::array<Control, kRanks> controls_{};
  std::uint64_t alive_ = 0;
  std::array<std::byte, 64> memory_{};  // of the peers' networks
  std::array<ControlChannel, kRanks> peers_;
  std::array<std::unique_ptr<Network>, kRanks> networks_;
  std::shared_ptr<Proxy> proxy_;
  std::optional<RemoteHeap> heap_;
};

TEST_F(VerdictTest, TheFirstHostDecidesAtOnceAndTellsAll) {
  play(0);
  EXPECT_TRUE(heap_->propose(record_of(0, 2, Phase::kCounts)));
  expect_verdict(0, 2);
  expect_heard(1, Kind::kAbort, 0, 2);
  expect_heard(2, Kind::kAbort, 0, 2);
}

TEST_F(VerdictTest, TheFirstProposalThatItHearsIsTheVerdict) {
  play(0);
  say(2, Kind::kPropose, record_of(2, 1, Phase::kCombine));
  expect_verdict(2, 1);
  // Late, and earlier in the order of the protocol; it changes nothing.
  say(1, Kind::kPropose, record_of(1, 2, Phase::kCounts));
  EXPECT_TRUE(heap_->propose(record_of(0, 2, Phase::kLink)));
  expect_heard(1, Kind::kAbort, 2, 1);
  expect_heard(2, Kind::kAbort, 2, 1);
  std::this_thread::sleep_for(milliseconds(50));
  expect_verdict(2, 1);
}

TEST_F(VerdictTest, OthersAskTheFirstHostAndTakeItsVerdict) {
  play(2);
  EXPECT_TRUE(heap_->propose(record_of(2, 1, Phase::kCombine)));
  expect_heard(0, Kind::kPropose, 2, 1);
  EXPECT_FALSE(is_decided());
  say(0, Kind::kAbort, record_of(0, 1, Phase::kLink));
  expect_verdict(0, 1);
  expect_heard(1, Kind::kAbort, 0, 1);  // it may not have heard of rank 0
}

TEST_F(VerdictTest, AProposalIsPassedOn) {
  play(1);
  say(2, Kind::kPropose, record_of(2, 0, Phase::kCombine));
  expect_heard(0, Kind::kPropose, 2, 0);
  EXPECT_FALSE(is_decided());
  say(0, Kind::kAbort, record_of(2, 0, Phase::kCombine));
  expect_verdict(2, 0);
  expect_heard(2, Kind::kAbort, 2, 0);
}

TEST_F(VerdictTest, WhoHasLetGoOfTheHeapDeclinesAndIsNotAskedAgain) {
  play(2);
  EXPECT_TRUE(heap_->propose(record_of(2, 1, Phase::kCombine)));
  expect_heard(0, Kind::kPropose, 2, 1);
  say(0, Kind::kDecline);
  expect_heard(1, Kind::kPropose, 2, 1);
  say(1, Kind::kDecline);
  expect_verdict(2, 1);
}

TEST_F(VerdictTest, WordsOfOtherHeapsChangeNothing) {
  play(1);
  say(0, Kind::kAbort, record_of(0, 2, Phase::kLink), 7);
  say(0, Kind::kPropose, record_of(0, 2, Phase::kLink), 7);
  const ControlMessage answer = heard(0);
  EXPECT_EQ(answer.kind, Kind::kDecline);
  EXPECT_EQ(answer.segment, 7U);
  say(0, Kind::kDecline);  // to a proposal that was not made
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(is_decided());
}

// The one that is asked has died, or stands still.
TEST_F(VerdictTest, NobodyWaitsForLong) {
  for (const bool dies : {false, true}) {
    for (const Phase phase : {Phase::kLink, Phase::kCombine}) {
      play(2, dies ? test::kGenerous : milliseconds(40));
      const auto start = test::Clock::now();
      EXPECT_TRUE(heap_->propose(record_of(2, 1, phase)));
      expect_heard(0, Kind::kPropose, 2, 1);
      if (dies) {
        peers_[0].close();
        peers_[1].close();
      }
      expect_verdict(2, 1);
      EXPECT_LT(test::since(start), test::kAtOnce);
      TearDown();
      controls_ = {};
    }
  }
}

// A rank that has broken the protocol is not asked, and not believed.
TEST_F(VerdictTest, ALiarAccusesNobody) {
  play(2);
  const Immediate credits{Immediate::Kind::kDispatchCredit, 0, 5};  // for chunks that were not sent
  ASSERT_TRUE(networks_[0]->signal(2, credits.pack()));
  expect_heard(1, Kind::kPropose, 2, 0);
  say(0, Kind::kAbort, record_of(0, 1, Phase::kLink));
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(is_decided());
  say(1, Kind::kAbort, record_of(2, 0, Phase::kLink));
  expect_verdict(2, 0);
}

}  // namespace
}  // namespace switchyard::network
