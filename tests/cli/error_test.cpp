// Every way to go wrong ends with its exit code and one line on stderr that says what to do.
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdlib>
#include <utility>

#include "base/shown.h"
#include "cli/command.h"
#include "gpu/device.h"
#include "models/matrix_file.h"
#include "models/model_table.h"

namespace switchyard::cli {
namespace {

TEST(Errors, Usage) {
  expect_misuse({}, {"no command is given", "--help"});
  expect_misuse({"frobnicate"}, {"'frobnicate'", "make-checkpoint"});
  expect_misuse(join({"run", "--bogus"}, kTiny), {"--bogus", "switchyard run --help"});
  expect_misuse({"run"}, {"--checkpoint", "--model"});
  expect_misuse(join({"run", "--checkpoint", "/tmp"}, kTiny), {"--checkpoint and --model"});
  expect_misuse({"run", "--checkpoint", "/tmp", "--dtype", "f32"}, {"make-checkpoint"});
  expect_misuse({"run", "--model", "olmo"}, {"'olmo'", "olmoe"});
  expect_misuse(join({"run", "--layer", "16"}, kTiny), {"--layer is 16", "0 to 15"});
  expect_misuse({"make-checkpoint", "--model", "olmoe"}, {"--output"});
}

// The option is named before its value, with the name that was probably meant.
TEST(Errors, ArgumentsThatAreNotKnown) {
  struct Case {
    Arguments arguments;
    std::vector<std::string> parts;
  };
  const Case kCases[] = {
      {{"run", "--model", "olmoe", "--tokns", "5"},
       {"run has no option '--tokns'; perhaps '--tokens' is meant; see", "switchyard run --help"}},
      {{"run", "--model", "olmoe", "--tokns=5"}, {"run has no option '--tokns'", "'--tokens'"}},
      {{"run", "--no-verify"}, {"'--no-verify'", "'--verify'"}},
      {{"run", "--check", "/tmp"}, {"'--check'", "'--checkpoint'"}},
      {{"run", "--zzzzzzzz", "5"}, {"run has no option '--zzzzzzzz'; see"}},
      {{"run", "stray", "--tokns", "5"}, {"'--tokns'"}},
      {{"bench", "--threads", "2"},
       {"bench layers has no option '--threads'; it is an option of run, trace"}},
      {{"trace", "--quiet"}, {"'--quiet'; it is an option of run, make-checkpoint"}},
      {{"run", "--model", "olmoe", "5"}, {"'5' was not expected", "behind its option"}},
      {{"run", "--model", "olmoe", "--", "5"}, {"'5' was not expected"}},
      {{"models", "extra", "more"}, {"'extra' was not expected: models"}},
      {{"models", "--jsn"}, {"'--jsn'", "'--json'"}},
      {{"doctor", "-v"}, {"doctor has no option '-v'"}},
      {{"runn"}, {"unknown command 'runn', perhaps 'run'", "make-checkpoint"}},
      {{"--modle", "olmoe"}, {"'--modle' stands where a command is expected"}},
      {{"run", "--verify=maybe"}, {"'--verify=maybe'", "leave out '=maybe'"}},
      {{"run", "--quiet=false"}, {"'--quiet=false'", "takes none"}},
      {{"run", "--tokens", "--ranks", "2"}, {"--tokens"}},
  };
  for (const Case& c : kCases) expect_misuse(c.arguments, c.parts);
}

// An option that would change nothing is named, with its value.
TEST(Errors, OptionsThatWouldChangeNothing) {
  const TemporaryDirectory directory;
  const std::string checkpoint = (directory / "m").string();
  const std::string input = (directory / "x.safetensors").string();
  run_well({"make-checkpoint", "--model", "olmoe", "--out", checkpoint, "--experts", "8",
            "--hidden", "64", "--intermediate", "32", "--quiet"});
  const std::vector<float> x(64, 1.0f);
  write_matrices(input, {{"activations", {x.data(), DType::kF32, 1, 64, 64}}});
  struct Case {
    Arguments arguments;
    const char* part;
  };
  const Case kCases[] = {
      {{"run", "--checkpoint", checkpoint, "--input", input, "--seed", "3"}, "--seed is 3"},
      {{"run", "--checkpoint", checkpoint, "--experts", "4"}, "--experts 4 would change a --model"},
      {{"run", "--checkpoint", checkpoint, "--dtype", "f32"}, "--dtype f32 would change a --model"},
      {{"run", "--checkpoint", checkpoint, "--backend", "cpu", "--reserved-sms", "2"},
       "--reserved-sms"},
      {{"run", "--checkpoint", checkpoint, "--capacity-of-tokens"}, "--capacity-of-tokens"},
      {{"run", "--checkpoint", checkpoint, "--compute", "fp8"}, "--compute is fp8"},
      {{"run", "--model", "olmoe", "--experts", "4", "--top-k", "9"},
       "--experts 4, --top-k 9 of olmoe"},
      {{"make-checkpoint", "--model", "olmoe", "--experts", "4", "--out", input + "2"},
       "--experts 4 of olmoe"},
      {{"bench", "--model", "olmoe", "--rows", "4"}, "'--rows'; it is an option of bench grouped"},
      {{"bench", "--model", "olmoe", "--swiglu"}, "'--swiglu'; it is an option of bench grouped"},
      {{"bench", "--model", "olmoe", "--rung", "all"},
       "'--rung'; it is an option of bench all_to_all"},
      {{"bench", "--model", "olmoe", "--pre-sum"},
       "'--pre-sum'; it is an option of bench exchange"},
      {{"bench", "--suite", "all_to_all", "--seed", "0"},
       "bench all_to_all has no option '--seed'"},
      {{"bench", "--suite", "late", "--rows", "4,8"}, "bench late has no option '--rows'"},
      {{"bench", "--model", "olmoe", "--backend", "cpu", "--no-graph"}, "--no-graph is for"},
      {{"tune", "--most-histograms", "4"}, "--most-histograms 4 is of --histograms"},
      {{"tune", "--no-test", "--json", input + ".json"}, "--json"},
      {{"tune", "--backend", "cpu", "--quick"}, "--quick is for --backend cuda"},
      {{"report", "--profile", input, "--published", "p.json"}, "--published p.json is for rows"},
  };
  for (const Case& c : kCases) expect_misuse(c.arguments, {c.part});
}

TEST(Errors, OptionsThatAreGivenTwice) {
  expect_misuse(join({"run", "--tokens", "3", "--tokens", "4"}, kTiny),
                {"--tokens is given 2 times; give it once", "switchyard run --help"});
  expect_misuse(
      {"make-checkpoint", "--model", "olmoe", "--out", "/tmp/a", "-o", "/tmp/b", "--out", "/tmp/c"},
      {"--output is given 3 times"});
}

TEST(Errors, SizesThatDoNotFitSpeakOfOptions) {
  const Completed done = run_switchyard({"run", "--model", "olmoe", "--experts", "1"});
  EXPECT_EQ(done.exit_code, 2);
  EXPECT_THAT(done.err, HasSubstr("each token goes to 8 experts, but there would be 1"));
  EXPECT_THAT(done.err, ::testing::Not(HasSubstr("LayerSpec")));
}

// Arguments, files and the environment may hold anything.
TEST(Errors, AreOneLineThatATerminalDoesNotObey) {
  const TemporaryDirectory directory;
  const std::string evil = "a\nswitchyard: error (system): forged\x1b[2J\x07\xff\u202e";
  const std::string file = (directory / evil).string();
  test::write_file(file, "junk");
  write_matrices(directory / "names", {{evil + "1", {file.data(), DType::kF32, 1, 1, 1}},
                                       {evil + "2", {file.data(), DType::kF32, 1, 1, 1}}});
  std::filesystem::create_directory(directory / "c");
  test::write_file(directory / "c/config.json", find_model("olmoe").config_json);
  test::write_file(directory / "c/model.safetensors.index.json",
                   nlohmann::json{{"weight_map", {{"t\n\x1b", "s\n\x1b"}}}}.dump());
  const std::string long_name(100'000, 'n');
  const std::pair<Arguments, std::vector<std::string>> cases[] = {
      {{evil}, {}},
      {{"run", "--" + evil}, {}},
      {{"run", evil}, {}},
      {{"run", "--model", evil}, {}},
      {{"run", "--model", long_name}, {}},
      {{"run", "--" + long_name}, {}},
      {{"run", "--tokens", evil}, {}},
      {{"run", "--dtype", evil}, {}},
      {{"run", "--checkpoint", file}, {}},
      {{"run", "--checkpoint", (directory / "c").string()}, {}},
      {join({"run", "--input", file}, kTiny), {}},
      {join({"run", "--input", (directory / "names").string()}, kTiny), {}},
      {join({"run", "--output", file + "/x"}, kTiny), {}},
      {{"bench", "--suite", evil}, {}},
      {{"bench", "--model", "olmoe", "--tokens", evil}, {}},
      {{"report", file}, {}},
      {{"report", file + "none"}, {}},
      {{"make-checkpoint", "--model", "olmoe", "--out", file}, {}},
      {{"launch", "-n", "1", "--" + evil}, {}},
      {join({"run"}, kTiny), {"RANK=" + evil, "WORLD_SIZE=2"}},
  };
  for (const auto& [arguments, environment] : cases) {
    SCOPED_TRACE(::testing::PrintToString(arguments).substr(0, 200));
    const Completed done = run_switchyard(arguments, environment);
    EXPECT_EQ(done.exit_code, 2);
    EXPECT_EQ(done.out, "");
    ASSERT_THAT(done.err, StartsWith("switchyard: error ("));
    EXPECT_EQ(done.err.find('\n'), done.err.size() - 1) << done.err;
    EXPECT_TRUE(test::is_shown_safely(std::string_view(done.err).substr(0, done.err.size() - 1)))
        << ::testing::PrintToString(done.err);
    EXPECT_LE(done.err.size(), 4500u);
  }
}

TEST(Errors, EmptyValuesAreNotLeftOut) {
  const std::pair<Arguments, std::string> cases[] = {
      {{"run", "--model", ""}, "--model"},
      {join({"run", "--output", ""}, kTiny), "--output"},
      {join({"trace", "-o", ""}, kTiny), "--output"},
      {{"make-checkpoint", "--model", "olmoe", "--out", ""}, "--output"},
      {{"bench", "--suite", ""}, "--suite"},
      {join({"bench", "--json", ""}, kTiny), "--json"},
      {join({"bench", "--against", ""}, kTiny), "--against"},
      {{"report", ""}, "files"},
      {{"report", "rows.json", "-o", ""}, "--output"},
      {{"report", "rows.json", "--published", ""}, "--published"},
      {{"report", "rows.json", "--trace", ""}, "--trace"},
  };
  for (const auto& [arguments, name] : cases) {
    expect_misuse(arguments, {name + " is ''; give it a value"});
  }
}

TEST(Errors, NumbersAreReadStrictly) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"--tokens", "12x"},  {"--tokens", "0"},       {"--tokens", "-5"},
      {"--tokens", "1e3"},  {"--ranks", "0x2"},      {"--ranks", "65"},
      {"--threads", "-1"},  {"--repeat", "0"},       {"--seed", "1.5"},
      {"--experts", ""},    {"--balancedness", "2"}, {"--balancedness", "nan"},
      {"--deadline", "0"},  {"--deadline", "inf"},   {"--capacity-factor", "0"},
      {"--compute", "f16"}, {"--dtype", "bfloat"},
  };
  for (const auto& [name, value] : cases) {
    expect_misuse({"run", "--model", "olmoe", name, value}, {name + " is '" + value + "'"});
  }
  expect_misuse(
      {"make-checkpoint", "--model", "olmoe", "--out", "/tmp/x", "--max-shard-size", "2gb"},
      {"--max-shard-size is '2gb'", "1GiB"});
}

TEST(Errors, Backend) {
  expect_misuse(join({"run", "--backend", "gpu"}, kTiny), {"--backend is 'gpu'", "cpu or cuda"});
  expect_misuse(join({"run", "--backend", "cuda", "--threads", "2"}, kTiny),
                {"--threads", "--backend cpu"});
  expect_misuse(join({"run", "--backend", "cpu", "--reserved-sms", "2"}, kTiny),
                {"--reserved-sms", "--backend cuda"});
  expect_misuse(join({"run", "--reserved-sms", "2", "--threads", "1"}, kTiny),
                {"--reserved-sms", "--backend cuda"});
  expect_misuse(join({"run", "--reserved-sms", "-1"}, kTiny), {"--reserved-sms is '-1'"});
}

TEST(Errors, CudaWithoutAGpu) {
  if (gpu::device_count() > 0) GTEST_SKIP() << "there is a GPU";
  const std::vector<std::string> parts = {"--backend cuda", "--backend cpu"};
  for (const char* ranks : {"1", "2"}) {
    expect_error(join({"run", "--backend", "cuda", "--ranks", ranks}, kTiny), 2, "unsupported",
                 parts);
  }
  expect_error(join({"run", "--backend", "cuda"}, kTiny), 2, "unsupported", parts,
               {"RANK=0", "WORLD_SIZE=4"});
}

TEST(Errors, Files) {
  const TemporaryDirectory directory;
  expect_error({"run", "--checkpoint", (directory / "none").string()}, 2, "system", {"none"});
  test::write_file(directory / "config.json", "{");
  expect_error({"run", "--checkpoint", directory.path().string()}, 2, "invalid_config",
               {"config.json"});
  test::write_file(directory / "junk", "not a safetensors file");
  expect_error(join({"run", "--input", (directory / "junk").string()}, kTiny), 2, "invalid_file",
               {"junk"});
  expect_error(join({"run", "--input", (directory / "absent").string()}, kTiny), 2, "system",
               {"absent"});
  expect_misuse(join({"run", "--output", (directory / "no").string() + "/y"}, kTiny),
                {"--output", "no directory"});
}

class InputErrors : public ::testing::Test {
 protected:
  std::string path() const { return (directory_ / "x").string(); }
  void write(const std::vector<NamedMatrix>& matrices) { write_matrices(path(), matrices); }
  MatrixView x(std::int64_t rows, std::int64_t cols) const {
    return {values_.data(), DType::kF32, rows, cols, cols};
  }
  MatrixView ids(const std::vector<std::int32_t>& v) const {
    return {v.data(), DType::kI32, static_cast<std::int64_t>(v.size()) / 8, 8, 8};
  }
  void expect(const std::string& code, std::vector<std::string> parts, const Arguments& more = {}) {
    parts.push_back(path());  // not an error of the layer, which knows of no file
    expect_error(join(join({"run", "--input", path()}, kTiny), more), 2, code, parts);
  }

  TemporaryDirectory directory_;
  std::vector<float> values_ = std::vector<float>(1024, 0.5f);
};

TEST_F(InputErrors, Activations) {
  write({{"activations", x(2, 63)}});
  expect("shape_mismatch", {"'activations' is [2, 63]", "[2, 64]"});
  write({{"activations", x(2, 64)}});
  expect("shape_mismatch", {"is [2, 64]", "[3, 64]"}, {"--tokens", "3"});
  write({{"a", x(2, 64)}, {"b", x(2, 64)}});
  expect("missing_tensor", {"has 2 tensors", "none is named 'activations'", "names are: a, b"});
  const std::vector<std::int32_t> integers(64);
  write({{"activations", {integers.data(), DType::kI32, 1, 64, 64}}});
  expect("dtype_mismatch", {"'activations' is i32"});
}

TEST_F(InputErrors, Routing) {
  const std::vector<std::int32_t> good = {0, 1, 2, 3, 4, 5, 6, 7};
  write({{"activations", x(1, 64)}, {"topk_ids", ids(good)}});
  expect("missing_tensor", {"'topk_ids' is there without 'topk_weights'"});
  write({{"activations", x(2, 64)}, {"topk_ids", ids(good)}, {"topk_weights", x(2, 8)}});
  expect("shape_mismatch", {"'topk_ids' is [1, 8]", "[2, 8]"});
  const std::vector<std::int32_t> twice = {0, 1, 2, 3, 4, 5, 6, 0};
  write({{"activations", x(1, 64)}, {"topk_ids", ids(twice)}, {"topk_weights", x(1, 8)}});
  expect("invalid_argument", {"names expert 0 twice"});
  const std::vector<std::int32_t> outside = {0, 1, 2, 3, 4, 5, 6, 16};
  write({{"activations", x(1, 64)}, {"topk_ids", ids(outside)}, {"topk_weights", x(1, 8)}});
  expect("invalid_argument", {"topk_ids[0][7] is 16", "0 to 15"}, {"--ranks", "2"});
  write({{"activations", x(1, 64)}, {"topk_ids", x(1, 8)}, {"topk_weights", x(1, 8)}});
  expect("dtype_mismatch", {"'topk_ids' is f32"});
  write({{"activations", x(1, 64)}, {"topk_ids", ids(good)}, {"topk_weights", x(1, 8)}});
  expect("invalid_argument", {"--balancedness"}, {"--balancedness", "0.9"});
}

TEST(Errors, LayersThatDoNotFit) {
  expect_error({"run", "--model", "deepseek-v3", "--dtype", "f32", "--experts", "512", "--hidden",
                "65536", "--intermediate", "65536"},
               2, "capacity_exceeded", {"TB", "--experts", "--dtype fp8"});
}

TEST(Errors, ARankThatDoesNotComeIsATimeout) {
  expect_error(
      join({"run", "--deadline", "0.3"}, kTiny), 3, "timeout",
      {"rank 1 of 2", "RANK=0 and WORLD_SIZE=2 in the environment", "unset both", "--ranks"},
      {"RANK=0", "WORLD_SIZE=2", "SWITCHYARD_RENDEZVOUS=cli-test-" + std::to_string(::getpid())});
}

TEST(Errors, LauncherEnvironment) {
  expect_misuse(join({"run"}, kTiny), {"WORLD_SIZE=65", "64"}, {"RANK=0", "WORLD_SIZE=65"});
  expect_misuse(join({"run"}, kTiny), {"RANK"}, {"RANK=4", "WORLD_SIZE=2"});
  expect_misuse(join({"run"}, kTiny), {"WORLD_SIZE", "too large"},
                {"RANK=0", "WORLD_SIZE=99999999999"});
}

TEST(Errors, RanksThatDisagreeOnTheArithmeticNameIt) {
  const Completed done = run_switchyard(
      {"launch", "-n", "2", "--", "sh", "-c",
       "if [ $RANK = 0 ]; then dtype=f32; else dtype=bf16; fi; exec \"$0\" run --model olmoe "
       "--experts 16 --hidden 64 --intermediate 32 --tokens 8 --compute $dtype",
       SWITCHYARD_COMMAND});
  EXPECT_EQ(done.exit_code, 2);
  EXPECT_THAT(done.err, ::testing::AnyOf(HasSubstr("disagree on compute: f32 here, bf16 there"),
                                         HasSubstr("disagree on compute: bf16 here, f32 there")));
}

// With a limit of its resources. As a user of its own where this one is root, for whom the limit of
// threads does not hold.
Completed run_limited(int resource, rlim_t limit, const Arguments& arguments) {
  const TemporaryDirectory directory;
  const std::string out = (directory / "out").string();
  const std::string err = (directory / "err").string();
  const Invocation invocation(arguments, {});
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr int kFlags = O_WRONLY | O_CREAT | O_CLOEXEC;
    ::dup2(::open(out.c_str(), kFlags, 0600), STDOUT_FILENO);
    ::dup2(::open(err.c_str(), kFlags, 0600), STDERR_FILENO);
    const rlimit limits{limit, limit};
    constexpr uid_t kUser = 54321;
    if (::setrlimit(static_cast<__rlimit_resource>(resource), &limits) != 0) ::_exit(125);
    if (resource == RLIMIT_NPROC && ::geteuid() == 0 && ::setresuid(kUser, kUser, kUser) != 0) {
      ::_exit(125);
    }
    invocation.become();
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_file(out),
          read_file(err)};
}

TEST(Errors, ThreadsThatCannotBeMadeAreToldAtOnce) {
  const std::pair<int, rlim_t> cases[] = {{RLIMIT_AS, 200u << 20}, {RLIMIT_NPROC, 20}};
  for (const auto& [resource, limit] : cases) {
    SCOPED_TRACE(resource == RLIMIT_AS ? "address space" : "threads");
    const auto start = std::chrono::steady_clock::now();
    const Completed done = run_limited(
        resource, limit, join({"run", "--ranks", "64", "--tokens", "64", "--threads", "1"}, kTiny));
    if (done.exit_code == 126) GTEST_SKIP() << "other users cannot run the command";
    EXPECT_EQ(done.exit_code, 2) << done.err;
    EXPECT_THAT(done.err, HasSubstr("of 64 threads could be started"));
    EXPECT_THAT(done.err, HasSubstr("--ranks"));
    // Far below the 30 s that ranks wait for each other.
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(15));
  }
}

constexpr const char* kFull = "/dev/full";

TEST(Errors, StderrThatCannotBeWrittenKeepsTheExitCode) {
  const Arguments label = {"launch", "-n", "1", "--label", "--"};
  for (const char* err : {kFull, static_cast<const char*>(nullptr)}) {
    const auto exit_code = [err](const Arguments& arguments) {
      return run_switchyard_into("/dev/null", err, arguments);
    };
    EXPECT_EQ(exit_code({"run", "--bogus"}), 2);
    EXPECT_EQ(exit_code({"run", "--model", "nonesuch"}), 2);
    EXPECT_EQ(exit_code({"launch", "-n", "2", "--", "sh", "-c", "exit 7"}), 7);
    EXPECT_EQ(exit_code(join(label, {"sh", "-c", "echo no >&2; exit 7"})), 7);
    EXPECT_EQ(exit_code({"launch", "-n", "1", "--", "/no/such/program"}), 127);
  }
}

TEST(Errors, StdoutThatCannotBeWrittenIsNoSuccess) {
  const TemporaryDirectory directory;
  const std::string err = (directory / "err").string();
  for (const char* out : {kFull, static_cast<const char*>(nullptr)}) {
    const auto exit_code = [&](const Arguments& arguments) {
      std::filesystem::remove(err);
      return run_switchyard_into(out, err.c_str(), arguments);
    };
    for (const Arguments& arguments :
         {Arguments{"models"}, Arguments{"models", "--json"}, Arguments{"--version"},
          Arguments{"run", "--help"}, join({"run", "--tokens", "8"}, kTiny),
          Arguments{"launch", "-n", "1", "--label", "echo", "hello"}}) {
      SCOPED_TRACE(::testing::PrintToString(arguments));
      EXPECT_EQ(exit_code(arguments), 2);
      EXPECT_THAT(read_file(err), StartsWith("switchyard: error (system): cannot write to stdout"));
    }
    EXPECT_EQ(exit_code({"launch", "-n", "1", "--label", "sh", "-c", "echo no; exit 7"}), 7);
    EXPECT_EQ(exit_code(join({"run", "--tokens", "8", "--quiet"}, kTiny)), 0);
  }
}

TEST(Errors, TokensThatHaveNoRoomAreRefusedAtOnce) {
  expect_error({"run", "--model", "olmoe", "--experts", "2", "--top-k", "1", "--hidden", "8192",
                "--intermediate", "8", "--tokens", "16777216"},
               2, "capacity_exceeded", {"16,777,216 tokens of hidden size 8192", "fewer --tokens"});
}

// The examples say `switchyard`, and it need not be installed.
TEST(Launch, FindsItselfByName) {
  const Completed done = run_well({"launch", "-n", "2", "--label", "--", "switchyard", "--version"},
                                  {"PATH=/usr/bin:/bin"});
  EXPECT_THAT(done.out, HasSubstr("switchyard"));
}

TEST(Launch, NeedsRanksAndACommand) {
  expect_misuse({"launch"}, {"--ranks is required"});
  expect_misuse({"launch", "-n", "0", "--", "true"}, {"'0'"});
  expect_misuse({"launch", "-n", "2"}, {"no command"});
  expect_misuse({"launch", "-n", "2", "--lable", "--", "true"}, {"no option '--lable'"});
}

TEST(Launch, PassesExitCodesAndArguments) {
  EXPECT_EQ(run_switchyard({"launch", "-n", "2", "--", "sh", "-c", "exit 7"}).exit_code, 7);
  EXPECT_EQ(run_switchyard({"launch", "-n", "1", "--", "/no/such/program"}).exit_code, 127);
  EXPECT_EQ(
      run_switchyard({"launch", "-n", "1", "--timeout", "0.2", "--", "sleep", "60"}).exit_code,
      124);
  const Completed echo = run_switchyard({"launch", "-n", "1", "--", "echo", "-n", "--", "--help"});
  EXPECT_EQ(echo.out, "-- --help");
  const Completed label = run_switchyard({"launch", "-n", "1", "--label", "echo", "hello"});
  EXPECT_EQ(label.out, "[rank 0] hello\n");
}

TEST(Launch, FailedRunsKeepTheirExitCode) {
  expect_told({"launch", "-n", "2", "--", SWITCHYARD_COMMAND, "run", "--model", "nonesuch"}, 2,
              "unknown model 'nonesuch'");
}

TEST(Help, AndVersion) {
  const Completed version = run_well({"--version"});
  EXPECT_THAT(version.out, ::testing::MatchesRegex("switchyard [0-9]+\\.[0-9]+\\.[0-9]+\n"));
  for (const Arguments& command : {Arguments{},
                                   {"run"},
                                   {"make-checkpoint"},
                                   {"models"},
                                   {"doctor"},
                                   {"report"},
                                   {"tune"},
                                   {"launch"}}) {
    const Completed help = run_well(join(command, {"--help"}));
    EXPECT_THAT(help.out, HasSubstr("Usage: switchyard"));
    std::istringstream lines(help.out);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
  }
  EXPECT_THAT(run_switchyard({"run", "--help"}).out, HasSubstr("Examples:"));
}

// Where memory runs out is different on every machine: below the least limit of address space with
// which a run succeeds, each step is one at which something else is refused.
TEST(Errors, MemoryThatRunsOutAnywhereIsTold) {
  if (gpu::device_count() > 0) GTEST_SKIP() << "CUDA maps more than the limits";
  const auto run_with = [](int megabytes) {
    const std::string command = "ulimit -v " + std::to_string(megabytes * 1024) +
                                "; exec " SWITCHYARD_COMMAND
                                " run --model olmoe --hidden 256 --intermediate 128 --tokens 128 "
                                "--ranks 32 --quiet > /dev/null 2>&1";
    const int status = std::system(command.c_str());
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  };
  int fails = 50, works = 8'000;
  if (run_with(works) != 0) GTEST_SKIP() << "this machine needs more address space";
  while (works - fails > 4) {
    const int middle = (fails + works) / 2;
    (run_with(middle) == 0 ? works : fails) = middle;
  }
  for (int megabytes = works - 120; megabytes < works; megabytes += 4) {
    const int code = run_with(megabytes);
    EXPECT_TRUE(code == 0 || code == 2) << code << " with " << megabytes << " MB";
  }
}

}  // namespace
}  // namespace switchyard::cli
