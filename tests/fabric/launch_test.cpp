#include "fabric/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "fabric/port.h"
#include "support/ranks.h"

namespace switchyard::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class LaunchTest : public ::testing::Test {
 protected:
  LaunchTest() {
    std::string pattern = ::testing::TempDir() + "/launch_test.XXXXXX";
    directory_ = ::mkdtemp(pattern.data());
  }
  ~LaunchTest() override { std::filesystem::remove_all(directory_); }

  LaunchOptions shell(int num_ranks, const std::string& script) const {
    LaunchOptions options{.num_ranks = num_ranks};
    options.command = {"sh", "-c", script};
    options.environment = {{"DIR", directory_}};
    options.grace = milliseconds(200);
    return options;
  }

  std::string contents(const std::string& name) const {
    std::ifstream file(directory_ / name);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

  bool exists(const std::string& name) const { return std::filesystem::exists(directory_ / name); }

  // The process whose number a rank wrote is gone, or only waits for its parent to notice.
  bool has_ended(const std::string& name) const {
    std::ifstream file("/proc/" + std::to_string(std::stoi(contents(name))) + "/stat");
    std::string pid, program, state;
    return !(file >> pid >> program >> state) || state == "Z" || state == "X";
  }

  // Runs launch with its messages captured.
  static int launch_quietly(const LaunchOptions& options, std::string& errors) {
    ::testing::internal::CaptureStderr();
    const int code = launch(options);
    errors = ::testing::internal::GetCapturedStderr();
    return code;
  }

  std::filesystem::path directory_;
};

// Written to another name first, so that a file that exists is complete.
constexpr const char* kSleepForever =
    "echo $$ > $DIR/new$RANK; mv $DIR/new$RANK $DIR/pid$RANK; exec sleep 1000";

TEST_F(LaunchTest, GivesEveryRankItsEnvironment) {
  // An outer job's, which must not reach the ranks.
  ::setenv("MASTER_PORT", "1", 1);
  ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
  ::setenv("TORCHELASTIC_ERROR_FILE", "/tmp/outer", 1);
  const int code = launch(shell(3,
                                "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK "
                                "$GROUP_WORLD_SIZE $ROLE_NAME $ROLE_RANK $ROLE_WORLD_SIZE "
                                "$TORCHELASTIC_RESTART_COUNT $TORCHELASTIC_MAX_RESTARTS "
                                "$MASTER_ADDR > $DIR/env$RANK; "
                                "echo ${TORCHELASTIC_USE_AGENT_STORE-unset} "
                                "${TORCHELASTIC_ERROR_FILE-unset} > $DIR/unset$RANK; "
                                "echo $MASTER_PORT > $DIR/port$RANK; "
                                "echo $TORCHELASTIC_RUN_ID > $DIR/job$RANK; "
                                "echo $SWITCHYARD_RENDEZVOUS > $DIR/token$RANK; "
                                "cat > $DIR/input$RANK"));
  ::unsetenv("MASTER_PORT");
  ::unsetenv("TORCHELASTIC_USE_AGENT_STORE");
  ::unsetenv("TORCHELASTIC_ERROR_FILE");
  EXPECT_EQ(code, 0);
  EXPECT_EQ(contents("env0"), "0 3 0 3 0 1 default 0 3 0 0 127.0.0.1\n");
  EXPECT_EQ(contents("env1"), "1 3 1 3 0 1 default 1 3 0 0 127.0.0.1\n");
  EXPECT_EQ(contents("env2"), "2 3 2 3 0 1 default 2 3 0 0 127.0.0.1\n");
  EXPECT_EQ(contents("unset1"), "unset unset\n");
  const int port = std::stoi(contents("port0"));
  EXPECT_GE(port, 20'000);
  EXPECT_LT(port, 30'000);
  EXPECT_EQ(contents("port2"), contents("port0"));
  EXPECT_EQ(contents("job0"), contents("token0"));
  EXPECT_GT(contents("token0").size(), 30U);
  EXPECT_EQ(contents("token0"), contents("token2"));
  EXPECT_EQ(contents("input0"), "");
  const std::string token = contents("token0");
  EXPECT_EQ(launch(shell(1, "echo $SWITCHYARD_RENDEZVOUS > $DIR/token0")), 0);
  EXPECT_NE(contents("token0"), token);
}

TEST_F(LaunchTest, GivesRanksThePortThatIsAskedFor) {
  LaunchOptions options = shell(1, "echo $MASTER_PORT > $DIR/port");
  options.master_port = 29'511;
  EXPECT_EQ(launch(options), 0);
  EXPECT_EQ(contents("port"), "29511\n");
  options.master_port = 65'536;
  const std::string said = error_of(ErrorCode::kInvalidArgument, [&] { launch(options); });
  EXPECT_THAT(said, HasSubstr("65536"));
}

TEST_F(LaunchTest, TakesNoPortThatSomethingListensAt) {
  // All ports but one, at which the search must arrive, would take long to open: a thousand of ten
  // thousand make a search that does not look fail in two hundred trials.
  std::vector<UniqueFd> listeners;
  std::vector<int> taken;
  for (int port = kFirstPort; listeners.size() < 1'000 && port < kFirstPort + kNumPorts; ++port) {
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
        ::listen(fd.get(), 1) != 0) {
      continue;
    }
    listeners.push_back(std::move(fd));
    taken.push_back(port);
  }
  ASSERT_GE(taken.size(), 100U);
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(std::count(taken.begin(), taken.end(), free_port()), 0);
  }
}

TEST_F(LaunchTest, ReturnsTheExitCodeOfTheFirstToFail) {
  std::string errors;
  LaunchOptions options = shell(3, "test $RANK != 1 || exit 7; exec sleep 1000");
  EXPECT_EQ(launch_quietly(options, errors), 7);
  EXPECT_THAT(errors, AllOf(HasSubstr("rank 1 (process "), HasSubstr("failed first: exit code 7")));
}

TEST_F(LaunchTest, ReportsASignal) {
  std::string errors;
  EXPECT_EQ(launch_quietly(shell(2, "test $RANK = 1 || exec sleep 1000; kill -9 $$"), errors),
            128 + 9);
  EXPECT_THAT(errors, HasSubstr("killed by signal 9"));
}

TEST_F(LaunchTest, LetsTheOthersReportTheirOwnErrors) {
  std::string errors;
  // Rank 1 ends only after the launcher has waited for rank 0.
  LaunchOptions options =
      shell(2,
            "if test $RANK = 0; then echo $$ > $DIR/new; mv $DIR/new $DIR/pid0; "
            "exit 3; fi; "
            "while ! test -e $DIR/pid0; do sleep 0.01; done; "
            "while kill -0 $(cat $DIR/pid0) 2> /dev/null; do sleep 0.01; done; "
            "touch $DIR/reported; exit 4");
  options.grace = kGenerous;
  EXPECT_EQ(launch_quietly(options, errors), 3);
  EXPECT_TRUE(exists("reported"));
}

TEST_F(LaunchTest, KillsRanksThatIgnoreSigterm) {
  std::string errors;
  const Clock::time_point start = Clock::now();
  LaunchOptions options = shell(2,
                                "trap '' TERM; touch $DIR/ready$RANK; "
                                "if test $RANK = 1; then "
                                "while ! test -e $DIR/ready0; do sleep 0.01; done; exit 5; fi; "
                                "while true; do sleep 0.1; done");
  EXPECT_EQ(launch_quietly(options, errors), 5);
  EXPECT_LT(since(start), kAtOnce);
}

TEST_F(LaunchTest, EndsWhatAFailedRankLeftBehind) {
  std::string errors;
  LaunchOptions options = shell(1, "sleep 1000 & echo $! > $DIR/pid0; exit 6");
  EXPECT_EQ(launch_quietly(options, errors), 6);
  EXPECT_TRUE(eventually([&] { return has_ended("pid0"); }));
}

TEST_F(LaunchTest, EndsRanksAtTheDeadline) {
  std::string errors;
  LaunchOptions options = shell(2, "exec sleep 1000");
  options.deadline = milliseconds(100);
  EXPECT_EQ(launch_quietly(options, errors), 124);
  EXPECT_THAT(errors, HasSubstr("still run after 100 ms"));
}

TEST_F(LaunchTest, SaysWhyACommandCannotBeRun) {
  std::string errors;
  LaunchOptions options{.num_ranks = 2};
  options.command = {"/no/such/program"};
  EXPECT_EQ(launch_quietly(options, errors), 127);
  EXPECT_THAT(errors, HasSubstr("cannot run '/no/such/program': No such file"));
  options.command = {"/proc/version"};
  EXPECT_EQ(launch_quietly(options, errors), 127);
  EXPECT_THAT(errors, HasSubstr("Permission denied"));
}

TEST_F(LaunchTest, RefusesBadOptions) {
  error_of(ErrorCode::kInvalidArgument, [&] { launch(shell(0, "true")); });
  error_of(ErrorCode::kInvalidArgument, [] { launch(LaunchOptions{}); });
}

TEST_F(LaunchTest, LabelsLines) {
  LaunchOptions options =
      shell(2,
            "echo one; printf two; "
            "if test $RANK = 0; then head -c 200000 /dev/zero | tr '\\0' x; fi");
  options.label_output = true;
  ::testing::internal::CaptureStdout();
  const int code = launch(options);
  const std::string output = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(code, 0);
  for (const char* line :
       {"[rank 0] one\n", "[rank 1] one\n", "[rank 1] two\n", "[rank 0] twoxxx"}) {
    EXPECT_THAT(output, HasSubstr(line));
  }
  EXPECT_EQ(static_cast<int>(std::count(output.begin(), output.end(), 'x')), 200'000);
  EXPECT_THAT(output, Not(HasSubstr("][")));
}

TEST_F(LaunchTest, ForwardsSignalsToTheRanks) {
  for (const int number : {SIGINT, SIGTERM}) {
    std::filesystem::remove(directory_ / "pid0");
    std::filesystem::remove(directory_ / "pid1");
    const auto codes = run_processes(2, [&](int child) {
      static_cast<void>(child);
      if (child == 0)
        ::_exit(launch(shell(2, "echo $PPID > $DIR/launcher; " + std::string(kSleepForever))));
      EXPECT_TRUE(eventually([&] { return exists("pid0") && exists("pid1"); }));
      ::kill(std::stoi(contents("launcher")), number);
    });
    EXPECT_EQ(codes[0], 128 + number);
    EXPECT_EQ(codes[1], 0);
    EXPECT_TRUE(has_ended("pid0") && has_ended("pid1"));
  }
}

TEST_F(LaunchTest, RanksDieWithTheLauncher) {
  const auto codes = run_processes(2, [&](int child) {
    if (child == 0) {
      ::_exit(launch(shell(2, "echo $PPID > $DIR/launcher; " + std::string(kSleepForever))));
    }
    EXPECT_TRUE(eventually([&] { return exists("pid0") && exists("pid1"); }));
    ::kill(std::stoi(contents("launcher")), SIGKILL);
  });
  EXPECT_EQ(codes[0], kKilled);
  EXPECT_TRUE(eventually([&] { return has_ended("pid0") && has_ended("pid1"); }));
}

// This test is its own command: the launched ranks run it again and take the first branch.
TEST_F(LaunchTest, LaunchedRanksFormAWorld) {
  if (const char* const failing_rank = std::getenv("LAUNCH_TEST_FAILING_RANK")) {
    World world = World::from_environment(with_deadline(kGenerous));
    ASSERT_EQ(world.size(), 3);
    check_all_gather(world, 100);
    check_symmetric_memory(world, 1 << 20);
    if (world.rank() == std::stoi(failing_rank)) ::kill(::getpid(), SIGKILL);
    try {
      world.barrier();
    } catch (const TimeoutError& error) {
      // So that the launcher can see the cause before the consequence.
      EXPECT_TRUE(eventually([&] {
        const std::string known = world.fabric().liveness(error.failure().peer_rank);
        return known.find("has exited") != std::string::npos;
      }));
      throw;
    }
    return;
  }
  LaunchOptions options{.num_ranks = 3, .grace = kGenerous, .label_output = true};
  options.command = {std::filesystem::read_symlink("/proc/self/exe").string(),
                     "--gtest_filter=LaunchTest.LaunchedRanksFormAWorld"};
  options.environment = {{"LAUNCH_TEST_FAILING_RANK", "-1"}};
  std::string errors;
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(launch_quietly(options, errors), 0);
  options.environment = {{"LAUNCH_TEST_FAILING_RANK", "1"}};
  EXPECT_EQ(launch_quietly(options, errors), kKilled);
  EXPECT_THAT(errors, AllOf(HasSubstr("rank 1 (process"), HasSubstr("killed by signal 9")));
  // The others name the rank that is gone before the launcher ends them.
  const std::string output = ::testing::internal::GetCapturedStdout();
  EXPECT_THAT(output, HasSubstr("[rank 2] C++ exception"));
  EXPECT_THAT(output, HasSubstr("closed its connection"));
}

}  // namespace
}  // namespace switchyard::test
