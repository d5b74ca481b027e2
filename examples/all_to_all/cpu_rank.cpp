// A rank of threads. A worker is a thread, and a block of one warp with one lane.
#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cstring>
#include <functional>

#include "all_to_all/rank.h"
#include "all_to_all/stages.h"
#include "base/convert.h"
#include "base/threads.h"
#include "switchyard/peer.h"

namespace switchyard::all_to_all {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMostThreads = 4;
constexpr int kUsualThreads = 2;

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::nanoseconds(Clock::now().time_since_epoch()).count());
}

class Worker {
 public:
  Worker(const PeerMap& map, int thread, int threads) : block(thread), blocks(threads), map_(map) {}

  const int block, blocks;
  static constexpr int warp = 0, warps = 1;
  std::uint32_t rows = 0;
  std::uint64_t waited_ns = 0;

  static constexpr int lane() { return 0; }
  static constexpr int lanes() { return 1; }
  static std::uint32_t sum(std::uint32_t value) { return value; }

  // Counts one more, and returns how many there were.
  std::uint32_t next_of(std::uint32_t* counter) const {
    return std::atomic_ref(*counter).fetch_add(1, std::memory_order_relaxed);
  }
  template <typename W>
  W load(const W* word) const {
    return host::load(word);
  }
  template <typename W>
  void clear(W* words, int count) const {
    std::fill_n(words, count, W{0});
  }
  // True for the block that is the last to come here, for which all others' writes are visible.
  bool last_of_grid(std::uint32_t* ticket) const {
    const std::atomic_ref count(*ticket);
    if (count.fetch_add(1, std::memory_order_acq_rel) + 1 < static_cast<std::uint32_t>(blocks)) {
      return false;
    }
    count.store(0, std::memory_order_relaxed);
    return true;
  }

  void put(std::uint16_t* to, const std::uint16_t* from, std::size_t bytes) const {
    host::put(to, from, bytes);
  }
  void multiply(std::uint16_t* to, const std::uint16_t* from, int count, float factor) const {
    for (int i = 0; i < count; ++i) to[i] = f32_to_f16(f16_to_f32(from[i]) * factor);
  }
  template <typename RowOf>
  void weighted_sum(std::uint16_t* out, int columns, int rows_to_sum, const float* weights,
                    const RowOf& row_of) const {
    // Some columns at a time, whose sums stay in registers.
    constexpr int kColumns = 64;
    for (int begin = 0; begin < columns; begin += kColumns) {
      const int count = std::min(kColumns, columns - begin);
      std::array<float, kColumns> sums{};
      for (int k = 0; k < rows_to_sum; ++k) {
        const std::uint16_t* const row = row_of(k) + begin;
        for (int i = 0; i < count; ++i) {
          sums[static_cast<std::size_t>(i)] += weights[k] * f16_to_f32(row[i]);
        }
      }
      for (int i = 0; i < count; ++i)
        out[begin + i] = f32_to_f16(sums[static_cast<std::size_t>(i)]);
    }
  }

  template <typename W>
  void signal(W* flag, W value) const {
    host::signal(flag, value);
  }
  // Waits for flag_of(0) ... flag_of(count - 1), which peer_of(i) raises. False, and the heap is
  // dead, if one does not come.
  template <typename W, typename FlagOf, typename PeerOf>
  bool wait(int count, const FlagOf& flag_of, W value, const PeerOf& peer_of) {
    for (int i = 0; i < count; ++i) {
      const PeerWait wait = host::wait_until(map_, flag_of(i), value, peer_of(i));
      waited_ns += wait.waited_ns;
      if (wait) continue;
      host::give_up(map_, wait);
      return false;
    }
    return true;
  }

  // The counts in flags that have come.
  struct Gathered {
    std::array<std::uint32_t, kMaxPeers> counts;
    std::uint32_t of(int rank) const { return counts[static_cast<std::size_t>(rank)]; }
  };
  Gathered gather(const std::uint64_t* flags, int count) const {
    Gathered gathered;
    for (int i = 0; i < count; ++i) {
      gathered.counts[static_cast<std::size_t>(i)] = static_cast<std::uint32_t>(load(flags + i));
    }
    return gathered;
  }

 private:
  const PeerMap& map_;
};

// The threads of a rank. The rank's own thread is the first.
class Team {
 public:
  explicit Team(int size)
      : size_(size), begin_(size), end_(size), others_(1, size, kThreadRemedy, [this](int thread) {
          while (true) {
            begin_.arrive_and_wait();
            if (work_ == nullptr) return;
            (*work_)(thread);
            end_.arrive_and_wait();
          }
        }) {}
  ~Team() {
    work_ = nullptr;
    begin_.arrive_and_wait();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Calls work(thread) on every thread. It must not throw.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    begin_.arrive_and_wait();
    work(0);
    end_.arrive_and_wait();
  }
  int size() const { return size_; }

 private:
  int size_;
  std::barrier<> begin_, end_;
  const std::function<void(int)>* work_ = nullptr;
  Threads others_;  // last: they use the rest
};

class CpuRank : public Rank {
 public:
  CpuRank(const World& world, const Case& problem, const RankOptions& options)
      : Rank(world, problem, options), team_(kMostThreads) {
    upload_inputs();
  }

  int most_blocks() const override { return kMostThreads; }
  std::vector<int> grids_to_try() const override { return {1, 2, kMostThreads}; }

  void get_ready() override { world().barrier(); }
  CallTimes call(CallRecords* records) override {
    Call call = next_call();
    CallTimes times;
    if (records != nullptr) *records = {};
    const Clock::time_point start = Clock::now();
    Clock::time_point before = start;
    const auto lap = [&](Stage stage) {
      const Clock::time_point now = Clock::now();
      times.stage_us[static_cast<std::size_t>(stage)] +=
          std::chrono::duration<double, std::micro>(now - before).count();
      before = now;
    };
    if (!call.epochs) fill(counters().memory, 0, counters().bytes);
    run(Stage::kDispatchSend, call, records, [&](Worker& w) { dispatch_send(w, call); });
    if (call.host) copy_to_experts(call);
    lap(Stage::kDispatchSend);
    if (call.host) world().barrier();
    run(Stage::kDispatchReceive, call, records, [&](Worker& w) { dispatch_receive(w, call); });
    check();
    lap(Stage::kDispatchReceive);
    if (!call.fused) {
      run(Stage::kExperts, call, nullptr, [&](Worker& w) { multiply_by_experts(w, call); });
      lap(Stage::kExperts);
    }
    run(Stage::kCombineSend, call, records, [&](Worker& w) { combine_send(w, call); });
    if (call.host) copy_back(call);
    lap(Stage::kCombineSend);
    if (call.host) world().barrier();
    run(Stage::kCombineReceive, call, records, [&](Worker& w) { combine_receive(w, call); });
    check();
    if (!call.epochs) {
      for (const Part& part : flags_of_window(call.window)) fill(part.memory, 0, part.bytes);
    }
    lap(Stage::kCombineReceive);
    times.total_us = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
    return times;
  }

 protected:
  void fill(void* memory, int value, std::size_t bytes) override {
    std::memset(memory, value, bytes);
  }
  void upload(void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  void download(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  int usual_blocks() const override { return kUsualThreads; }

 private:
  template <typename Body>
  void run(Stage stage, Call& call, CallRecords* records, const Body& body) {
    const int blocks = grids_[static_cast<std::size_t>(stage)];
    StageRecords* const kept =
        records == nullptr ? nullptr : &(*records)[static_cast<std::size_t>(stage)];
    if (kept != nullptr) {
      *kept = {blocks, 1, std::vector<Record>(static_cast<std::size_t>(blocks))};
    }
    team_.run([&](int thread) {
      if (thread >= blocks) return;
      const std::uint64_t begin = now_ns();
      Worker worker(call.map, thread, blocks);
      body(worker);
      if (kept == nullptr) return;
      kept->of_worker[static_cast<std::size_t>(thread)] = {begin, now_ns(), worker.waited_ns,
                                                           worker.rows, 1};
    });
  }

  // In the rung `host` the host reads the counts and copies.
  void copy_to_experts(const Call& call) {
    const Memory& m = call.memory;
    const auto hidden = static_cast<std::size_t>(call.sizes.hidden);
    for (int rank = 0; rank < call.map.size; ++rank) {
      const std::uint64_t count = m.staging_counts[rank] & 0xffff'ffffu;
      const std::size_t from = call.of_row(0, rank, 0), to = call.of_row(0, call.map.rank, 0);
      host::put(translate(call.map, m.rows + to * hidden, rank), m.staging + from * hidden,
                count * call.sizes.row_bytes());
      host::put(translate(call.map, m.origins + to, rank), m.staging_origins + from,
                count * sizeof(Origin));
      *translate(call.map, m.counts + call.of_rank(0, call.map.rank), rank) =
          m.staging_counts[rank];
    }
  }
  void copy_back(const Call& call) {
    const Memory& m = call.memory;
    const auto hidden = static_cast<std::size_t>(call.sizes.hidden);
    for (int rank = 0; rank < call.map.size; ++rank) {
      const std::uint64_t count = m.counts[call.of_rank(0, rank)] & 0xffff'ffffu;
      host::put(translate(call.map, m.rows + call.of_row(1, call.map.rank, 0) * hidden, rank),
                m.staging + call.of_row(0, rank, 0) * hidden, count * call.sizes.row_bytes());
    }
  }

  Team team_;
};

}  // namespace

std::unique_ptr<Rank> make_cpu_rank(const World& world, const Case& problem,
                                    const RankOptions& options) {
  return std::make_unique<CpuRank>(world, problem, options);
}

}  // namespace switchyard::all_to_all
