// A program that ends while a thread of its own is in a pass: nothing that the thread uses may be
// destroyed under it.
//   exit_while_running TIMES   starts itself so many times, and fails if one of them does not end
//                              with code 0
#include <spawn.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "support/layers.h"
#include "switchyard/exchange.h"
#include "switchyard/grouped_gemm.h"

extern char** environ;  // NOLINT(readability-redundant-declaration)

// A process that ends in the midst of a call frees nothing that the call holds. AddressSanitizer
// looks for memory that is used after its end, not for leaks. (The name is the sanitizer's.)
extern "C" const char* __asan_default_options();  // NOLINT(bugprone-reserved-identifier)
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

namespace switchyard::testing {
namespace {

std::atomic<int> passes{0};

// None of this is ever destroyed: it is the thread's.
void loop_over_passes() {
  const LayerSpec spec = spec_of(256, 128, 8, 2);
  auto* const weights = new MoeWeights(generate_weights(spec, DType::kBF16, 1, {.num_threads = 1}));
  auto* const layer = new MoeLayer(World::single(), spec, *weights, {.cpu = {.num_threads = 2}});
  const Matrix x = Matrix::random(48, 256, DType::kBF16, 2);
  Matrix y(48, 256, DType::kBF16);
  ForwardInput in;
  const ForwardOutput out{.data = y.row(0)};
  for (int rows = 1;; rows = rows % 48 + 1) {
    in.activations = {x.view().data, DType::kBF16, rows, 256, 256};
    layer->forward(in, out);
    // Code for other shapes is generated, too.
    GroupedGemmWeights one;
    one.matrices.push_back({x.view().data, DType::kBF16, 48, 200 + rows, 256});
    GroupedGemm gemm({1, 48, 200 + rows, {}, {}}, one, {.num_threads = 2});
    std::vector<float> product(48 * 48);
    const std::int32_t end = rows;
    GroupedInput input;
    input.x = {x.view().data, DType::kBF16, rows, 200 + rows, 256};
    input.ends = {&end, 1};
    gemm.run(input, {.data = product.data(), .dtype = DType::kF32, .rows = 48});
    ++passes;
  }
}

int end_during_a_pass(int number) {
  std::thread(loop_over_passes).detach();
  while (passes.load() < 3) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::microseconds(37 * number));
  return 0;
}

int run(const char* program, int times) {
  for (int i = 0; i < times; ++i) {
    const std::string number = std::to_string(i);
    char* arguments[] = {const_cast<char*>(program), const_cast<char*>("child"),
                         const_cast<char*>(number.c_str()), nullptr};
    pid_t child = 0;
    if (::posix_spawn(&child, "/proc/self/exe", nullptr, nullptr, arguments, environ) != 0) {
      std::perror("posix_spawn");
      return 1;
    }
    int status = 0;
    if (::waitpid(child, &status, 0) != child || status != 0) {
      std::printf("run %d ended with %s %d\n", i, WIFSIGNALED(status) ? "signal" : "code",
                  WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
      return 1;
    }
  }
  std::printf("%d runs ended during a pass: ok\n", times);
  return 0;
}

}  // namespace
}  // namespace switchyard::testing

int main(int count, char** arguments) {
  if (count == 3) return switchyard::testing::end_during_a_pass(std::atoi(arguments[2]));
  return switchyard::testing::run(arguments[0], count == 2 ? std::atoi(arguments[1]) : 50);
}
