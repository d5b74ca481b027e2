// Worlds over hosts, end to end: network namespaces are the hosts, and libfabric and TCP are
// between them. Skipped, with the reason, where namespaces may not be made.
//
//   SWITCHYARD_HOSTS_TRIALS=1000    stopped and killed ranks of each kind (default 6, of two levels
//   3) SWITCHYARD_HOSTS_SEED=7         another set of trials
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <set>

#include "fabric/launch.h"
#include "fabric/namespaces.h"
#include "fabric/place.h"
#include "models/model_table.h"
#include "network/proxy.h"
#include "reference/reference.h"
#include "support/accuracy.h"
#include "support/exchanges.h"
#include "support/layers.h"
#include "support/namespaces.h"
#include "support/numbers.h"
#include "support/ranks.h"
#include "support/staged_layers.h"
#include "support/stops.h"
#include "switchyard/symmetric_heap.h"
#include "switchyard/workspace.h"

namespace switchyard::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::Each;
using ::testing::HasSubstr;

MoeLayer small_layer(const World& world, int experts, milliseconds deadline = milliseconds(0)) {
  const LayerSpec spec = spec_of(64, 32, experts, 2);
  LayerOptions options;
  options.max_tokens = 64;
  options.cpu.num_threads = 1;
  options.deadline = deadline;
  return MoeLayer(world, spec, generate_weights(spec, DType::kF32, 1, {.num_threads = 1}), options);
}

// ----------------------------------------------------------------------------------- same bits

class HostsAndRanks : public HostsTest, public ::testing::WithParamInterface<std::tuple<int, int>> {
 protected:
  int num_hosts() const { return std::get<0>(GetParam()); }
  int ranks_of_host() const { return std::get<1>(GetParam()); }
  int size() const { return num_hosts() * ranks_of_host(); }

  // Runs body(world) as every rank.
  void run(const std::function<void(World&)>& body) {
    const std::vector<int> codes = test::run_processes(
        size(),
        [&](int rank) {
          enter_host_of(rank, ranks_of_host());
          World world = join(rank, size());
          EXPECT_THAT(world.fabric_name(), HasSubstr(std::to_string(num_hosts()) + " hosts"));
          body(world);
        },
        std::chrono::minutes(5));
    EXPECT_THAT(codes, Each(0));
  }
};

TEST_P(HostsAndRanks, EveryModelHasTheBitsOfOneHost) {
  ASSERT_NO_FATAL_FAILURE(make_hosts(num_hosts()));
  if (IsSkipped()) return;
  constexpr std::int64_t kTokens = 203;
  struct Case {
    LayerSpec spec;
    MoeWeights weights;
    Batch batch;
    Matrix expected;
  };
  std::vector<Case> cases;
  for (const ModelEntry& model : model_table()) {
    const LayerSpec spec = small_spec(model);
    const MoeWeights weights = make_weights(spec, DType::kBF16, 11, 1);
    const Batch batch = random_batch(spec, kTokens, DType::kBF16, 5);
    cases.push_back({spec, weights, batch,
                     run_batch(spec, weights, batch, Shares::of({kTokens}), DType::kBF16).output});
  }
  run([&](World& world) {
    const Shares shares = Shares::even(kTokens, world.size());
    for (std::size_t c = 0; c < cases.size(); ++c) {
      SCOPED_TRACE(model_table()[c].name);
      const auto& [spec, weights, batch, expected] = cases[c];
      LayerOptions options;
      options.cpu.num_threads = 1;
      options.max_tokens = static_cast<int>(kTokens);
      MoeLayer layer(world, spec, weights_of_rank(weights, world.rank(), world.size()), options);
      for (int pass = 0; pass < 3; ++pass) {
        BatchResult result = empty_result(spec, batch, world.size(), DType::kBF16);
        forward_share(layer, batch, shares, world.rank(), result);
        expect_same_rows(result.output, expected, shares, world.rank(), spec.hidden);
      }
    }
  });
}

// Rows of 2 KB, more at once than one put takes.
TEST_P(HostsAndRanks, LayersOfDevicesSumPerHost) {
  ASSERT_NO_FATAL_FAILURE(make_hosts(num_hosts()));
  if (IsSkipped()) return;
  const LayerSpec spec = spec_of(512, 16, 2 * size(), 4);
  const MoeWeights weights = make_weights(spec, DType::kF32, 11, 1);
  const std::int64_t tokens = 700 * size();
  const Batch batch = routed_batch(spec, tokens, DType::kF32, 5);
  const Shares shares = Shares::even(tokens, size());
  LayerOptions options;
  options.max_tokens = static_cast<int>(tokens);
  options.cpu.num_threads = 1;
  const Matrix expected =
      run_batch(spec, weights, batch, Shares::of({tokens}), DType::kF32, options).output;
  const std::vector<float> values = expected.floats();
  run([&](World& world) {
    LayerOptions staged_options;
    staged_options.max_tokens = 700;
    Staged staged = make_staged(world, spec, weights, staged_options, 2'000);
    for (int pass = 0; pass < 2; ++pass) {
      BatchResult result = empty_result(spec, batch, world.size(), DType::kF32);
      forward(staged, batch, shares, world.rank(), result);
      const auto first = static_cast<std::size_t>(
          shares.first[static_cast<std::size_t>(world.rank())] * spec.hidden);
      const std::size_t count = 700 * static_cast<std::size_t>(spec.hidden);
      const std::vector<float> got = result.output.floats();
      EXPECT_LE(
          reference::relative_error(
              std::span(got).subspan(first, count),
              std::vector<double>(values.begin() + static_cast<std::ptrdiff_t>(first),
                                  values.begin() + static_cast<std::ptrdiff_t>(first + count))),
          1e-6);
    }
  });
}

TEST_P(HostsAndRanks, ExchangesBringEveryRowAndSum) {
  ASSERT_NO_FATAL_FAILURE(make_hosts(num_hosts()));
  if (IsSkipped()) return;
  ExchangeSpec spec;
  spec.hidden = 48;
  spec.num_experts = 24;
  spec.top_k = 4;
  spec.max_tokens = 64;
  spec.combine = DType::kF32;
  run([&](World& world) {
    for (const bool pre_sum : {false, true}) {
      spec.pre_sum = pre_sum;
      spec.weights = pre_sum ? CombineWeights::kBySender : CombineWeights::kByReceiver;
      ExchangeOptions options;
      options.num_threads = 1;
      Exchange exchange(world, spec, options);
      ExchangeHandle handle = exchange.make_handle();
      for (std::uint64_t round = 0; round < 20; ++round) {
        const ExchangeBatch batch(spec, world.size(), DType::kBF16, round);
        check_round(exchange, handle, batch, world.rank());
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Namespaces, HostsAndRanks,
                         ::testing::Combine(::testing::Values(2, 3, 4), ::testing::Values(1, 2, 4)),
                         [](const auto& param) {
                           return std::to_string(std::get<0>(param.param)) + "_hosts_of_" +
                                  std::to_string(std::get<1>(param.param));
                         });

// ------------------------------------------------------------------------------- flow control

struct Flow {
  const char* name;
  int hosts;
  int tokens;   // of each rank that has some
  bool incast;  // all tokens go to rank 0
  NetworkOptions network;
};

class Flows : public HostsTest, public ::testing::WithParamInterface<Flow> {};

TEST_P(Flows, MoreThanAllWindowsHold) {
  const Flow flow = GetParam();
  ASSERT_NO_FATAL_FAILURE(make_hosts(flow.hosts));
  if (IsSkipped()) return;
  const LayerSpec spec = spec_of(128, 32, 2 * flow.hosts, 2);
  const MoeWeights weights = generate_weights(spec, DType::kBF16, 1, {.num_threads = 1});
  const std::int64_t total = std::int64_t{flow.tokens} * flow.hosts;
  const Shares shares = Shares::even(total, flow.hosts);
  Batch batch{Matrix::random(total, spec.hidden, DType::kBF16, 2), {}, {}, {}};
  for (std::int64_t token = 0; token < total; ++token) {
    // Each token goes to the two experts of one rank: as many pairs as there can be, or one target.
    const int owner = flow.incast ? 0 : static_cast<int>(token % flow.hosts);
    batch.topk_ids.insert(batch.topk_ids.end(), {2 * owner, 2 * owner + 1});
    batch.topk_weights.insert(batch.topk_weights.end(), {0.75f, 0.25f});
  }
  LayerOptions options;
  options.cpu.num_threads = 1;
  options.max_tokens = static_cast<int>(total);
  const Matrix expected =
      run_batch(spec, weights, batch, Shares::of({total}), DType::kBF16, options).output;
  const std::vector<int> codes = test::run_processes(
      flow.hosts,
      [&](int rank) {
        enter(*hosts_, rank);
        const World world = join(rank, flow.hosts, test::kGenerous, flow.network);
        LayerOptions mine = options;
        mine.max_tokens = flow.tokens;
        MoeLayer layer(world, spec, weights_of_rank(weights, rank, flow.hosts), mine);
        for (int pass = 0; pass < 2; ++pass) {
          BatchResult result = empty_result(spec, batch, flow.hosts, DType::kBF16);
          forward_share(layer, batch, shares, rank, result);
          expect_same_rows(result.output, expected, shares, rank, spec.hidden);
        }
      },
      std::chrono::minutes(5));
  EXPECT_THAT(codes, Each(0));
}

INSTANTIATE_TEST_SUITE_P(
    Namespaces, Flows,
    ::testing::Values(Flow{"Tokens8192APair", 2, 16'384, false, {}},
                      Flow{"Tokens32768APair", 2, 65'536, false, {}},
                      Flow{"Incast", 4, 4'096, true, {}},
                      Flow{"WindowsOfOneChunk", 3, 2'048, false, {2 << 10, 1}},
                      // A window of one chunk in each lane: the ring of commands has two lines.
                      Flow{"RingOfTwo", 2, 2'048, false, {2 << 10, 1}},
                      Flow{"IncastThroughOneChunk", 3, 1'024, true, {4 << 10, 1}}),
    [](const auto& param) { return std::string(param.param.name); });

// ------------------------------------------------------------------------- ranks that fail

// What stops: a layer of the CPU engine, or one of devices.
enum class Layers { kOneLevel, kTwoLevels };

class HostsStops : public HostsTest,
                   public ::testing::WithParamInterface<std::tuple<Stop, Layers>> {};

TEST_P(HostsStops, EveryRankNamesTheOneThatStopped) {
  ASSERT_NO_FATAL_FAILURE(make_hosts(3));
  if (IsSkipped()) return;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr milliseconds kDeadline{4'000};
#else
  constexpr milliseconds kDeadline{2'000};
#endif
  const Stop how = std::get<0>(GetParam());
  const bool two_levels = std::get<1>(GetParam()) == Layers::kTwoLevels;
  const std::uint64_t trials = test::number_from("SWITCHYARD_HOSTS_TRIALS", two_levels ? 3 : 6);
  const std::uint64_t seed = test::number_from("SWITCHYARD_HOSTS_SEED", 1);
  StopTally tally;
  for (std::uint64_t number = seed; number < seed + trials && !tally.is_enough(); ++number) {
    const StopTrial trial(number, 3);
    SCOPED_TRACE(trial.words);
    const SharedBoard board;
    board.blame_nobody();
    std::vector<pid_t> pids;
    for (int rank = 0; rank < trial.size; ++rank) {
      const pid_t pid = ::fork();
      ASSERT_GE(pid, 0);
      if (pid == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        try {
          enter_host_of(rank, trial.ranks_of_host);
          const World world = join(rank, trial.size);
          // Ranks that stop in two levels leave others with more rows than sockets hold.
          const bool large = two_levels && how == Stop::kStop;
          const LayerSpec spec = large ? spec_of(2048, 8, 16, 4) : spec_of(64, 32, 16, 4);
          const std::int64_t tokens = large ? 800 : 40;
          const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
          LayerOptions options;
          options.max_tokens = static_cast<int>(tokens);
          options.deadline = kDeadline;
          options.cpu.num_threads = 1;
          std::optional<MoeLayer> layer;
          std::optional<Staged> staged;
          if (two_levels) {
            options.cpu.num_threads = 0;
            staged.emplace(make_staged(world, spec, weights, options));
          } else {
            layer.emplace(world, spec, weights, options);
          }
          const Matrix x = Matrix::random(tokens, spec.hidden, DType::kF32, 1);
          Matrix y(tokens, spec.hidden, DType::kF32);
          ForwardInput input;
          input.activations = x.view();
          ForwardOutput output;
          output.data = y.row(0);
          output.dtype = DType::kF32;
          pass_until_failure(*board, rank, [&] {
            if (layer) {
              layer->forward(input, output);
            } else {
              staged->layer->forward(input, output);
              staged->device->synchronize_all();
              staged->layer->check();
            }
          });
        } catch (const std::exception& error) {
          std::snprintf(board->words[rank], sizeof board->words[rank], "%s", error.what());
        }
        ::_exit(0);
      }
      pids.push_back(pid);
    }
    tally.play(*board, pids, trial, how);
  }
  tally.judge(how, kDeadline);
  // On a machine that is busy with something else.
  if (how == Stop::kKill) {
    EXPECT_LT(tally.longest_ms(), 2'000);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Namespaces, HostsStops,
    ::testing::Combine(::testing::Values(Stop::kKill, Stop::kStop),
                       ::testing::Values(Layers::kOneLevel, Layers::kTwoLevels)),
    [](const auto& param) {
      return std::string(std::get<0>(param.param) == Stop::kKill ? "Kill" : "Stop") +
             (std::get<1>(param.param) == Layers::kTwoLevels ? "InTwoLevels" : "");
    });

// A rank's program throws or returns: its layer and its World are destroyed, and nothing is lost on
// the way. The others wait for it in vain, but not for their deadlines.
class HostsReturns : public HostsTest,
                     public ::testing::WithParamInterface<std::tuple<int, Layers>> {};

TEST_P(HostsReturns, EveryRankNamesTheOneThatReturned) {
  const int returns = std::get<0>(GetParam());
  const bool two_levels = std::get<1>(GetParam()) == Layers::kTwoLevels;
  on_hosts(2, 4, [&](int rank) {
    const World world = join(rank, 4);
    const LayerSpec spec = spec_of(64, 32, 8, 2);
    const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
    const Batch batch = random_batch(spec, 40, DType::kF32, 1);
    const Shares shares = Shares::even(40, 4);
    BatchResult result = empty_result(spec, batch, 4, DType::kF32);
    LayerOptions options;
    options.max_tokens = 64;
    std::optional<MoeLayer> layer;
    std::optional<Staged> staged;
    if (two_levels) {
      staged.emplace(make_staged(world, spec, weights, options));
    } else {
      options.cpu.num_threads = 1;
      layer.emplace(world, spec, weights_of_rank(weights, rank, 4), options);
    }
    const auto pass = [&] {
      if (layer) return forward_share(*layer, batch, shares, rank, result);
      forward(*staged, batch, shares, rank, result);
      staged->device->synchronize_all();
      staged->layer->check();
    };
    for (int i = 0; i < 3; ++i) pass();
    if (rank == returns) return;
    const auto start = test::Clock::now();
    const test::Blame blame = test::blame_of(
        returns,
        [&] {
          for (;;) pass();
        },
        "link");
    EXPECT_THAT(blame.words, HasSubstr(fmt::format("rank {} ", returns)));
    // (Its neighbour may see more of its end by then.)
    EXPECT_THAT(blame.words, ::testing::ContainsRegex("has destroyed its World|process [0-9]+ has "
                                                      "exited|closed its connection"));
    EXPECT_LT(test::since(start), test::kAtOnce);
  });
}

INSTANTIATE_TEST_SUITE_P(Namespaces, HostsReturns,
                         ::testing::Combine(::testing::Values(0, 3),
                                            ::testing::Values(Layers::kOneLevel,
                                                              Layers::kTwoLevels)),
                         [](const auto& param) {
                           return "Rank" + std::to_string(std::get<0>(param.param)) +
                                  (std::get<1>(param.param) == Layers::kTwoLevels ? "InTwoLevels"
                                                                                  : "");
                         });

// A cable comes out during passes, and comes back before the deadline, or does not.
class HostsCable : public HostsTest, public ::testing::WithParamInterface<bool> {};

TEST_P(HostsCable, OutForAWhileOrForGood) {
  ASSERT_NO_FATAL_FAILURE(make_hosts(3));
  if (IsSkipped()) return;
  const bool comes_back = GetParam();
  const milliseconds deadline{comes_back ? 20'000 : 2'000};
  test::SharedWithChildren<Board> board;
  std::atomic<bool>* const enough = new (&board->words[7]) std::atomic<bool>(false);
  const auto play_cable = [&] {
    EXPECT_TRUE(test::eventually([&] { return board->epochs[0] >= 3; }));
    set_connected(*hosts_, 2, false);
    std::this_thread::sleep_for(milliseconds(700));
    if (comes_back) {
      set_connected(*hosts_, 2, true);
      const std::uint64_t seen = board->epochs[0];
      EXPECT_TRUE(test::eventually([&] { return board->epochs[0] > seen + 3; }));
      *enough = true;
    }
  };
  const std::vector<int> codes = test::run_processes(4, [&](int rank) {
    if (rank == 3) return play_cable();
    enter(*hosts_, rank);
    const World world = join(rank, 3);
    const LayerSpec spec = spec_of(64, 32, 6, 2);
    const MoeWeights weights = generate_weights(spec, DType::kF32, 1, {.num_threads = 1});
    LayerOptions options;
    options.max_tokens = 64;
    options.deadline = deadline;
    options.cpu.num_threads = 1;
    MoeLayer layer(world, spec, weights, options);
    const Batch batch = random_batch(spec, 60, DType::kF32, 1);
    const Shares shares = Shares::even(60, 3);
    const Matrix expected = run_batch(spec, weights, batch, Shares::of({60}), DType::kF32).output;
    BatchResult result = empty_result(spec, batch, 3, DType::kF32);
    int blamed = -1;
    try {
      // All ranks must agree on the last pass: it is the first that begins after rank 0 said so.
      for (std::uint64_t epoch = 1;; ++epoch) {
        board->epochs[rank] = epoch;
        forward_share(layer, batch, shares, rank, result);
        expect_same_rows(result.output, expected, shares, rank, spec.hidden);
        if (rank == 0 && *enough && board->blamed[0] == 0) {
          board->blamed[0] = static_cast<int>(epoch) + 2;
        }
        if (board->blamed[0] != 0 && epoch >= static_cast<std::uint64_t>(board->blamed[0])) break;
      }
    } catch (const TimeoutError& error) {
      blamed = error.failure().peer_rank;
    }
    if (comes_back) {
      EXPECT_EQ(blamed, -1);
    } else if (rank == 2) {
      EXPECT_THAT(blamed, ::testing::AnyOf(0, 1));  // both are beyond its cable
    } else {
      EXPECT_EQ(blamed, 2);
    }
  });
  EXPECT_THAT(codes, Each(0));
}

INSTANTIATE_TEST_SUITE_P(Namespaces, HostsCable, ::testing::Bool(), [](const auto& param) {
  return std::string(param.param ? "ComesBack" : "StaysOut");
});

// Two of three hosts cannot reach each other, and each takes the other for silent. Both reach a
// third one in front of one of them, and report the same failure.
TEST_F(HostsTest, HostsThatCannotReachEachOtherReportOneFailure) {
  constexpr int kOther = 2;
  for (const int one : {0, 1}) {
    SCOPED_TRACE(::testing::Message() << "hosts " << one << " and " << kOther);
    ASSERT_NO_FATAL_FAILURE(make_hosts(3));
    if (IsSkipped()) return;
    test::SharedWithChildren<Board> board;
    const std::vector<int> codes = test::run_processes(4, [&](int rank) {
      if (rank == 3) {
        EXPECT_TRUE(test::eventually([&] { return board->epochs[0] >= 3; }));
        cut_path(*hosts_, one, kOther);
        cut_path(*hosts_, kOther, one);
        return;
      }
      enter(*hosts_, rank);
      const World world = join(rank, 3);
      MoeLayer layer = small_layer(world, 6, milliseconds(2'000));
      const LayerSpec& spec = layer.spec();
      const Batch batch = random_batch(spec, 60, DType::kF32, 1);
      BatchResult result = empty_result(spec, batch, 3, DType::kF32);
      try {
        for (std::uint64_t epoch = 1;; ++epoch) {
          board->epochs[rank] = epoch;
          forward_share(layer, batch, Shares::even(60, 3), rank, result);
        }
      } catch (const TimeoutError& error) {
        board->found[rank] = number_of(error.failure());
        EXPECT_THAT(error.failure().peer_rank, ::testing::AnyOf(one, kOther)) << error.what();
      }
    });
    EXPECT_THAT(codes, Each(0));
    EXPECT_EQ(board->found[0], board->found[1]);
    EXPECT_EQ(board->found[0], board->found[2]);
  }
}

// --------------------------------------------------------------------- who is let in, and what

TEST_F(HostsTest, StrangersAndOtherSecretsAreRefusedAndTheWorldForms) {
  ASSERT_NO_FATAL_FAILURE(make_hosts(3));
  if (IsSkipped()) return;
  const std::vector<int> codes = test::run_processes(6, [&](int child) {
    if (child < 3) {  // the ranks
      enter(*hosts_, child);
      // The last one comes when the others have been tried.
      if (child == 2) std::this_thread::sleep_for(milliseconds(1'500));
      World world = join(child, 3);
      test::check_all_gather(world, 100);
      return;
    }
    enter(*hosts_, child - 3);
    if (child == 3) {  // the right rank with the wrong secret
      ::setenv("SWITCHYARD_SECRET", "not the secret of these ranks", 1);
      EXPECT_THAT(test::error_of(ErrorCode::kInvalidArgument, [&] { join(2, 3); }),
                  HasSubstr("SWITCHYARD_SECRET"));
      return;
    }
    const TcpEndpoint endpoint = parse_tcp(rendezvous());
    const auto until = test::Clock::now() + milliseconds(1'200);
    test::Numbers numbers(static_cast<std::uint64_t>(child));
    std::vector<UniqueFd> idle;
    while (test::Clock::now() < until) {
      UniqueFd socket = connect_tcp(endpoint, until);
      if (!socket) continue;
      if (child == 5 && idle.size() < 200) {  // says nothing, and does not go
        idle.push_back(std::move(socket));
        continue;
      }
      std::vector<char> garbage(static_cast<std::size_t>(numbers.between(1, 300)));
      for (char& byte : garbage) byte = static_cast<char>(numbers.between(0, 255));
      ::send(socket.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL);
      std::this_thread::sleep_for(milliseconds(2));
    }
  });
  EXPECT_THAT(codes, Each(0));
}

// Local addresses and ports of a network namespace's TCP sockets that listen.
std::vector<sockaddr_in> listeners_here() {
  std::ifstream table("/proc/thread-self/net/tcp");
  std::string line;
  std::getline(table, line);
  std::vector<sockaddr_in> found;
  while (std::getline(table, line)) {
    unsigned address = 0, port = 0, state = 0;
    constexpr unsigned kListen = 10;
    if (std::sscanf(line.c_str(), " %*d: %8X:%4X %*8X:%*4X %2X", &address, &port, &state) != 3 ||
        state != kListen) {
      continue;
    }
    sockaddr_in one{};
    one.sin_family = AF_INET;
    one.sin_addr.s_addr = address;
    one.sin_port = htons(static_cast<std::uint16_t>(port));
    found.push_back(one);
  }
  return found;
}

int num_descriptors() {
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                                        std::filesystem::directory_iterator()));
}

// Over TCP the provider of the network listens while a world lives.
TEST_F(HostsTest, StrangersCostALivingWorldNoDescriptors) {
  ASSERT_NO_FATAL_FAILURE(make_hosts(2));
  if (IsSkipped()) return;
  constexpr int kMany = 1'000'000'000;
  struct Shared {
    std::atomic<int> passes{0};
    std::atomic<int> strangers{0};  // 1: knocked in vain, 2: many have knocked
    std::atomic<int> last_pass{kMany};
  };
  test::SharedWithChildren<Shared> memory;
  Shared& shared = *memory;
  const auto open_socket = [](const sockaddr_in& to) {
    UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) {
      EXPECT_EQ(errno, EINPROGRESS);
    }
    return socket;
  };
  const auto is_let_in = [](const UniqueFd& socket, milliseconds patience) {
    pollfd entry{socket.get(), POLLOUT, 0};
    return ::poll(&entry, 1, static_cast<int>(patience.count())) == 1 &&
           (entry.revents & (POLLERR | POLLHUP)) == 0;
  };
  const std::vector<int> codes = test::run_processes(3, [&](int child) {
    if (child == 2) {
      enter(*hosts_, 0);
      EXPECT_TRUE(test::eventually([&] { return shared.passes >= 3; }));
      const std::vector<sockaddr_in> ports = listeners_here();
      EXPECT_FALSE(ports.empty());
      std::vector<UniqueFd> held;
      for (const sockaddr_in& port : ports) {
        // Not on all addresses: the network between the hosts is this one.
        EXPECT_NE(port.sin_addr.s_addr, htonl(INADDR_ANY));
        EXPECT_TRUE(test::eventually(
            [&] { return !is_let_in(open_socket(port), milliseconds(300)); }, milliseconds(5'000)))
            << "strangers are let in";
      }
      const int before = shared.passes;
      shared.strangers = 1;
      EXPECT_TRUE(test::eventually([&] { return shared.passes > before + 1; }));
      for (int i = 0; i < 300 && !ports.empty(); ++i) {
        held.push_back(open_socket(ports[static_cast<std::size_t>(i) % ports.size()]));
      }
      std::this_thread::sleep_for(milliseconds(500));
      int let_in = 0;
      for (const UniqueFd& socket : held) let_in += is_let_in(socket, milliseconds(0));
      EXPECT_EQ(let_in, 0);
      const int then = shared.passes;
      EXPECT_TRUE(test::eventually([&] { return shared.passes > then + 1; }));
      shared.strangers = 2;
      return;
    }
    enter(*hosts_, child);
    const World world = join(child, 2);
    MoeLayer layer = small_layer(world, 4);
    const LayerSpec& spec = layer.spec();
    const Batch batch = random_batch(spec, 40, DType::kF32, 1);
    BatchResult result = empty_result(spec, batch, 2, DType::kF32);
    int before = -1;
    for (int pass = 1; pass <= shared.last_pass; ++pass) {
      forward_share(layer, batch, Shares::even(40, 2), child, result);
      if (child != 0) continue;
      if (shared.strangers >= 1 && before < 0) before = num_descriptors();
      // The other rank may be in the next pass already, but cannot end it without this one.
      if (shared.strangers == 2 && shared.last_pass == kMany) shared.last_pass = pass + 2;
      shared.passes = pass;
    }
    // (One that got in while the world formed may have gone meanwhile.)
    if (child == 0) {
      EXPECT_LE(num_descriptors(), before);
    }
  });
  EXPECT_THAT(codes, Each(0));
}

TEST_F(HostsTest, AMissingRankIsNamed) {
  on_hosts(2, 2, [&](int rank) {
    const std::string words =
        test::timeout_of(ErrorCode::kTimeout, 2, [&] { join(rank, 3, milliseconds(3'000)); });
    EXPECT_THAT(words, HasSubstr("rank 2"));
  });
}

TEST_F(HostsTest, RanksOfOneHostNeedNoNetwork) {
  on_hosts(1, 2, [&](int rank) {
    World world = join(rank, 2);
    EXPECT_STREQ(world.fabric_name(), "shared memory");
    test::check_symmetric_memory(world, 8192);
  });
}

TEST_F(HostsTest, WhatNeedsOneHostIsRefusedWithARemedy) {
  on_hosts(2, 2, [&](int rank) {
    World world = join(rank, 2);
    EXPECT_THAT(test::error_of(ErrorCode::kUnsupported, [&] { SymmetricHeap heap(world, 4096); }),
                HasSubstr("several hosts"));
    EXPECT_THAT(test::error_of(ErrorCode::kUnsupported, [&] { world.fabric().exchange_fds(0); }),
                HasSubstr("file descriptors"));
    const LayerSpec spec = spec_of(64, 32, 8, 2);
    WorkspaceOptions on_gpu;
    on_gpu.backend = Backend::kCuda;
    EXPECT_THAT(
        test::error_of(ErrorCode::kUnsupported, [&] { Workspace workspace(world, spec, on_gpu); }),
        HasSubstr("ranks on GPUs"));
    test::check_all_gather(world, 10);  // it stays usable
  });
}

TEST_F(HostsTest, WindowsThatDifferAreRefused) {
  on_hosts(2, 2, [&](int rank) {
    NetworkOptions network;
    network.window = rank == 0 ? 4 : 5;
    EXPECT_THAT(
        test::error_of(ErrorCode::kSpecMismatch, [&] { join(rank, 2, test::kGenerous, network); }),
        HasSubstr("5 of"));
  });
}

TEST_F(HostsTest, TorchrunsVariablesJoinHosts) {
  on_hosts(2, 4, [&](int rank) {
    ::unsetenv("SWITCHYARD_RENDEZVOUS");
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    ::setenv("WORLD_SIZE", "4", 1);
    ::setenv("LOCAL_RANK", std::to_string(rank % 2).c_str(), 1);
    ::setenv("LOCAL_WORLD_SIZE", "2", 1);
    ::setenv("MASTER_ADDR", hosts_->ip(0).c_str(), 1);
    ::setenv("MASTER_PORT", "29500", 1);
    for (int world_number = 0; world_number < 3; ++world_number) {  // at the same port in turn
      World world = World::from_environment(test::with_deadline(test::kGenerous));
      EXPECT_EQ(world.rank(), rank);
      test::check_all_gather(world, 10);
    }
  });
}

TEST_F(HostsTest, AbortReachesOtherHosts) {
  on_hosts(2, 4, [&](int rank) {
    const World world = join(rank, 4);
    MoeLayer layer = small_layer(world, 8);
    const LayerSpec& spec = layer.spec();
    const auto start = test::Clock::now();
    if (rank == 3) {
      std::this_thread::sleep_for(milliseconds(100));
      world.abort();
      std::this_thread::sleep_for(milliseconds(200));
      return;
    }
    const Batch batch = random_batch(spec, 40, DType::kF32, 1);
    BatchResult result = empty_result(spec, batch, 4, DType::kF32);
    test::blame_of(
        3, [&] { forward_share(layer, batch, Shares::even(40, 4), rank, result); }, "abort");
    EXPECT_LT(test::since(start), test::kAtOnce);
  });
}

// -------------------------------------------------------------------------------- the launcher

// A rank of the tests below, as a program of its own.
TEST(LaunchedOverHosts, DISABLED_Rank) {
  World world = World::from_environment(test::with_deadline(test::kGenerous));
  test::check_all_gather(world, 10);
  if (std::getenv("TEST_STAYS") != nullptr) {
    std::ofstream(std::getenv("TEST_STAYS")) << ::getpid();
    std::this_thread::sleep_for(std::chrono::minutes(10));
  }
  std::printf("rank %d of %d, local %s of %s: %s\n", world.rank(), world.size(),
              std::getenv("LOCAL_RANK"), std::getenv("LOCAL_WORLD_SIZE"), world.fabric_name());
  std::fflush(stdout);
}

class HostsLaunch : public HostsTest {
 protected:
  static LaunchOptions options() {
    LaunchOptions options;
    options.num_ranks = 4;
    options.command = {std::filesystem::read_symlink("/proc/self/exe"),
                       "--gtest_also_run_disabled_tests", "--gtest_filter=LaunchedOverHosts.*"};
    options.label_output = true;
    return options;
  }
  // An `ssh` that goes into the namespace of an address.
  void fake_ssh() {
    directory_ = ::testing::TempDir() + "ssh" + std::to_string(::getpid());
    std::filesystem::create_directory(directory_);
    std::ofstream script(directory_ + "/ssh");
    script << "#!/bin/sh\n[ \"$1 $2\" = '-o BatchMode=yes' ] || exit 90\ncase $3 in\n";
    for (int h = 0; h < hosts_->size(); ++h) {
      script << "  " << hosts_->ip(h) << ") namespace=/proc/" << ::getpid() << "/fd/"
             << hosts_->fd(h) << " ;;\n";
    }
    // As sshd: the words after the host are one command for a shell, in the home directory and with
    // an environment of its own.
    script << "esac\nshift 3\ncd /\nexec env -i PATH=\"$PATH\" FI_PROVIDER=tcp "
              "nsenter --net=$namespace sh -c \"$*\"\n";
    script.close();
    std::filesystem::permissions(directory_ + "/ssh", std::filesystem::perms::owner_all);
    ::setenv("PATH", (directory_ + ":" + std::getenv("PATH")).c_str(), 1);
  }
  LaunchOptions options_over_ssh() {
    fake_ssh();
    LaunchOptions how = options();
    how.hosts = {hosts_->ip(0), hosts_->ip(1)};
    return how;
  }
  void TearDown() override {
    if (!directory_.empty()) std::filesystem::remove_all(directory_);
  }
  std::string directory_;
};

void expect_four_ranks_on_two_hosts(const LaunchOptions& how) {
  ::testing::internal::CaptureStdout();
  const int code = launch(how);
  const std::string lines = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(code, 0) << lines;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_THAT(lines, HasSubstr(fmt::format("[rank {0}] rank {0} of 4, local {1} of 2: 2 hosts, "
                                             "libfabric",
                                             rank, rank % 2)));
  }
}

TEST_F(HostsLaunch, NamespacesAsHosts) {
  ASSERT_NO_FATAL_FAILURE(make_hosts(1));  // asks if they can be made
  if (IsSkipped()) return;
  LaunchOptions how = options();
  how.namespaces = 2;
  expect_four_ranks_on_two_hosts(how);
}

TEST_F(HostsLaunch, OverSsh) {
  ASSERT_NO_FATAL_FAILURE(make_hosts(2));
  if (IsSkipped()) return;
  LaunchOptions how = options_over_ssh();
  expect_four_ranks_on_two_hosts(how);
}

// A rank on another machine does not outlive its launcher.
TEST_F(HostsLaunch, RanksEndWithTheirSsh) {
  ASSERT_NO_FATAL_FAILURE(make_hosts(2));
  if (IsSkipped()) return;
  LaunchOptions how = options_over_ssh();
  how.num_ranks = 2;
  const std::string file = directory_ + "/pid";
  how.environment = {{"TEST_STAYS", file}};
  how.deadline = milliseconds(4'000);
  how.grace = milliseconds(500);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(launch(how), 124);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("still run after"));
  pid_t pid = 0;
  std::ifstream(file) >> pid;
  ASSERT_GT(pid, 0);
  EXPECT_TRUE(test::eventually([&] { return ::kill(pid, 0) != 0; }, milliseconds(10'000)));
}

TEST(HostsLaunchOptions, NonsenseIsRefused) {
  LaunchOptions how;
  how.command = {"true"};
  how.num_ranks = 3;
  how.hosts = {"a", "b"};
  EXPECT_THAT(test::error_of(ErrorCode::kInvalidArgument, [&] { launch(how); }),
              HasSubstr("3 ranks cannot be dealt evenly to 2 hosts"));
  how.hosts = {"-oProxyCommand=x"};
  EXPECT_THAT(test::error_of(ErrorCode::kInvalidArgument, [&] { launch(how); }),
              HasSubstr("no name of a host"));
  how.hosts = {"a"};
  how.namespaces = 2;
  EXPECT_THAT(test::error_of(ErrorCode::kInvalidArgument, [&] { launch(how); }),
              HasSubstr("use one of them"));
}

}  // namespace
}  // namespace switchyard::testing
