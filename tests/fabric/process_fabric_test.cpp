#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <fstream>
#include <string>
#include <string_view>

#include "fabric/bootstrap.h"
#include "fabric/fabric.h"
#include "fabric/rendezvous.h"
#include "model/errors.h"
#include "support/ranks.h"

namespace switchyard::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::size_t num_symmetric_mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:switchyard") != std::string::npos;
  }
  return count;
}

class ProcessWorld : public ::testing::TestWithParam<int> {};

TEST_P(ProcessWorld, GathersAndSharesMemory) {
  const int size = GetParam();
  expect_world(size, [&](World& world) {
    EXPECT_STREQ(world.fabric_name(), "shared memory");
    for (const std::size_t count : {0, 1, 7, 100'000}) check_all_gather(world, count);
    check_symmetric_memory(world, (std::size_t{5} << 20) + 8);
    for (int i = 0; i < 50; ++i) check_all_gather(world, 1);
    for (int peer = 0; peer < size; ++peer) EXPECT_EQ(world.fabric().liveness(peer), "");
    world.barrier();
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, ProcessWorld, ::testing::Values(1, 2, 3, 4, 8));

TEST(ProcessFabric, MessagesLargerThanTheSocketBuffersPass) {
  expect_world(3, [&](World& world) { check_all_gather(world, 1'000'000); });
}

TEST(ProcessFabric, RanksMayLetGoOfMemoryAndWorldAtDifferentTimes) {
  const std::string rendezvous = fresh_rendezvous();
  SharedWithChildren<std::atomic<bool>> others_left;
  expect_processes(2, [&](int rank) {
    std::shared_ptr<SymmetricSegment> segment;
    {
      World world = join(rank, 2, rendezvous);
      segment = world.fabric().allocate(4096);
      segment->base(rank)[0] = std::byte{42};
      world.barrier();
    }
    if (rank == 0) {
      segment.reset();
      others_left->store(true);
      return;
    }
    EXPECT_TRUE(eventually([&] { return others_left->load(); }));
    EXPECT_EQ(segment->base(0)[0], std::byte{42});
    segment->base(0)[4095] = std::byte{1};
  });
}

TEST(ProcessFabric, RefusesBadArguments) {
  error_of(ErrorCode::kInvalidArgument, [] { join(2, 2, "x"); });
  error_of(ErrorCode::kInvalidArgument, [] { join(-1, 2, "x"); });
  error_of(ErrorCode::kInvalidArgument, [] { join(0, 0, "x"); });
  error_of(ErrorCode::kInvalidArgument, [] { join(0, 1, "x", milliseconds(0)); });
}

TEST(ProcessFabric, DifferentCallsAreASpecMismatchAndTheWorldGoesOn) {
  expect_world(3, [&](World& world) {
    const int rank = world.rank();
    const auto odd = static_cast<std::size_t>(rank == 1);
    EXPECT_ERROR(world.fabric().allocate(4096 + odd), kSpecMismatch,
                 "rank 1 called allocate of 4097 bytes");
    error_of(ErrorCode::kSpecMismatch, [&] { check_all_gather(world, 1 + odd); });
    error_of(ErrorCode::kInvalidArgument, [&] { world.fabric().allocate(0); });
    for (const std::size_t bytes : {std::size_t{1} << 62, ~std::size_t{0}}) {
      EXPECT_THAT(error_of(ErrorCode::kCapacityExceeded, [&] { world.fabric().allocate(bytes); }),
                  AllOf(HasSubstr("rank 0: "), HasSubstr(std::to_string(bytes) + " bytes")));
    }
    check_all_gather(world, 5);
    check_symmetric_memory(world, 8192);
  });
}

// The ways in which one rank can die in the middle of a world.
class DeadRank : public ::testing::TestWithParam<int> {};

TEST_P(DeadRank, IsNamedAtOnceWhenItDiesBeforeItsCall) {
  const int victim = GetParam();
  const std::string rendezvous = fresh_rendezvous();
  const auto codes = run_processes(4, [&](int rank) {
    World world = join(rank, 4, rendezvous);
    check_all_gather(world, 4);
    if (rank == victim) ::kill(::getpid(), SIGKILL);
    const Clock::time_point start = Clock::now();
    const std::string message = timeout_of(ErrorCode::kAborted, victim, [&] { world.barrier(); });
    EXPECT_THAT(message, AllOf(HasSubstr("rank " + std::to_string(victim) + " (process "),
                               HasSubstr("closed its connection")));
    EXPECT_LT(since(start), kAtOnce);
    EXPECT_THAT(timeout_of(ErrorCode::kAborted, victim, [&] { world.barrier(); }),
                HasSubstr("dead"));
  });
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(codes[static_cast<std::size_t>(rank)], rank == victim ? kKilled : 0);
  }
}

TEST_P(DeadRank, IsNamedAtOnceWhenItIsKilledInACollective) {
  const int victim = GetParam();
  const int killer = (victim + 1) % 4;
  const std::string rendezvous = fresh_rendezvous();
  SharedWithChildren<std::atomic<pid_t>> victim_pid;
  const auto codes = run_processes(4, [&](int rank) {
    World world = join(rank, 4, rendezvous);
    if (rank == victim) victim_pid->store(::getpid());
    if (rank == killer) {
      // The collective cannot complete without this rank, so the victim dies before or in it.
      EXPECT_TRUE(eventually([&] { return victim_pid->load() != 0; }));
      ::kill(victim_pid->load(), SIGKILL);
      EXPECT_TRUE(eventually([&] { return !world.fabric().liveness(victim).empty(); }));
    }
    const Clock::time_point start = Clock::now();
    timeout_of(ErrorCode::kAborted, victim, [&] { world.fabric().allocate(1 << 20); });
    EXPECT_LT(since(start), kAtOnce);
  });
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(codes[static_cast<std::size_t>(rank)], rank == victim ? kKilled : 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, DeadRank, ::testing::Values(0, 2));

TEST(ProcessFabric, LivenessTellsThatAProcessHasExited) {
  const std::string rendezvous = fresh_rendezvous();
  SharedWithChildren<std::atomic<int>> num_done;
  const auto codes = run_processes(3, [&](int rank) {
    World world = join(rank, 3, rendezvous);
    if (rank == 2) {
      world.barrier();
      ::kill(::getpid(), SIGKILL);
    }
    world.barrier();
    // Rank 1 has no connection to rank 2 and goes by the process id.
    EXPECT_TRUE(eventually(
        [&] { return world.fabric().liveness(2).find("has exited") != std::string::npos; }));
    EXPECT_EQ(world.fabric().liveness(1 - rank), "");
    num_done->fetch_add(1);
    EXPECT_TRUE(eventually([&] { return num_done->load() == 2; }));
    timeout_of(ErrorCode::kAborted, 2, [&] { world.barrier(); });
  });
  EXPECT_THAT(codes, ElementsAre(0, 0, kKilled));
}

TEST(ProcessFabric, RanksThatDoNotArriveAreNamed) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(4, [&](int rank) {
    if (rank == 1 || rank == 3) return;
    const Clock::time_point start = Clock::now();
    EXPECT_THAT(
        timeout_of(ErrorCode::kTimeout, 1, [&] { join(rank, 4, rendezvous, milliseconds(3000)); }),
        AllOf(HasSubstr("ranks 1 and 3 of 4 did not arrive"), HasSubstr(rendezvous)));
    EXPECT_LT(since(start), kAtOnce);
  });
}

TEST(ProcessFabric, AnAbsentRootIsNamed) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(3, [&](int rank) {
    if (rank == 0) return;
    EXPECT_THAT(timeout_of(ErrorCode::kTimeout, 0, [&] { join(rank, 3, rendezvous, kShort); }),
                HasSubstr("rank 0 of 3 did not arrive"));
  });
}

class SilentRank : public ::testing::TestWithParam<int> {};

TEST_P(SilentRank, IsNamedAtTheDeadlineAndLearnsOfItLater) {
  const int silent = GetParam();
  const std::string rendezvous = fresh_rendezvous();
  SharedWithChildren<std::atomic<int>> num_timed_out;
  expect_processes(4, [&](int rank) {
    // Long enough for all to arrive in the world even on a busy machine.
    World world = join(rank, 4, rendezvous, milliseconds(3000));
    if (rank == silent) {
      EXPECT_TRUE(eventually([&] { return num_timed_out->load() == 3; }));
      EXPECT_THAT(timeout_of(ErrorCode::kAborted, silent, [&] { world.barrier(); }),
                  HasSubstr("did not call all_gather"));
      return;
    }
    const Clock::time_point start = Clock::now();
    const std::string message = timeout_of(ErrorCode::kTimeout, silent, [&] { world.barrier(); });
    EXPECT_THAT(message, AllOf(HasSubstr("rank " + std::to_string(silent)), HasSubstr("process"),
                               HasSubstr("did not call all_gather")));
    EXPECT_LT(since(start), kAtOnce);
    num_timed_out->fetch_add(1);
    // Keep the connections open until the silent one has read the verdict.
    if (silent == 0) {
      EXPECT_TRUE(eventually([&] { return num_timed_out->load() == 3; }));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SilentRank, ::testing::Values(0, 1, 3));

TEST(ProcessFabric, TheSecondClaimantOfARankIsTurnedAway) {
  const std::string rendezvous = fresh_rendezvous();
  SharedWithChildren<std::atomic<int>> num_turned_away;
  expect_processes(5, [&](int child) {
    // Children 0 and 3 both claim rank 0, 1 and 4 both claim rank 1.
    const int rank = child % 3;
    if (rank == 2) {
      EXPECT_TRUE(eventually([&] { return num_turned_away->load() == 2; }));
    }
    try {
      World world = join(rank, 3, rendezvous);
      check_all_gather(world, 3);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
      EXPECT_THAT(error.what(), AllOf(HasSubstr("rank " + std::to_string(rank) + " (process "),
                                      HasSubstr("already taken"),
                                      HasSubstr("process " + std::to_string(::getpid()))));
      num_turned_away->fetch_add(1);
    }
  });
  EXPECT_EQ(num_turned_away->load(), 2);
}

TEST(ProcessFabric, ADisagreementOnTheSizeReachesBoth) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(2, [&](int child) {
    const int rank = child == 0 ? 0 : 2;
    const int size = child == 0 ? 3 : 8;
    const Clock::time_point start = Clock::now();
    EXPECT_THAT(error_of(ErrorCode::kSpecMismatch, [&] { join(rank, size, rendezvous); }),
                AllOf(HasSubstr("says 3, rank 2"), HasSubstr("says 8")));
    EXPECT_LT(since(start), kAtOnce);
  });
}

TEST(ProcessFabric, AnotherProtocolVersionIsTold) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(2, [&](int rank) {
    if (rank == 0) {
      EXPECT_ERROR(join(0, 2, rendezvous), kSpecMismatch, "version 99");
      return;
    }
    Channel channel(connect_to(rendezvous), {.kinds = Intake::of(FrameKind::kFailure)});
    Frame hello;
    hello.header.version = 99;
    channel.queue(std::move(hello));
    channel.flush();
    std::optional<Frame> answer;
    EXPECT_TRUE(eventually([&] { return (answer = channel.receive()).has_value(); }));
    EXPECT_EQ(answer->header.kind, FrameKind::kFailure);
  });
}

TEST(ProcessFabric, StrangersAtTheSocketAreIgnored) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(3, [&](int rank) {
    if (rank == 2) {
      const UniqueFd silent = connect_to(rendezvous);
      const UniqueFd leaving = connect_to(rendezvous);
      const UniqueFd garbage = connect_to(rendezvous);
      const std::string request = "GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything\r\n\r\n";
      EXPECT_EQ(::send(garbage.get(), request.data(), request.size(), MSG_NOSIGNAL),
                static_cast<ssize_t>(request.size()));
      const UniqueFd malformed = connect_to(rendezvous);
      FrameHeader header;
      header.payload_bytes = ~std::uint64_t{0};
      EXPECT_EQ(::send(malformed.get(), &header, sizeof header, MSG_NOSIGNAL),
                static_cast<ssize_t>(sizeof header));
      const UniqueFd wrong_kind = connect_to(rendezvous);
      header.kind = FrameKind::kWelcome;
      header.payload_bytes = 0;
      EXPECT_EQ(::send(wrong_kind.get(), &header, sizeof header, MSG_NOSIGNAL),
                static_cast<ssize_t>(sizeof header));
      // All three are hung up on before the last rank arrives.
      for (const UniqueFd* dropped : {&garbage, &malformed, &wrong_kind}) {
        char byte = 0;
        EXPECT_LE(::recv(dropped->get(), &byte, 1, 0), 0);
      }
      World world = join(rank, 3, rendezvous);
      check_all_gather(world, 3);
      return;
    }
    World world = join(rank, 3, rendezvous);
    check_all_gather(world, 3);
  });
}

TEST(ProcessFabric, WorldsWithDifferentRendezvousDoNotMix) {
  const std::string one = fresh_rendezvous();
  const std::string other = fresh_rendezvous();
  expect_processes(5, [&](int child) {
    const bool first = child < 2;
    World world = first ? join(child, 2, one) : join(child - 2, 3, other);
    check_all_gather(world, 100);
    World crossed = first ? join(1 - child, 2, one + "'") : join(4 - child, 3, other + "'");
    check_all_gather(crossed, 100);
    check_symmetric_memory(world, 4096);
  });
}

TEST(ProcessFabric, ManyWorldsInSequenceLeakNothing) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(3, [&](int rank) {
    std::size_t fds_before = 0;
    for (int i = 0; i <= 50; ++i) {
      // The same string each time: a finished world must not be in the way of the next.
      World world = join((rank + i) % 3, 3, rendezvous);
      check_symmetric_memory(world, 1 << 20);
      world.barrier();
      if (i == 0) fds_before = num_open_fds();
      EXPECT_EQ(num_symmetric_mappings(), 3U);  // the world's record, of each rank
      if (i == 50) {
        // Rank 0 holds a connection to each of the others, which hold one.
        const std::size_t roles[] = {2, 1, 1};
        EXPECT_EQ(num_open_fds() - roles[(rank + 50) % 3], fds_before - roles[rank]);
      }
    }
  });
}

TEST(ProcessFabric, FailedWorldsLeakNothingAndTheNextWorks) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(2, [&](int rank) {
    const std::size_t fds_before = num_open_fds();
    for (int i = 0; i < 3; ++i) {
      const std::string absent = rendezvous + " absent " + std::to_string(rank);
      timeout_of(ErrorCode::kTimeout, 1 - rank, [&] { join(rank, 2, absent, milliseconds(50)); });
    }
    EXPECT_EQ(num_open_fds(), fds_before);
    World world = join(rank, 2, rendezvous);
    check_all_gather(world, 10);
  });
}

// UndefinedBehaviorSanitizer opens a pipe to check a virtual call, and fails without descriptors.
#ifndef __SANITIZE_ADDRESS__

TEST(ProcessFabric, ARankWithoutFreeDescriptorsFailsAllButNotTheWorld) {
  expect_world(2, [&](World& world) {
    const int rank = world.rank();
    std::vector<UniqueFd> hoard;
    if (rank == 1) hoard = hoard_fds(0);
    EXPECT_ERROR(world.fabric().allocate(4096), kSystem,
                 "rank 1: cannot create a shared memory file");
    hoard.clear();
    check_symmetric_memory(world, 4096);
  });
}

TEST(Bootstrap, ALostDescriptorIsReported) {
  for (const int poor : {0, 2}) {
    const std::string rendezvous = fresh_rendezvous();
    expect_processes(3, [&](int rank) {
      Bootstrap bootstrap(rank, 3, rendezvous, kGenerous);
      std::vector<UniqueFd> hoard;
      // Enough for its own and one from elsewhere.
      if (rank == poor) hoard = hoard_fds(2);
      std::array<std::byte, 1> mine{};
      std::array<std::byte, 3> all{};
      if (rank == poor) {
        EXPECT_ERROR(bootstrap.exchange_fds(STDERR_FILENO), kSystem, "ulimit -n");
        timeout_of(ErrorCode::kAborted, poor, [&] { bootstrap.all_gather(mine, all); });
        return;
      }
      try {
        // The others may have theirs before the poor one notices; the next call tells them.
        bootstrap.exchange_fds(STDERR_FILENO);
        bootstrap.all_gather(mine, all);
        ADD_FAILURE() << "expected an error";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("ulimit -n"));
      }
    });
  }
}

#endif

TEST(Bootstrap, ExchangesDescriptors) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(4, [&](int rank) {
    Bootstrap bootstrap(rank, 4, rendezvous, kGenerous);
    const std::size_t fds_before = num_open_fds();
    for (int round = 0; round < 20; ++round) {
      int ends[2];
      ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
      const UniqueFd inbox(ends[0]);
      UniqueFd outlet(ends[1]);
      const std::vector<UniqueFd> outlets = bootstrap.exchange_fds(outlet.get());
      ASSERT_EQ(outlets.size(), 4U);
      for (const UniqueFd& peer : outlets) {
        EXPECT_NE(::fcntl(peer.get(), F_GETFD) & FD_CLOEXEC, 0);
        const char letter = static_cast<char>('a' + rank);
        EXPECT_EQ(::write(peer.get(), &letter, 1), 1);
      }
      std::string letters;
      while (letters.size() < 4) {
        std::array<char, 4> some;
        const ssize_t got = ::read(inbox.get(), some.data(), some.size());
        ASSERT_GT(got, 0);
        letters.append(some.data(), static_cast<std::size_t>(got));
      }
      EXPECT_THAT(letters, ::testing::UnorderedElementsAre('a', 'b', 'c', 'd'));
    }
    EXPECT_EQ(num_open_fds(), fds_before);
    std::array<std::byte, 1> mine{};
    std::array<std::byte, 4> all{};
    bootstrap.all_gather(mine, all);
  });
}

TEST(Bootstrap, DifferentCollectivesDoNotMeet) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(2, [&](int rank) {
    Bootstrap bootstrap(rank, 2, rendezvous, kGenerous);
    std::array<std::byte, 1> mine{};
    std::array<std::byte, 2> all{};
    EXPECT_THAT(error_of(ErrorCode::kSpecMismatch,
                         [&] {
                           if (rank == 0) bootstrap.exchange_fds(STDERR_FILENO);
                           bootstrap.all_gather(mine, all);
                         }),
                HasSubstr("rank 0 called exchange_fds"));
    bootstrap.all_gather(mine, all);
  });
}

}  // namespace
}  // namespace switchyard::test
