// A warp on a CPU, for device code that all lanes of a warp execute together. Every lane is a fiber
// that runs until it comes to a collective (__shfl_sync() and the like) and goes on when all others
// have come to one; if that is another one, or a lane has ended before it, the warp has diverged,
// which a GPU would make a hang or garbage of: Diverged is thrown.
//
// To be included before the code, which asks for it by SWITCHYARD_EMULATED_WARP.
#pragma once

#define SWITCHYARD_EMULATED_WARP
#define __device__
#define __forceinline__ inline

#include <fmt/format.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace switchyard::test {

struct Diverged : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class EmulatedWarp {
 public:
  static constexpr int kLanes = 32;
  using Words = std::array<std::uint32_t, kLanes>;

  // Executes lane_body(lane) by all lanes.
  static void run(std::function<void(int)> lane_body) {
    EmulatedWarp warp(std::move(lane_body));
    running_ = &warp;
    warp.run_to_end();
    running_ = nullptr;
  }
  static int lane() { return running_->lane_; }

  // Returns the words that all lanes have brought to the collective `name`.
  static const Words& meet(std::uint32_t word, const char* name) {
    EmulatedWarp& warp = *running_;
    Lane& lane = warp.lanes_[static_cast<std::size_t>(warp.lane_)];
    // The first lane to go on may be at the next collective before others have read this one's
    // words.
    Words& words = warp.words_[++lane.collectives % 2];
    words[static_cast<std::size_t>(warp.lane_)] = word;
    lane.at = name;
    leave_for(lane.here, warp.outside_);
    return words;
  }

 private:
  static constexpr std::size_t kStackBytes = 64 * 1024;
  struct Lane {
    ucontext_t start;
    jmp_buf here;
    bool started = false;
    std::unique_ptr<std::byte[]> stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
    const char* at = nullptr;  // the collective; null at the end
    std::uint64_t collectives = 0;
  };

  explicit EmulatedWarp(std::function<void(int)> lane_body) : body_(std::move(lane_body)) {
    for (Lane& lane : lanes_) {
      getcontext(&lane.start);
      lane.start.uc_stack.ss_sp = lane.stack.get();
      lane.start.uc_stack.ss_size = kStackBytes;
      makecontext(&lane.start, &EmulatedWarp::begin, 0);
    }
  }
  static void begin() {
    running_->body_(running_->lane_);
    running_->lanes_[static_cast<std::size_t>(running_->lane_)].at = nullptr;
    _longjmp(running_->outside_, 1);
  }
  // A fiber is started by setcontext() and from then on left and entered by jumps, which make no
  // system call: a test changes fibers some hundred million times. (Functions of their own, because
  // the compiler must keep no variable in a register across _setjmp().)
  [[gnu::noinline]] static void leave_for(jmp_buf here, jmp_buf there) {
    if (_setjmp(here) == 0) _longjmp(there, 1);
  }
  [[gnu::noinline]] static void leave_to_start(jmp_buf here, const ucontext_t& there) {
    if (_setjmp(here) == 0) setcontext(&there);
  }
  void enter(Lane& lane) {
    if (lane.started) return leave_for(outside_, lane.here);
    lane.started = true;
    leave_to_start(outside_, lane.start);
  }
  void run_to_end() {
    do {
      for (lane_ = 0; lane_ < kLanes; ++lane_) {
        enter(lanes_[static_cast<std::size_t>(lane_)]);
      }
      for (int i = 1; i < kLanes; ++i) {
        const char *first = lanes_[0].at, *other = lanes_[static_cast<std::size_t>(i)].at;
        if (first == other) continue;
        const auto name = [](const char* at) { return at == nullptr ? "the end" : at; };
        throw Diverged(fmt::format("lane 0 is at {}, lane {} at {}", name(first), i, name(other)));
      }
    } while (lanes_[0].at != nullptr);
  }

  inline static thread_local EmulatedWarp* running_ = nullptr;

  std::function<void(int)> body_;
  jmp_buf outside_;
  std::array<Lane, kLanes> lanes_;
  std::array<Words, 2> words_{};
  int lane_ = 0;
};

}  // namespace switchyard::test

// --- CUDA's functions, for whole warps.

template <typename T>
T emulated_read(T value, int lane, const char* name) {
  const auto& words =
      switchyard::test::EmulatedWarp::meet(std::bit_cast<std::uint32_t>(value), name);
  return std::bit_cast<T>(words[static_cast<std::size_t>(lane)]);
}
template <typename T>
T __shfl_sync(std::uint32_t, T value, int lane) {
  return emulated_read(value, lane & 31, "__shfl_sync");
}
template <typename T>
T __shfl_down_sync(std::uint32_t, T value, int distance) {
  const int lane = switchyard::test::EmulatedWarp::lane();
  return emulated_read(value, lane + distance < 32 ? lane + distance : lane, "__shfl_down_sync");
}
template <typename T>
T __shfl_up_sync(std::uint32_t, T value, std::uint32_t distance) {
  const int lane = switchyard::test::EmulatedWarp::lane(), from = lane - static_cast<int>(distance);
  return emulated_read(value, from >= 0 ? from : lane, "__shfl_up_sync");
}
inline std::uint32_t __ballot_sync(std::uint32_t, bool vote) {
  const auto& words = switchyard::test::EmulatedWarp::meet(vote ? 1 : 0, "__ballot_sync");
  std::uint32_t ballot = 0;
  for (std::size_t i = 0; i < words.size(); ++i) ballot |= words[i] << i;
  return ballot;
}
inline bool __any_sync(std::uint32_t, bool vote) {
  const auto& words = switchyard::test::EmulatedWarp::meet(vote ? 1 : 0, "__any_sync");
  return std::ranges::count(words, 0u) != static_cast<std::ptrdiff_t>(words.size());
}
template <typename Op>
std::int32_t emulated_reduce(std::int32_t value, const char* name, Op&& op) {
  const auto& words = switchyard::test::EmulatedWarp::meet(static_cast<std::uint32_t>(value), name);
  auto result = static_cast<std::int32_t>(words[0]);
  for (std::size_t i = 1; i < words.size(); ++i) {
    result = op(result, static_cast<std::int32_t>(words[i]));
  }
  return result;
}
inline std::int32_t __reduce_max_sync(std::uint32_t, std::int32_t value) {
  return emulated_reduce(value, "__reduce_max_sync", [](int a, int b) { return std::max(a, b); });
}
inline std::int32_t __reduce_min_sync(std::uint32_t, std::int32_t value) {
  return emulated_reduce(value, "__reduce_min_sync", [](int a, int b) { return std::min(a, b); });
}
inline std::int32_t __reduce_add_sync(std::uint32_t, std::int32_t value) {
  return emulated_reduce(value, "__reduce_add_sync", [](int a, int b) { return a + b; });
}

inline int __popc(std::uint32_t word) { return std::popcount(word); }
inline int __ffs(std::int32_t word) {
  return word == 0 ? 0 : std::countr_zero(static_cast<std::uint32_t>(word)) + 1;
}
inline float __int_as_float(std::int32_t bits) { return std::bit_cast<float>(bits); }
inline float __ldg(const float* from) { return *from; }

namespace switchyard::routing::warp {
using std::max;
using std::min;
inline int emulated_lane() { return test::EmulatedWarp::lane(); }
}  // namespace switchyard::routing::warp
