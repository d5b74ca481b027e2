#include "exchange/staging.h"

#include <fmt/core.h>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "base/mapping.h"
#include "exchange/call.h"
#include "exchange/staged_calls.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "layer/failure.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

using Rows = StagingDevice::Rows;

// Rows of one expert, or of several that follow one another in both places.
struct Segment {
  std::int64_t staged, row, count;  // the first row in host memory, and in the caller's layout
};

class Handle final : public ExchangeHandle::State {
 public:
  std::unique_ptr<ExchangeHandle::State> inner;
  std::vector<Segment> segments;  // of the rows that have room
  std::int64_t staged_rows = 0;   // of the host's layout
};

// The layout in host memory. Padded rows may not have room, which ends a call of the CPU engine.
ExchangeProblem staged_problem(const ExchangeProblem& problem) {
  if (problem.spec.layout.kind != RowLayout::Kind::kPadded) return problem;
  ExchangeSpec spec = problem.spec;
  spec.layout = RowLayout::packed();
  return {spec, problem.rank, problem.num_ranks};
}

ExchangeOptions staged_options(ExchangeOptions options) {
  options.backend = Backend::kCpu;
  options.device = -1;
  options.max_sms = 0;
  return options;
}

// The memory and engines that calls use. If the device never becomes idle, it is left behind.
class Core {
 public:
  Core(const World& world, const ExchangeProblem& problem, const ExchangeOptions& options,
       std::unique_ptr<StagingDevice> device);

  StagedCalls& calls() { return calls_; }
  const std::unique_ptr<ExchangeEngine>& engine() { return engine_; }

  void send(const DispatchInput& input, Handle& handle);
  void receive(const DispatchOutput& output, Handle& handle);
  void send_results(const CombineInput& input, Handle& handle);
  void receive_sums(const CombineOutput& output, Handle& handle);

 private:
  const ExchangeSpec& spec() const { return problem_.spec; }
  void read_ids(const SlotView& given);
  void find_segments(Handle& handle, const DispatchOutput& output);
  template <typename T>
  void put(T* to, const T* from, std::int64_t count) {
    if (to == nullptr || count <= 0) return;
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    device_.enqueue_to_device(to, bytes, reinterpret_cast<const std::byte*>(from), bytes,
                              {bytes, 1});
  }

  const ExchangeProblem problem_, staged_;
  const std::unique_ptr<ExchangeEngine> engine_;
  // Memory is committed by the rows that really go through it.
  Mapping tokens_, scales_, slots_, rows_, row_scales_, origins_, weights_, results_, sums_;
  std::vector<std::int32_t> ids_, ends_, counts_;
  std::int32_t num_rows_ = 0;
  StagingDevice& device_;  // of the calls
  StagedCalls calls_;      // last: its thread uses the rest
};

Core::Core(const World& world, const ExchangeProblem& problem, const ExchangeOptions& options,
           std::unique_ptr<StagingDevice> device)
    : problem_(problem),
      staged_(staged_problem(problem)),
      engine_(cpu::make_exchange(world, staged_, staged_options(options))),
      device_(*device),
      calls_(std::move(device)) {
  const auto columns = static_cast<std::size_t>(spec().hidden);
  const std::int64_t tokens = spec().max_tokens, rows = staged_.rows_needed();
  const auto groups = static_cast<std::size_t>(problem_.groups()) * sizeof(float);
  tokens_ = lent_memory(device_, bytes_of_rows(tokens, columns * sizeof(float)));
  scales_ = Mapping::anonymous(bytes_of_rows(tokens, groups));
  slots_ = lent_memory(device_, bytes_of_rows(tokens, static_cast<std::size_t>(spec().top_k) *
                                                          (sizeof(std::int64_t) + sizeof(float))));
  rows_ = lent_memory(device_, bytes_of_rows(rows, problem_.token_bytes()));
  row_scales_ = Mapping::anonymous(bytes_of_rows(rows, groups));
  origins_ = Mapping::anonymous(bytes_of_rows(rows, sizeof(RowOrigin)));
  weights_ = Mapping::anonymous(bytes_of_rows(rows, sizeof(float)));
  results_ = lent_memory(device_, bytes_of_rows(rows, problem_.result_bytes()));
  sums_ = lent_memory(device_, bytes_of_rows(tokens, columns * sizeof(float)));
  ends_.resize(static_cast<std::size_t>(problem_.num_own()));
  counts_.resize(ends_.size());
}

// ----------------------------------------------------------------------------------- dispatch

// Like read_ids() of exchange/call.h, but nothing may be refused any more: the other ranks' part is
// on its way.
void Core::read_ids(const SlotView& given) {
  const auto top_k = static_cast<std::size_t>(spec().top_k);
  ids_.resize(given.size());
  for_each_id(
      spec().num_experts, spec().top_k, given, {}, id_rules(spec()),
      [&](std::size_t i, std::int32_t id) { ids_[i] = id; },
      [&](std::size_t i, std::int64_t id, bool twice) {
        calls_.note(ErrorCode::kInvalidArgument,
                    twice ? named_twice_text(i / top_k, id) + ", and the later slot was none"
                          : bad_id_text("ids", i / top_k, i % top_k, id, spec().num_experts) +
                                "; the slot was none");
      });
}

void Core::send(const DispatchInput& input, Handle& handle) {
  DispatchInput staged = input;
  staged.stream = nullptr;
  MatrixView& tokens = staged.tokens;
  const auto count = static_cast<std::size_t>(tokens.rows);
  if (count > 0) {
    const std::size_t element = size_of(tokens.dtype);
    const std::size_t width = static_cast<std::size_t>(spec().hidden) * element;
    device_.enqueue_to_host(tokens_.data(), width, tokens.data,
                            static_cast<std::size_t>(tokens.row_stride) * element, {width, count});
    tokens.data = tokens_.data();
    tokens.row_stride = spec().hidden;
    if (tokens.scale != nullptr) {
      const std::size_t scales = static_cast<std::size_t>(problem_.groups()) * sizeof(float);
      device_.enqueue_to_host(scales_.data(), scales, tokens.scale,
                              static_cast<std::size_t>(tokens.scale_stride) * sizeof(float),
                              {scales, count});
      tokens.scale = reinterpret_cast<const float*>(scales_.data());
      tokens.scale_stride = problem_.groups();
    }
    std::size_t fetched = 0;
    const auto fetch = [&](const SlotView& slots) {
      const std::size_t bytes = slots.size() * size_of(slots.dtype());
      std::byte* const to = slots_.data() + std::exchange(fetched, fetched + bytes);
      if (bytes != 0) device_.enqueue_to_host(to, bytes, slots.data(), bytes, {bytes, 1});
      return SlotView(to, slots.dtype(), slots.size());
    };
    if (!input.reuse) {
      staged.ids = fetch(input.ids);
      if (!input.weights.empty()) staged.weights = fetch(input.weights);
    }
    device_.await_stream();
    if (!input.reuse) {
      read_ids(staged.ids);
      staged.ids = ids_;
    }
  }
  engine_->dispatch_send(staged, *handle.inner);
  if (input.reuse) return;
  handle.inner->tokens = tokens.rows;
  handle.inner->received = false;
}

// Finds the segments by ends_ and counts_, which it shortens where rows have no room.
void Core::find_segments(Handle& handle, const DispatchOutput& output) {
  const std::vector<std::int64_t> ends(ends_.begin(), ends_.end());
  const std::vector<std::int64_t> staged = first_rows(staged_.spec.layout, ends);
  handle.staged_rows = staged.back();
  handle.segments.clear();
  const bool is_padded = spec().layout.kind == RowLayout::Kind::kPadded;
  std::int32_t end = 0;
  for (std::size_t e = 0; e < counts_.size(); ++e) {
    std::int64_t row = staged[e], count = counts_[e];
    if (is_padded) {
      row = static_cast<std::int64_t>(e) * spec().layout.size;
      if (count > spec().layout.size) {
        calls_.note(
            ErrorCode::kCapacityExceeded,
            fmt::format("expert {} got {} rows, and the padded layout has room for {}; make an "
                        "exchange with more (layout.size), or with another layout; rows without "
                        "room were not stored, and count as zeros in combine",
                        static_cast<std::size_t>(problem_.own().begin) + e, count,
                        spec().layout.size));
        count = spec().layout.size;
        counts_[e] = static_cast<std::int32_t>(count);
      }
    }
    ends_[e] = end += counts_[e];
    if (count > 0 && row + count > output.capacity) {
      calls_.note(
          ErrorCode::kCapacityExceeded,
          fmt::format("{} rows came to rank {}, and the output had room for {} (capacity); "
                      "rows_needed() says how many there are; rows without room were not stored",
                      num_rows_, problem_.rank, output.capacity));
      count = std::max<std::int64_t>(output.capacity - row, 0);
    }
    if (count == 0) continue;
    if (!handle.segments.empty()) {
      Segment& last = handle.segments.back();
      if (last.staged + last.count == staged[e] && last.row + last.count == row) {
        last.count += count;
        continue;
      }
    }
    handle.segments.push_back({staged[e], row, count});
  }
}

void Core::receive(const DispatchOutput& output, Handle& handle) {
  DispatchOutput staged;
  staged.rows = rows_.data();
  staged.capacity = staged_.rows_needed();
  staged.scales = problem_.quantised() ? reinterpret_cast<float*>(row_scales_.data()) : nullptr;
  staged.ends = ends_.data();
  staged.counts = counts_.data();
  staged.num_rows = &num_rows_;
  staged.origins = reinterpret_cast<RowOrigin*>(origins_.data());
  staged.weights = reinterpret_cast<float*>(weights_.data());
  engine_->dispatch_recv(staged, *handle.inner);
  handle.inner->received = true;
  find_segments(handle, output);
  const std::size_t width = problem_.token_bytes();
  const std::size_t scales = static_cast<std::size_t>(problem_.groups()) * sizeof(float);
  const std::size_t pitch = output.row_stride == 0 ? width
                                                   : static_cast<std::size_t>(output.row_stride) *
                                                         size_of(spec().dispatch);
  const std::size_t scale_pitch =
      output.scale_stride == 0 ? scales
                               : static_cast<std::size_t>(output.scale_stride) * sizeof(float);
  for (const Segment& segment : handle.segments) {
    const auto from = static_cast<std::size_t>(segment.staged);
    const auto to = static_cast<std::size_t>(segment.row);
    const auto count = static_cast<std::size_t>(segment.count);
    device_.enqueue_to_device(static_cast<std::byte*>(output.rows) + to * pitch, pitch,
                              rows_.data() + from * width, width, {width, count});
    if (scales != 0) {
      device_.enqueue_to_device(reinterpret_cast<std::byte*>(output.scales) + to * scale_pitch,
                                scale_pitch, row_scales_.data() + from * scales, scales,
                                {scales, count});
    }
    if (output.origins != nullptr) {
      put(output.origins + to, staged.origins + from, segment.count);
    }
  }
  const auto own = static_cast<std::int64_t>(ends_.size());
  num_rows_ = ends_.empty() ? 0 : ends_.back();
  put(output.ends, ends_.data(), own);
  put(output.counts, counts_.data(), own);
  put(output.num_rows, &num_rows_, 1);
  put(output.weights, staged.weights, std::min<std::int64_t>(num_rows_, output.capacity));
  device_.await_stream();
}

// ------------------------------------------------------------------------------------ combine

void Core::send_results(const CombineInput& input, Handle& handle) {
  const MatrixView& given = input.rows;
  const std::size_t width = problem_.result_bytes();
  const std::size_t pitch = static_cast<std::size_t>(given.row_stride) * size_of(spec().combine);
  // Rows without room in the layout, or without a result, count as zeros.
  std::int64_t filled = 0;
  const auto fill_to = [&](std::int64_t row) {
    std::fill(results_.data() + static_cast<std::size_t>(filled) * width,
              results_.data() + static_cast<std::size_t>(row) * width, std::byte{});
  };
  for (const Segment& segment : handle.segments) {
    const std::int64_t count = std::clamp<std::int64_t>(given.rows - segment.row, 0, segment.count);
    fill_to(segment.staged);
    filled = segment.staged + count;
    if (count < segment.count) {
      calls_.note(
          ErrorCode::kShapeMismatch,
          fmt::format("combine got {} rows of results, fewer than {}, the last row that was "
                      "received; pass a result for each; what was missing counted as zeros",
                      given.rows, segment.row + segment.count - 1));
    }
    if (count == 0) continue;
    device_.enqueue_to_host(
        results_.data() + static_cast<std::size_t>(segment.staged) * width, width,
        static_cast<const std::byte*>(given.data) + static_cast<std::size_t>(segment.row) * pitch,
        pitch, {width, static_cast<std::size_t>(count)});
  }
  fill_to(handle.staged_rows);
  device_.await_stream();
  CombineInput staged;
  staged.rows = {results_.data(), spec().combine, handle.staged_rows, spec().hidden, spec().hidden};
  engine_->combine_send(staged, *handle.inner);
}

void Core::receive_sums(const CombineOutput& output, Handle& handle) {
  const std::size_t element = size_of(output.dtype);
  const std::size_t width = static_cast<std::size_t>(spec().hidden) * element;
  const std::size_t pitch =
      output.row_stride == 0 ? width : static_cast<std::size_t>(output.row_stride) * element;
  const Rows rows{width, static_cast<std::size_t>(handle.inner->tokens)};
  CombineOutput staged = output;
  staged.data = sums_.data();
  staged.row_stride = 0;
  staged.stream = nullptr;
  if (output.accumulate && rows.count > 0) {
    device_.to_host(sums_.data(), width, output.data, pitch, rows);
  }
  engine_->combine_recv(staged, *handle.inner);
  if (rows.count > 0) device_.to_device(output.data, pitch, sums_.data(), width, rows);
}

// ------------------------------------------------------------------------------------- engine

class Engine final : public ExchangeEngine {
 public:
  Engine(const World& world, const ExchangeProblem& problem, const ExchangeOptions& options,
         std::unique_ptr<StagingDevice> device)
      : ExchangeEngine(problem, options),
        world_(world),
        core_(std::make_unique<Core>(world, problem, options, std::move(device))) {}
  ~Engine() override {
    // A stream that does not come to an end may still reach a call.
    if (!core_->calls().device().is_idle(options_.deadline)) (void)core_.release();
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::unique_ptr<State> make_handle() override {
    auto handle = std::make_unique<Handle>();
    core_->calls().alone([&] { handle->inner = core_->engine()->make_handle(); });
    return handle;
  }
  void dispatch_send(const DispatchInput& input, State& state) override {
    enqueue(&Core::send, input, state);
  }
  void dispatch_recv(const DispatchOutput& output, State& state) override {
    enqueue(&Core::receive, output, state);
  }
  // A later call throws what the send finds, as on one host. Thrown between the two, it would leave
  // the dispatch sent and not received.
  void dispatch(const DispatchInput& input, const DispatchOutput& output, State& state,
                const std::function<void()>& sent) override {
    dispatch_send(input, state);
    sent();
    dispatch_recv(output, state);
  }
  void combine_send(const CombineInput& input, State& state) override {
    enqueue(&Core::send_results, input, state);
  }
  void combine_recv(const CombineOutput& output, State& state) override {
    enqueue(&Core::receive_sums, output, state);
  }
  std::int64_t rows_needed(State& state, void* stream) override {
    if (problem_.spec.layout.kind == RowLayout::Kind::kPadded) return problem_.rows_needed();
    core_->calls().device().synchronize(stream);
    std::int64_t rows = 0;
    core_->calls().alone(
        [&] { rows = core_->engine()->rows_needed(*static_cast<Handle&>(state).inner, nullptr); });
    return rows;
  }
  void check() override {
    core_->calls().throw_found();
    throw_if_aborted(world_, "exchange");
  }
  const ExchangeStats& stats() override {
    core_->calls().alone([&] { stats_ = core_->engine()->stats(); });
    return stats_;
  }
  // The trace has the events of the CPU engine.
  PassTrace trace() override {
    PassTrace trace;
    core_->calls().alone([&] { trace = core_->engine()->trace(); });
    return trace;
  }
  int num_threads() const override { return 0; }

 private:
  template <typename Arguments>
  void enqueue(void (Core::*work)(const Arguments&, Handle&), const Arguments& arguments,
               State& state) {
    core_->calls().enqueue(arguments.stream, [core = core_.get(), work, arguments,
                                              &handle = static_cast<Handle&>(state)] {
      core->engine()->check();
      (core->*work)(arguments, handle);
    });
  }

  const World world_;
  std::unique_ptr<Core> core_;
  ExchangeStats stats_;
};

}  // namespace

std::unique_ptr<ExchangeEngine> make_staged_exchange(const World& world,
                                                     const ExchangeProblem& problem,
                                                     const ExchangeOptions& options,
                                                     std::unique_ptr<StagingDevice> device) {
  return std::make_unique<Engine>(world, problem, options, std::move(device));
}

}  // namespace switchyard
