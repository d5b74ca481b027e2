// Chunks: what is written is stored, in order, and nothing that another host may send does harm.
#include "network/records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <map>
#include <random>

#include "network/control_channel.h"
#include "network/hosts.h"
#include "network/network.h"

namespace switchyard::network {
namespace {

using ::testing::HasSubstr;

// Heaps of some ranks, of `kBytes` each.
class Heaps final : public Landing {
 public:
  static constexpr std::size_t kBytes = 1024;

  explicit Heaps(int ranks) {
    for (int r = 0; r < ranks; ++r) memory_[r].fill(0);
  }
  std::byte* at(std::uint32_t segment, const Target& target, std::uint64_t bytes,
                std::string& fault) override {
    if (segment == 7) return nullptr;  // was given up
    const auto heap = memory_.find(target.rank);
    if (segment != 1 || heap == memory_.end() || target.offset > kBytes ||
        bytes > kBytes - target.offset) {
      fault = "nowhere";
      return nullptr;
    }
    ++landed;
    return reinterpret_cast<std::byte*>(heap->second.data()) + target.offset;
  }
  std::uint64_t word(int rank, std::size_t index) const { return memory_.at(rank)[index]; }

  int landed = 0;

 private:
  std::map<int, std::array<std::uint64_t, kBytes / 8>> memory_;
};

class RecordsTest : public ::testing::Test {
 protected:
  RecordsTest() : chunk_(512), writer_(chunk_, 5), heaps_(3) {}

  std::string apply_chunk(std::uint64_t number = 5) {
    writer_.finish(0);
    return apply(chunk_, number, heaps_);
  }
  template <typename T>
  void poke(std::size_t offset, T value) {
    std::memcpy(chunk_.data() + offset, &value, sizeof value);
  }

  std::vector<std::byte> chunk_;
  ChunkWriter writer_;
  Heaps heaps_;
};

constexpr std::size_t kFirstRecord = sizeof(ChunkHeader);

TEST_F(RecordsTest, AChunkSaysHowManyRowsComeBeforeIt) {
  writer_.finish(0x1'2345'6789);
  EXPECT_EQ(rows_before(chunk_), 0x1'2345'6789u);
  EXPECT_EQ(rows_before(std::span(chunk_).first(8)), 0u);
  EXPECT_EQ(apply(chunk_, 5, heaps_), "");
}

TEST_F(RecordsTest, OnePayloadGoesToSeveralRanks) {
  const std::array<std::uint64_t, 3> payload{11, 12, 13};
  const std::array<Target, 2> targets{Target{64, 0, 0}, Target{128, 2, 0}};
  writer_.add(RecordKind::kCopy, 1, targets, 0, payload.data(), sizeof payload);
  EXPECT_EQ(apply_chunk(), "");
  EXPECT_EQ(heaps_.word(0, 8), 11U);
  EXPECT_EQ(heaps_.word(0, 10), 13U);
  EXPECT_EQ(heaps_.word(2, 18), 13U);
  EXPECT_EQ(heaps_.word(1, 8), 0U);
}

TEST_F(RecordsTest, ALaterRecordIsStoredLater) {
  const std::uint64_t first = 1, second = 2;
  const Target target{8, 1, 0};
  writer_.add(RecordKind::kWords, 1, {&target, 1}, 0, &first, sizeof first);
  writer_.add(RecordKind::kWords, 1, {&target, 1}, 0, &second, sizeof second);
  EXPECT_EQ(apply_chunk(), "");
  EXPECT_EQ(heaps_.word(1, 1), 2U);
}

TEST_F(RecordsTest, APieceGoesBehindThePieceBefore) {
  const std::uint64_t piece = 77;
  const Target target{8, 1, 0};
  writer_.add(RecordKind::kCopy, 1, {&target, 1}, 16, &piece, sizeof piece);
  EXPECT_EQ(apply_chunk(), "");
  EXPECT_EQ(heaps_.word(1, 3), 77U);
}

TEST_F(RecordsTest, StoresHaveRanksOfTheirOwn) {
  const std::array<Store, 2> stores{Store{4, 0, 9}, Store{12, 2, 8}};
  writer_.add(RecordKind::kStores, 1, {}, 0, stores.data(), sizeof stores);
  EXPECT_EQ(apply_chunk(), "");
  EXPECT_EQ(heaps_.word(0, 0), std::uint64_t{9} << 32);
  EXPECT_EQ(heaps_.word(2, 1), std::uint64_t{8} << 32);
}

TEST_F(RecordsTest, TheRoomIsWhatFits) {
  EXPECT_EQ(writer_.room(1), 512 - sizeof(ChunkHeader) - sizeof(RecordHeader) - sizeof(Target));
  const std::vector<std::byte> payload(writer_.room(1));
  const Target target{0, 0, 0};
  writer_.add(RecordKind::kCopy, 1, {&target, 1}, 0, payload.data(), payload.size());
  EXPECT_EQ(writer_.bytes(), 512U);
  EXPECT_EQ(writer_.room(0), 0U);
}

TEST_F(RecordsTest, WhatWasGivenUpIsPassedOver) {
  const std::uint64_t payload = 5;
  const Target target{8, 1, 0};
  writer_.add(RecordKind::kWords, 7, {&target, 1}, 0, &payload, sizeof payload);
  EXPECT_EQ(apply_chunk(), "");
  EXPECT_EQ(heaps_.landed, 0);
}

TEST_F(RecordsTest, AnotherNumberIsRefused) {
  EXPECT_THAT(apply_chunk(6), HasSubstr("chunk 5 in the place of chunk 6"));
}

TEST_F(RecordsTest, LengthsBeyondTheChunkAreRefused) {
  const std::uint64_t payload = 5;
  const Target target{8, 1, 0};
  writer_.add(RecordKind::kCopy, 1, {&target, 1}, 0, &payload, sizeof payload);
  writer_.finish(0);
  poke(kFirstRecord + offsetof(RecordHeader, bytes), std::uint32_t{0xffff'fff0});
  EXPECT_THAT(apply(chunk_, 5, heaps_), HasSubstr("are left"));
  poke(kFirstRecord + offsetof(RecordHeader, bytes), std::uint32_t{8});
  poke(kFirstRecord + offsetof(RecordHeader, num_targets), std::uint32_t{0xffff'ffff});
  EXPECT_THAT(apply(chunk_, 5, heaps_), HasSubstr("are left"));
  poke(offsetof(ChunkHeader, bytes), std::uint32_t{600});
  EXPECT_THAT(apply(chunk_, 5, heaps_), HasSubstr("in a slot of 512"));
  EXPECT_EQ(heaps_.landed, 0);
}

TEST_F(RecordsTest, UnalignedWordsAndUnknownKindsAreRefused) {
  const std::uint64_t payload = 5;
  const Target odd{9, 1, 0};
  writer_.add(RecordKind::kWords, 1, {&odd, 1}, 0, &payload, sizeof payload);
  EXPECT_THAT(apply_chunk(), HasSubstr("for offset 9"));
  poke(kFirstRecord, std::uint32_t{99});
  EXPECT_THAT(apply(chunk_, 5, heaps_), HasSubstr("kind 99"));
}

// Whatever is changed in a chunk: nothing is stored outside heaps (AddressSanitizer looks).
TEST_F(RecordsTest, ChangedBytesDoNoHarm) {
  const std::array<std::uint64_t, 3> payload{11, 12, 13};
  const std::array<Target, 2> targets{Target{64, 0, 0}, Target{128, 2, 0}};
  const std::array<Store, 2> stores{Store{4, 0, 9}, Store{12, 2, 8}};
  writer_.add(RecordKind::kCopy, 1, targets, 0, payload.data(), sizeof payload);
  writer_.add(RecordKind::kWords, 1, targets, 8, payload.data(), sizeof payload);
  writer_.add(RecordKind::kStores, 1, {}, 0, stores.data(), sizeof stores);
  writer_.finish(0);
  const std::vector<std::byte> good = chunk_;
  std::mt19937 random(1);
  int refused = 0;
  for (int trial = 0; trial < 20'000; ++trial) {
    chunk_ = good;
    for (int change = 0; change < 3; ++change) {
      chunk_[random() % 256] = static_cast<std::byte>(random());
    }
    refused += !apply(chunk_, 5, heaps_).empty();
  }
  EXPECT_GT(refused, 1'000);
}

TEST(Immediate, KeepsItsParts) {
  const Immediate full{Immediate::Kind::kCombineCredit, 0x3fff, 0xffff};
  const Immediate back = Immediate::unpack(full.pack());
  EXPECT_EQ(back.kind, full.kind);
  EXPECT_EQ(back.source, full.source);
  EXPECT_EQ(back.value, full.value);
}

TEST(ControlMessages, OnlyThoseThatMakeSenseAreRead) {
  ControlMessage message;
  message.kind = ControlMessage::Kind::kAbort;
  message.word = 3;
  message.record.peer = 2;
  const auto read = [&] {
    return read_control_message(reinterpret_cast<const std::byte*>(&message), 4).has_value();
  };
  EXPECT_TRUE(read());
  message.word = 5;  // rank 4 of 4
  EXPECT_FALSE(read());
  message.word = protocol::kCalledOff | 4;
  EXPECT_TRUE(read());
  message.word = 3;
  message.record.peer = -1;
  EXPECT_FALSE(read());
  message.kind = ControlMessage::Kind::kPropose;
  EXPECT_FALSE(read());
  message.record.peer = 0;
  EXPECT_TRUE(read());
  message.record.witness = 4;
  EXPECT_FALSE(read());
  message.record.witness = 0;
  message.kind = static_cast<ControlMessage::Kind>(8);
  EXPECT_FALSE(read());
  message.kind = ControlMessage::Kind::kDecline;
  EXPECT_TRUE(read());
  message.magic = 1;
  EXPECT_FALSE(read());
}

TEST(HostsOfRanks, EachRankSendsToOneOfEveryOtherHost) {
  const Hosts hosts({9, 9, 9, 4, 4, 9});
  EXPECT_EQ(hosts.num_hosts(), 2);
  EXPECT_EQ(hosts.ranks_of(0), (std::vector<int>{0, 1, 2, 5}));
  EXPECT_EQ(hosts.gateway(0, 1), 3);
  EXPECT_EQ(hosts.gateway(1, 1), 4);
  EXPECT_EQ(hosts.gateway(2, 1), 3);
  EXPECT_EQ(hosts.gateway(4, 0), 1);
  EXPECT_EQ(hosts.sources_of(3), (std::vector<int>{0, 2}));
  EXPECT_EQ(hosts.sources_of(2), (std::vector<int>{}));
}

}  // namespace
}  // namespace switchyard::network
