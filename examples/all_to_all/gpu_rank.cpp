// A rank of kernels on a stream of its own.
#include <algorithm>
#include <utility>

#include "all_to_all/kernels.h"
#include "all_to_all/rank.h"
#include "gpu/device.h"
#include "switchyard/error.h"

namespace switchyard::all_to_all {
namespace {

// Before tuning: nearly a block for each SM of Hopper.
constexpr int kUsualBlocks = 128;

std::size_t index_of(Stage stage) { return static_cast<std::size_t>(stage); }

class GpuRank : public Rank {
 public:
  GpuRank(const World& world, const Case& problem, const RankOptions& options)
      : Rank(world, problem, options),
        num_sms_(gpu::device_info(gpu::current_device()).num_sms),
        most_blocks_(std::max(1, load_kernels() / std::max(1, options.ranks_on_device))),
        records_(kNumStages * records_of_stage() * sizeof(Record)),
        gate_flags_(heap().allocate<std::uint64_t>(static_cast<std::size_t>(world.size()))) {
    upload_inputs();
    // Allocates what it reads; later nothing may be allocated, because that waits for the device.
    gpu::flush_l2(stream_);
    stream_.synchronize();
    heap().barrier();
  }
  ~GpuRank() override {
    try {
      world().barrier();  // the heap's end waits for the device: no other rank may wait then
    } catch (const Error&) {
      // Another rank gave up, and told so.
    }
  }

  int most_blocks() const override { return most_blocks_; }
  std::vector<int> grids_to_try() const override {
    std::vector<int> grids;
    for (const int blocks : {16, 32, 64, 96, num_sms_, 2 * num_sms_, 3 * num_sms_, 4 * num_sms_}) {
      if (blocks < most_blocks_) grids.push_back(blocks);
    }
    grids.push_back(most_blocks_);
    return grids;
  }

  void get_ready() override {
    gpu::flush_l2(stream_);
    world().barrier();
    launch_gate(map(), gate_flags_, ++gate_number_, stream_.handle());
  }

  CallTimes call(CallRecords* records) override {
    Call call = next_call();
    begin_.record(stream_);
    if (!call.epochs) enqueue_fill(counters().memory, 0, counters().bytes, stream_.handle());
    run(Stage::kDispatchSend, call, records);
    if (call.host) copy_to_experts(call);
    ends_[index_of(Stage::kDispatchSend)].record(stream_);
    if (call.host) meet();
    run(Stage::kDispatchReceive, call, records);
    ends_[index_of(Stage::kDispatchReceive)].record(stream_);
    if (!call.fused) run(Stage::kExperts, call, nullptr);
    ends_[index_of(Stage::kExperts)].record(stream_);
    run(Stage::kCombineSend, call, records);
    if (call.host) copy_back(call);
    ends_[index_of(Stage::kCombineSend)].record(stream_);
    if (call.host) meet();
    run(Stage::kCombineReceive, call, records);
    if (!call.epochs) {
      for (const Part& part : flags_of_window(call.window)) {
        enqueue_fill(part.memory, 0, part.bytes, stream_.handle());
      }
    }
    ends_[index_of(Stage::kCombineReceive)].record(stream_);
    stream_.synchronize();
    check();
    CallTimes times;
    const gpu::Event* before = &begin_;
    for (const Stage stage : kStages) {
      const gpu::Event& end = ends_[index_of(stage)];
      if (stage != Stage::kExperts || !call.fused) {
        times.stage_us[index_of(stage)] = gpu::Event::elapsed_us(*before, end);
      }
      before = &end;
    }
    times.total_us = gpu::Event::elapsed_us(begin_, *before);
    if (records != nullptr) *records = fetch_records();
    return times;
  }

 protected:
  void fill(void* memory, int value, std::size_t bytes) override {
    enqueue_fill(memory, value, bytes, stream_.handle());
    stream_.synchronize();
  }
  void upload(void* to, const void* from, std::size_t bytes) override {
    enqueue_copy(to, from, bytes, stream_.handle());
    stream_.synchronize();
  }
  void download(void* to, const void* from, std::size_t bytes) const override {
    enqueue_copy(to, from, bytes, stream_.handle());
    stream_.synchronize();
  }
  int usual_blocks() const override { return kUsualBlocks; }

 private:
  std::size_t records_of_stage() const {
    return static_cast<std::size_t>(most_blocks_) * static_cast<std::size_t>(kWarpsOfBlock);
  }
  Record* records_of(Stage stage) const {
    return reinterpret_cast<Record*>(records_.data()) + index_of(stage) * records_of_stage();
  }

  void run(Stage stage, Call& call, const CallRecords* records) {
    call.records = records == nullptr ? nullptr : records_of(stage);
    launch(stage, call, grids_[index_of(stage)], stream_.handle());
  }

  CallRecords fetch_records() const {
    CallRecords fetched;
    for (const Stage stage : kStages) {
      if (stage == Stage::kExperts) continue;
      StageRecords& of_stage = fetched[index_of(stage)];
      of_stage.blocks = grids_[index_of(stage)];
      of_stage.warps = kWarpsOfBlock;
      of_stage.of_worker.resize(static_cast<std::size_t>(of_stage.blocks) *
                                static_cast<std::size_t>(of_stage.warps));
      download(of_stage.of_worker.data(), records_of(stage),
               of_stage.of_worker.size() * sizeof(Record));
    }
    return fetched;
  }

  // In the rung `host` the host reads the counts, copies, and meets the others.
  std::vector<std::uint64_t> counts_in(const std::uint64_t* flags) const {
    std::vector<std::uint64_t> counts(static_cast<std::size_t>(map().size));
    download(counts.data(), flags, counts.size() * sizeof(counts[0]));
    for (std::uint64_t& count : counts) count &= 0xffff'ffffu;
    return counts;
  }
  void copy_to_experts(const Call& call) {
    const Memory& m = call.memory;
    const auto hidden = static_cast<std::size_t>(call.sizes.hidden);
    const std::vector<std::uint64_t> counts = counts_in(m.staging_counts);
    const std::size_t to = call.of_row(0, call.map.rank, 0);
    for (int rank = 0; rank < call.map.size; ++rank) {
      const std::uint64_t count = counts[static_cast<std::size_t>(rank)];
      const std::size_t from = call.of_row(0, rank, 0);
      if (count != 0) {
        enqueue_copy(translate(call.map, m.rows + to * hidden, rank), m.staging + from * hidden,
                     count * call.sizes.row_bytes(), stream_.handle());
        enqueue_copy(translate(call.map, m.origins + to, rank), m.staging_origins + from,
                     count * sizeof(Origin), stream_.handle());
      }
      enqueue_copy(translate(call.map, m.counts + call.of_rank(0, call.map.rank), rank),
                   m.staging_counts + rank, sizeof(std::uint64_t), stream_.handle());
    }
  }
  void copy_back(const Call& call) {
    const Memory& m = call.memory;
    const auto hidden = static_cast<std::size_t>(call.sizes.hidden);
    const std::vector<std::uint64_t> counts = counts_in(m.counts + call.of_rank(0, 0));
    for (int rank = 0; rank < call.map.size; ++rank) {
      const std::uint64_t count = counts[static_cast<std::size_t>(rank)];
      if (count == 0) continue;
      enqueue_copy(translate(call.map, m.rows + call.of_row(1, call.map.rank, 0) * hidden, rank),
                   m.staging + call.of_row(0, rank, 0) * hidden, count * call.sizes.row_bytes(),
                   stream_.handle());
    }
  }
  void meet() {
    stream_.synchronize();
    world().barrier();
  }

  int num_sms_, most_blocks_;
  gpu::Stream stream_;
  gpu::Event begin_;
  std::array<gpu::Event, kNumStages> ends_;
  gpu::DeviceBuffer records_;
  std::uint64_t* gate_flags_;
  std::uint64_t gate_number_ = 0;
};

}  // namespace

std::unique_ptr<Rank> make_gpu_rank(const World& world, const Case& problem,
                                    const RankOptions& options) {
  if (options.device >= 0) gpu::set_device(options.device);
  return std::make_unique<GpuRank>(world, problem, options);
}

}  // namespace switchyard::all_to_all
