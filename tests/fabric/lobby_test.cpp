// The socket of a world that forms: who may connect, and what it costs the world.
#include "fabric/lobby.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fabric/bootstrap.h"
#include "fabric/fabric.h"
#include "fabric/frames.h"
#include "fabric/rendezvous.h"
#include "model/errors.h"
#include "support/ranks.h"
#include "switchyard/world.h"

namespace switchyard::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class LobbyTest : public ::testing::Test {
 protected:
  LobbyTest() : rendezvous_(fresh_rendezvous()), lobby_(listen()) {}

  UniqueFd listen() const {
    UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    EXPECT_TRUE(RendezvousAddress(rendezvous_).bind(listener.get()));
    EXPECT_EQ(::listen(listener.get(), SOMAXCONN), 0);
    return listener;
  }
  UniqueFd connect() const {
    UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_TRUE(RendezvousAddress(rendezvous_).connect(socket.get()));
    return socket;
  }
  static void say_hello(const UniqueFd& socket, int rank) {
    const HelloBody body{rank, 4, ::getpid(), 0};
    FrameHeader header{.payload_bytes = sizeof body};
    EXPECT_EQ(::send(socket.get(), &header, sizeof header, 0), ssize_t{sizeof header});
    EXPECT_EQ(::send(socket.get(), &body, sizeof body, 0), ssize_t{sizeof body});
  }
  // Without waiting.
  static bool hung_up(const UniqueFd& socket) {
    char byte = 0;
    return ::recv(socket.get(), &byte, 1, MSG_DONTWAIT) == 0;
  }

  std::string rendezvous_;
  Lobby lobby_;
};

TEST_F(LobbyTest, WhoSaysHelloArrives) {
  const UniqueFd silent = connect();
  const UniqueFd rank = connect();
  say_hello(rank, 3);
  const std::vector<Lobby::Arrival> arrivals = lobby_.take_turn();
  ASSERT_EQ(arrivals.size(), 1U);
  HelloBody body;
  ASSERT_EQ(arrivals[0].hello.payload->size(), sizeof body);
  std::memcpy(&body, arrivals[0].hello.payload->data(), sizeof body);
  EXPECT_EQ(body.rank, 3);
  EXPECT_EQ(arrivals[0].peer.pid, ::getpid());
  EXPECT_EQ(lobby_.num_waiting(), 1U);
}

TEST_F(LobbyTest, ATurnEndsHoweverManyConnect) {
  std::vector<UniqueFd> many;
  for (int i = 0; i < 2 * Lobby::kAcceptsPerTurn; ++i) many.push_back(connect());
  EXPECT_TRUE(lobby_.take_turn().empty());
  EXPECT_EQ(lobby_.num_waiting(), std::size_t{Lobby::kAcceptsPerTurn});
}

TEST_F(LobbyTest, TheProcessWithMostConnectionsMakesRoom) {
  // Another process, which waits longer than all others.
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  UniqueFd connected(ends[0]);
  UniqueFd tell(ends[1]);
  const pid_t neighbour = ::fork();
  if (neighbour == 0) {
    const UniqueFd socket = connect();
    [[maybe_unused]] const ssize_t told = ::write(tell.get(), "x", 1);
    char byte = 0;
    const ssize_t got = ::recv(socket.get(), &byte, 1, 0);
    ::_exit(got == 1 && byte == '!' ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(::read(connected.get(), &byte, 1), 1);
  lobby_.take_turn();
  ASSERT_EQ(lobby_.num_waiting(), 1U);

  std::vector<UniqueFd> flood;
  while (flood.size() < 3 * Lobby::kMaxWaiting) {
    for (int i = 0; i < Lobby::kAcceptsPerTurn; ++i) flood.push_back(connect());
    lobby_.take_turn();
    EXPECT_LE(lobby_.num_waiting(), Lobby::kMaxWaiting);
  }
  // All but the last ones of the flood are gone, oldest first.
  const std::size_t dropped = flood.size() - (Lobby::kMaxWaiting - 1);
  for (std::size_t i = 0; i < flood.size(); ++i) EXPECT_EQ(hung_up(flood[i]), i < dropped) << i;
  say_hello(flood.back(), 1);
  std::vector<Lobby::Arrival> arrivals = lobby_.take_turn();
  ASSERT_EQ(arrivals.size(), 1U);

  // The neighbour's connection still is one of those that wait.
  std::vector<pollfd> fds;
  lobby_.add_interest(fds);
  for (const pollfd& entry : fds) {
    if (entry.fd != fds[0].fd && credentials(entry.fd).pid == neighbour) {
      EXPECT_EQ(::send(entry.fd, "!", 1, MSG_NOSIGNAL), 1);
    }
  }
  int status = 0;
  EXPECT_TRUE(eventually([&] { return ::waitpid(neighbour, &status, WNOHANG) == neighbour; }));
  EXPECT_EQ(status, 0);
}

TEST_F(LobbyTest, WhoStaysSilentIsDropped) {
  const UniqueFd silent = connect();
  lobby_.take_turn();
  ASSERT_EQ(lobby_.num_waiting(), 1U);
  EXPECT_LE(lobby_.next_turn(), Clock::now() + Lobby::kHelloTime);
  std::vector<pollfd> nothing;
  while (Clock::now() < lobby_.next_turn() && lobby_.num_waiting() == 1) {
    wait_ready(nothing, lobby_.next_turn());
    lobby_.take_turn();
  }
  lobby_.take_turn();
  EXPECT_EQ(lobby_.num_waiting(), 0U);
  EXPECT_TRUE(hung_up(silent));
}

TEST_F(LobbyTest, WithoutDescriptorsTheOldestMakesRoom) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer needs descriptors of its own";
#endif
  const UniqueFd oldest = connect();
  lobby_.take_turn();
  const UniqueFd newest = connect();
  std::vector<UniqueFd> hoard = hoard_fds(0);
  lobby_.take_turn();
  hoard.clear();
  EXPECT_TRUE(hung_up(oldest));
  EXPECT_FALSE(hung_up(newest));
  EXPECT_EQ(lobby_.num_waiting(), 1U);
}

// Attacks on a world of four processes, by two processes that connect as fast as they can.

enum class Attacker { kSameUser, kOtherUser };
enum class Manner { kHangUp, kStay };

struct Attack {
  std::atomic<int> num_connections{0};
  std::atomic<int> num_ready{0};
  std::atomic<bool> over{false};
};

struct AttackCase {
  Attacker attacker;
  Manner manner;
};

std::string name_of(const ::testing::TestParamInfo<AttackCase>& info) {
  return std::string(info.param.attacker == Attacker::kSameUser ? "SameUser" : "OtherUser") +
         (info.param.manner == Manner::kHangUp ? "HangsUp" : "Stays");
}

class RendezvousAttack : public ::testing::TestWithParam<AttackCase> {
 protected:
  void SetUp() override {
    if (GetParam().attacker == Attacker::kOtherUser && ::geteuid() != 0) {
      GTEST_SKIP() << "only root can play another user";
    }
  }

  void attack(const std::string& rendezvous) {
    const RendezvousAddress address(rendezvous);  // of this user's ranks
    constexpr uid_t kNobody = 65534;
    if (GetParam().attacker == Attacker::kOtherUser) {
      ASSERT_EQ(::setresuid(kNobody, kNobody, kNobody), 0);
    }
    std::vector<UniqueFd> held(GetParam().manner == Manner::kStay ? 500 : 1);
    for (std::size_t i = 0; !attack_->over.load(); i = (i + 1) % held.size()) {
      held[i].reset();  // the oldest, if there are as many as a process may have
      held[i] = UniqueFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (address.connect(held[i].get())) attack_->num_connections.fetch_add(1);
    }
  }
  // The other ranks come when the attack is well under way.
  void await_attack() {
    EXPECT_TRUE(eventually([&] { return attack_->num_connections.load() > 10'000; }));
  }

  SharedWithChildren<Attack> attack_;
};

TEST_P(RendezvousAttack, DoesNotKeepAWorldFromForming) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(6, [&](int child) {
    if (child >= 4) return attack(rendezvous);
    if (child != 0) await_attack();
    const Clock::time_point start = Clock::now();
    World world = join(child, 4, rendezvous);
    EXPECT_LT(since(start), kAtOnce);
    attack_->num_ready.fetch_add(1);
    check_all_gather(world, 100);
    check_symmetric_memory(world, 1 << 20);
    world.barrier();
    attack_->over.store(true);
  });
  EXPECT_EQ(attack_->num_ready.load(), 4);
}

TEST_P(RendezvousAttack, DoesNotKeepADeadlineFromPassing) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(4, [&](int child) {
    if (child >= 2) return attack(rendezvous);
    if (child == 1) await_attack();
    const milliseconds deadline(child == 0 ? 4000 : 60'000);
    const Clock::time_point start = Clock::now();
    EXPECT_THAT(timeout_of(ErrorCode::kTimeout, 2, [&] { join(child, 3, rendezvous, deadline); }),
                HasSubstr("rank 2 of 3 did not arrive"));
    EXPECT_LT(since(start), milliseconds(10'000));
    if (child == 0) attack_->over.store(true);
  });
}

INSTANTIATE_TEST_SUITE_P(By, RendezvousAttack,
                         ::testing::Values(AttackCase{Attacker::kSameUser, Manner::kHangUp},
                                           AttackCase{Attacker::kSameUser, Manner::kStay},
                                           AttackCase{Attacker::kOtherUser, Manner::kHangUp},
                                           AttackCase{Attacker::kOtherUser, Manner::kStay}),
                         name_of);

TEST(Rendezvous, AStrangersHelloOf625MegabytesIsNotRead) {
  const std::string rendezvous = fresh_rendezvous();
  SharedWithChildren<std::atomic<bool>> hung_up;
  expect_processes(2, [&](int rank) {
    if (rank == 0) {
      World world = join(0, 2, rendezvous);
      return check_all_gather(world, 3);
    }
    const UniqueFd stranger = connect_to(rendezvous);
    FrameHeader header{.payload_bytes = 625'000'000};
    ASSERT_EQ(::send(stranger.get(), &header, sizeof header, MSG_NOSIGNAL), ssize_t{sizeof header});
    const std::string some(1 << 20, 'x');
    std::size_t sent = 0;
    for (ssize_t took = 0; sent < header.payload_bytes; sent += static_cast<std::size_t>(took)) {
      took = ::send(stranger.get(), some.data(), some.size(), MSG_NOSIGNAL);
      if (took <= 0) break;
    }
    EXPECT_LT(sent, 2'000'000U) << "what the socket holds";
    World world = join(1, 2, rendezvous);
    check_all_gather(world, 3);
  });
}

// Two jobs that launchers tell apart, with one rendezvous string in their programs.
TEST(Rendezvous, JobsThatMeetByMistakeDoNotMix) {
  const std::string rendezvous = fresh_rendezvous();
  SharedWithChildren<std::atomic<int>> num_turned_away;
  expect_processes(5, [&](int child) {
    // Children 0 to 2 are one job; 3 and 4 are ranks 0 and 1 of another, which comes first.
    const bool other = child >= 3;
    ::setenv("SWITCHYARD_RENDEZVOUS", other ? "job-b" : "job-a", 1);
    const int rank = child % 3;
    if (rank != 0 && !other) {
      EXPECT_TRUE(eventually([&] { return num_turned_away->load() == 2; }));
    }
    if (!other) {
      World world = join(rank, 3, rendezvous);
      check_all_gather(world, 10);
      return;
    }
    // Until rank 0 of the first job listens there is nobody to be turned away by.
    (void)connect_to(rendezvous);
    EXPECT_THAT(error_of(ErrorCode::kInvalidArgument, [&] { join(rank, 3, rendezvous); }),
                AllOf(HasSubstr("two jobs use rendezvous '" + rendezvous + "'"),
                      HasSubstr("process " + std::to_string(::getpid()) + " wants to be rank " +
                                std::to_string(rank)),
                      HasSubstr("job-a"), HasSubstr("SWITCHYARD_RENDEZVOUS")));
    num_turned_away->fetch_add(1);
  });
}

TEST(Rendezvous, ARankStartedByHandJoinsALaunchedJob) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(3, [&](int rank) {
    if (rank != 1) ::setenv("SWITCHYARD_RENDEZVOUS", "job", 1);
    World world = join(rank, 3, rendezvous);
    check_all_gather(world, 10);
  });
}

// A member that speaks by hand, from its hello on.
class RawMember {
 public:
  explicit RawMember(const std::string& rendezvous)
      : channel_(connect_to(rendezvous),
                 {.kinds = Intake::of(FrameKind::kWelcome, FrameKind::kEntered, FrameKind::kPart,
                                      FrameKind::kFailure),
                  .payload_bytes = 1 << 20}) {
    const HelloBody body{1, 2, ::getpid(), 0};
    Frame hello = frame(FrameKind::kHello, &body, sizeof body);
    hello.header.deadline_ns = (Clock::now() + kGenerous).time_since_epoch().count();
    send(std::move(hello));
    world_ = receive().header.world;  // kEntered
    EXPECT_NE(world_, 0U);
    EXPECT_EQ(receive().header.kind, FrameKind::kWelcome);
  }

  Frame frame(FrameKind kind, const void* bytes = nullptr, std::size_t count = 0) const {
    Frame frame;
    frame.header.kind = kind;
    frame.header.rank = 1;
    frame.header.world = world_;
    frame.header.deadline_ns = (Clock::now() + kGenerous).time_since_epoch().count();
    const auto* const begin = static_cast<const std::byte*>(bytes);
    frame.payload = std::make_shared<const Payload>(begin, begin + count);
    return frame;
  }
  void send(Frame frame) {
    channel_.queue(std::move(frame));
    channel_.flush();
  }
  Frame receive() {
    std::optional<Frame> frame;
    EXPECT_TRUE(eventually([&] { return (frame = channel_.receive()) || channel_.finished(); }));
    return frame ? std::move(*frame) : Frame{};
  }

 private:
  Channel channel_;
  std::uint64_t world_ = 0;
};

TEST(Rendezvous, AMessageOfAnotherWorldIsRefused) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(2, [&](int rank) {
    if (rank == 0) {
      EXPECT_THAT(error_of(ErrorCode::kSystem, [&] { join(0, 2, rendezvous); }),
                  AllOf(HasSubstr("rank 1 (process "), HasSubstr("another world")));
      return;
    }
    RawMember member(rendezvous);
    Frame stray = member.frame(FrameKind::kContribution, "x", 1);
    stray.header.world += 2;
    member.send(std::move(stray));
    EXPECT_EQ(member.receive().header.kind, FrameKind::kEntered);
    EXPECT_EQ(member.receive().header.kind, FrameKind::kFailure);
  });
}

TEST(Rendezvous, AMemberThatBreaksTheProtocolIsNamed) {
  const std::string rendezvous = fresh_rendezvous();
  expect_processes(2, [&](int rank) {
    if (rank == 0) {
      EXPECT_THAT(timeout_of(ErrorCode::kAborted, 1, [&] { join(0, 2, rendezvous); }),
                  HasSubstr("broke the bootstrap protocol"));
      return;
    }
    RawMember member(rendezvous);
    member.send(member.frame(FrameKind::kPart, "x", 1));
    EXPECT_EQ(member.receive().header.kind, FrameKind::kEntered);
    EXPECT_EQ(member.receive().header.kind, FrameKind::kFailure);
  });
}

TEST(Rendezvous, CallsOfVeryDifferentSizesAreToldAndTheWorldGoesOn) {
  expect_world(3, [&](World& world) {
    const int rank = world.rank();
    for (const int odd : {0, 1}) {
      EXPECT_ERROR(check_all_gather(world, rank == odd ? 1'000'000 : 1), kSpecMismatch,
                   "8000000 bytes");
      check_all_gather(world, 5);
    }
  });
}

// Memory of a peer that is not what it should be. The rank plays allocate() by hand, up to the
// file.
enum class BadFile { kUnsealed, kShort, kLong, kNotMemory };

class PeerMemory : public ::testing::TestWithParam<BadFile> {};

UniqueFd make_bad_file(BadFile what, std::size_t bytes) {
  if (what == BadFile::kNotMemory) return UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC));
  UniqueFd file(::memfd_create("bad", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const std::size_t size = what == BadFile::kShort  ? bytes - 4096
                           : what == BadFile::kLong ? bytes + 4096
                                                    : bytes;
  EXPECT_EQ(::ftruncate(file.get(), static_cast<off_t>(size)), 0);
  if (what != BadFile::kUnsealed) {
    EXPECT_EQ(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  }
  return file;
}

TEST_P(PeerMemory, ThatCouldEndThisProcessIsRefused) {
  const std::string rendezvous = fresh_rendezvous();
  constexpr std::size_t kBytes = 1 << 20;
  expect_processes(2, [&](int rank) {
    World world = join(rank, 2, rendezvous);
    Fabric& fabric = world.fabric();
    const auto refused = [&](const std::string& message) {
      EXPECT_THAT(message, AllOf(HasSubstr("rank 0: the memory of rank 1: "),
                                 ::testing::AnyOf(HasSubstr("sealed"), HasSubstr("has 1"))));
    };
    if (rank == 0) {
      refused(error_of(ErrorCode::kSystem, [&] { fabric.allocate(kBytes); }));
    } else {
      gather<std::uint64_t>(fabric, kBytes);
      share_outcome(fabric, std::nullopt);
      const UniqueFd file = make_bad_file(GetParam(), kBytes);
      fabric.exchange_fds(file.get());
      refused(error_of(ErrorCode::kSystem, [&] { share_outcome(fabric, std::nullopt); }));
    }
    check_symmetric_memory(world, kBytes);
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, PeerMemory,
                         ::testing::Values(BadFile::kUnsealed, BadFile::kShort, BadFile::kLong,
                                           BadFile::kNotMemory));

TEST(Rendezvous, APeerCannotTakeMemoryAway) {
  expect_world(2, [&](World& world) {
    const int rank = world.rank();
    Fabric& fabric = world.fabric();
    constexpr std::size_t kBytes = 1 << 20;
    if (rank == 0) {
      const auto segment = fabric.allocate(kBytes);
      world.barrier();
      segment->base(0)[kBytes - 1] = std::byte{1};
      return;
    }
    gather<std::uint64_t>(fabric, kBytes);
    share_outcome(fabric, std::nullopt);
    UniqueFd file(::memfd_create("mine", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(::ftruncate(file.get(), kBytes), 0);
    EXPECT_EQ(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    const std::vector<UniqueFd> files = fabric.exchange_fds(file.get());
    share_outcome(fabric, std::nullopt);
    EXPECT_NE(::ftruncate(files[0].get(), 0), 0);
    EXPECT_EQ(errno, EPERM);
    EXPECT_NE(::ftruncate(files[0].get(), 2 * kBytes), 0);
    world.barrier();
  });
}

TEST(Liveness, AProcessThatVanishesBetweenTwoQuestionsHasExited) {
  const auto ended_child = [](bool reap, UniqueFd& stat) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    UniqueFd wait_end(ends[0]);
    UniqueFd end(ends[1]);
    const pid_t child = ::fork();
    if (child == 0) {
      end.reset();
      char byte = 0;
      ::_exit(::read(wait_end.get(), &byte, 1) == 0 ? 0 : 1);
    }
    EXPECT_EQ(state_of_process(child), ProcessState::kRuns);
    ::kill(child, SIGSTOP);
    EXPECT_TRUE(eventually([&] { return state_of_process(child) == ProcessState::kStopped; }));
    ::kill(child, SIGCONT);
    stat = UniqueFd(
        ::open(("/proc/" + std::to_string(child) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
    end.reset();
    siginfo_t info{};
    EXPECT_EQ(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | (reap ? 0 : WNOWAIT)), 0);
    return child;
  };
  UniqueFd stat;
  const pid_t gone = ended_child(true, stat);
  // The file is open, but its process is not there to be read about: ESRCH.
  EXPECT_EQ(state_by_stat(stat.get()), ProcessState::kExited);
  EXPECT_EQ(state_of_process(gone), ProcessState::kExited);
  const pid_t zombie = ended_child(false, stat);
  EXPECT_EQ(state_by_stat(stat.get()), ProcessState::kExited);
  EXPECT_EQ(state_of_process(zombie), ProcessState::kExited);
  EXPECT_EQ(::waitpid(zombie, nullptr, 0), zombie);
  EXPECT_EQ(state_of_process(zombie), ProcessState::kExited);
  EXPECT_EQ(state_of_process(::getpid()), ProcessState::kRuns);
}

TEST(Liveness, NeverThrowsWhileProcessesEnd) {
  std::atomic<pid_t> asked{0};
  std::atomic<bool> over{false};
  std::atomic<bool> threw{false};
  std::thread asking([&] {
    while (!over.load()) {
      try {
        if (const pid_t pid = asked.load()) static_cast<void>(state_of_process(pid));
      } catch (...) {
        threw = true;
      }
    }
  });
  for (int i = 0; i < 500; ++i) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(0);
    asked.store(child);
    EXPECT_EQ(::waitpid(child, nullptr, 0), child);
  }
  over.store(true);
  asking.join();
  EXPECT_FALSE(threw.load());
}

}  // namespace
}  // namespace switchyard::test
