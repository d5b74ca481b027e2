#include "run/ranks.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <type_traits>

#include "base/threads.h"
#include "common/host_memory.h"
#include "fabric/fabric.h"
#include "gpu/device.h"
#include "layer/compute.h"
#include "run/device_run.h"
#include "run/devices.h"
#include "run/late.h"
#include "trace/clock.h"

namespace switchyard::run {
namespace {

// The figures that a rank tells the others at the end.
struct RankRecord {
  std::int64_t threads;
  double gate_seconds, plan_seconds;
  std::int64_t dropped_slots, nan_logits, nan_tokens;
  std::uint64_t dispatch_bytes, combine_bytes, signal_bytes, padded_all_to_all_bytes;
  std::uint64_t heap_bytes_used, heap_bytes_reserved, workspace_bytes, peak_resident_bytes;
};
static_assert(std::is_trivially_copyable_v<RankRecord>);

// Nanoseconds of steady_clock, which is one clock for all processes of a host. With kCuda every
// pass begins at 0, because the clocks of two devices have nothing in common.
struct PassTimes {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// The layout of a rank's share of the results. It lies in symmetric memory, which rank 0 can read
// with every fabric.
struct ShareLayout {
  std::size_t row_bytes, slots_per_token, ids_at, weights_at, bytes;

  ShareLayout(const LayerSpec& spec, std::int64_t most_tokens, DType output_dtype)
      : row_bytes(static_cast<std::size_t>(spec.hidden) * size_of(output_dtype)),
        slots_per_token(static_cast<std::size_t>(spec.top_k)) {
    const auto tokens = static_cast<std::size_t>(most_tokens);
    ids_at = (tokens * row_bytes + 63) / 64 * 64;
    weights_at = ids_at + tokens * slots_per_token * sizeof(std::int32_t);
    bytes = weights_at + tokens * slots_per_token * sizeof(float);
  }
  std::int32_t* ids(std::byte* base) const {
    return reinterpret_cast<std::int32_t*>(base + ids_at);
  }
  float* weights(std::byte* base) const { return reinterpret_cast<float*>(base + weights_at); }
};

ForwardInput input_of(const Batch& batch, Share share, std::size_t k) {
  const auto first = static_cast<std::size_t>(share.first);
  const auto count = static_cast<std::size_t>(share.count);
  ForwardInput input{.activations = batch.activations};
  input.activations.data = batch.activations.row(share.first);
  input.activations.rows = share.count;
  if (!batch.topk_ids.empty()) {
    input.topk_ids = std::span(batch.topk_ids).subspan(first * k, count * k);
    input.topk_weights = std::span(batch.topk_weights).subspan(first * k, count * k);
  }
  if (!batch.token_ids.empty()) {
    input.token_ids = std::span(batch.token_ids).subspan(first, count);
  }
  return input;
}

ForwardOutput output_to(std::byte* base, const ShareLayout& layout, Share share, DType dtype) {
  const std::size_t slots = static_cast<std::size_t>(share.count) * layout.slots_per_token;
  ForwardOutput output{.data = base, .dtype = dtype};
  output.topk_ids = {layout.ids(base), slots};
  output.topk_weights = {layout.weights(base), slots};
  return output;
}

std::vector<PassTimes> time_passes(World& world, MoeLayer& layer, const ForwardInput& input,
                                   const ForwardOutput& output, const RankOptions& options) {
  std::optional<std::chrono::microseconds> late = options.late;
  if (late && world.rank() + 1 != world.size()) late = std::chrono::microseconds(0);
  std::vector<PassTimes> times;
  if (layer.backend() == Backend::kCuda) {
    for (const double us :
         time_passes_on_device(world, layer, input, output, options.repeat, late)) {
      times.push_back({0, std::llround(us * 1e3)});
    }
    return times;
  }
  layer.forward(input, output);  // generates kernels and touches pages
  for (int i = 0; i < options.repeat; ++i) {
    world.barrier();
    if (late) wait_until(std::chrono::steady_clock::now() + *late);
    PassTimes pass{.begin = trace::now_ns()};
    layer.forward(input, output);
    pass.end = trace::now_ns();
    times.push_back(pass);
  }
  return times;
}

RankRecord record_of(const MoeLayer& layer) {
  const ForwardStats& s = layer.stats();
  return {layer.num_threads(),       s.gate_seconds,       s.plan_seconds,
          s.dropped_slots,           s.nan_logits,         s.nan_tokens,
          s.dispatch_bytes,          s.combine_bytes,      s.signal_bytes,
          s.padded_all_to_all_bytes, s.heap_bytes_used,    s.heap_bytes_reserved,
          s.workspace_bytes_used,    peak_resident_bytes()};
}

// A block of bytes that every rank writes its own of, and that rank 0 reads of all: mapped memory
// on one host. Between hosts the blocks are gathered.
class Blocks {
 public:
  // Collective.
  Blocks(World& world, std::size_t bytes) : world_(world), bytes_(bytes) {
    if (world.fabric().proxy() == nullptr) {
      segment_ = world.fabric().allocate(bytes);
    } else {
      own_.resize(bytes);
    }
  }
  std::byte* own() { return segment_ ? segment_->base(world_.rank()) : own_.data(); }
  // Collective: returns when all ranks have written theirs.
  void collect() {
    if (segment_) {
      world_.barrier();
    } else {
      all_ = gather_all<std::byte>(world_.fabric(), own_);
    }
  }
  std::byte* of(int rank) {
    return segment_ ? segment_->base(rank) : all_.data() + static_cast<std::size_t>(rank) * bytes_;
  }

 private:
  World& world_;
  std::size_t bytes_;
  std::shared_ptr<SymmetricSegment> segment_;
  std::vector<std::byte> own_, all_;
};

// Returns all ranks' traces on rank 0, and none on the other ranks.
std::vector<PassTrace> gather_traces(World& world, const PassTrace& mine) {
  struct Header {
    std::int64_t events, dropped;
    std::uint64_t epoch;
  };
  static_assert(std::is_trivially_copyable_v<TraceEvent>);
  const Header header{static_cast<std::int64_t>(mine.events.size()), mine.dropped, mine.epoch};
  const auto headers = gather(world.fabric(), header);
  std::int64_t most = 1;
  for (const Header& h : headers) most = std::max(most, h.events);
  Blocks blocks(world, static_cast<std::size_t>(most) * sizeof(TraceEvent));
  std::copy(mine.events.begin(), mine.events.end(), reinterpret_cast<TraceEvent*>(blocks.own()));
  blocks.collect();
  std::vector<PassTrace> traces;
  for (int r = 0; world.rank() == 0 && r < world.size(); ++r) {
    const Header& h = headers[static_cast<std::size_t>(r)];
    const auto* const events = reinterpret_cast<const TraceEvent*>(blocks.of(r));
    traces.push_back({r, world.size(), h.epoch, h.dropped, {events, events + h.events}});
  }
  return traces;
}

void add_record(RunResult& result, const RankRecord& r) {
  result.threads += static_cast<int>(r.threads);
  result.gate_seconds = std::max(result.gate_seconds, r.gate_seconds);
  result.plan_seconds = std::max(result.plan_seconds, r.plan_seconds);
  result.dropped_slots += r.dropped_slots;
  result.nan_logits += r.nan_logits;
  result.nan_tokens += r.nan_tokens;
  result.dispatch_bytes += r.dispatch_bytes;
  result.combine_bytes += r.combine_bytes;
  result.signal_bytes += r.signal_bytes;
  result.padded_all_to_all_bytes += r.padded_all_to_all_bytes;
  result.heap_bytes_used += r.heap_bytes_used;
  result.heap_bytes_reserved += r.heap_bytes_reserved;
  result.workspace_bytes += r.workspace_bytes;
  // Ranks that are threads all report the size of their one process.
  result.peak_resident_bytes = result.processes
                                   ? result.peak_resident_bytes + r.peak_resident_bytes
                                   : std::max(result.peak_resident_bytes, r.peak_resident_bytes);
}

// `one_clock`: times of different ranks may be compared.
std::vector<double> seconds_per_pass(const std::vector<PassTimes>& all, int ranks, int repeat,
                                     bool one_clock) {
  std::vector<double> seconds;
  for (int i = 0; i < repeat; ++i) {
    if (!one_clock) {
      // The barrier before the pass is short beside it.
      std::int64_t longest = 0;
      for (int r = 0; r < ranks; ++r) {
        const PassTimes& pass = all[static_cast<std::size_t>(r) * static_cast<std::size_t>(repeat) +
                                    static_cast<std::size_t>(i)];
        longest = std::max(longest, pass.end - pass.begin);
      }
      seconds.push_back(static_cast<double>(longest) * 1e-9);
      continue;
    }
    std::int64_t begin = all[static_cast<std::size_t>(i)].begin;
    std::int64_t end = all[static_cast<std::size_t>(i)].end;
    for (int r = 1; r < ranks; ++r) {
      const PassTimes& pass = all[static_cast<std::size_t>(r) * static_cast<std::size_t>(repeat) +
                                  static_cast<std::size_t>(i)];
      begin = std::min(begin, pass.begin);
      end = std::max(end, pass.end);
    }
    seconds.push_back(static_cast<double>(end - begin) * 1e-9);
  }
  return seconds;
}

void copy_shares(RunResult& result, Blocks& blocks, const ShareLayout& layout,
                 std::int64_t tokens) {
  for (int r = 0; r < result.ranks; ++r) {
    const auto count = static_cast<std::size_t>(share_of(tokens, r, result.ranks).count);
    const std::size_t slots = count * layout.slots_per_token;
    std::byte* const base = blocks.of(r);
    result.output.insert(result.output.end(), base, base + count * layout.row_bytes);
    result.topk_ids.insert(result.topk_ids.end(), layout.ids(base), layout.ids(base) + slots);
    result.topk_weights.insert(result.topk_weights.end(), layout.weights(base),
                               layout.weights(base) + slots);
  }
}

// Runs one rank. Only rank 0 returns a result.
std::optional<RunResult> run_rank(World world, bool is_process, const Source& source,
                                  const Batch& batch, const RankOptions& options) {
  const std::int64_t tokens = batch.tokens();
  const std::int64_t most_tokens = largest_share(tokens, world.size());
  LayerOptions layer_options{.backend = options.backend,
                             .max_tokens = static_cast<int>(most_tokens),
                             .cpu = {.num_threads = options.threads},
                             .compute = options.compute,
                             .pre_sum_per_host = options.pre_sum_per_host,
                             .diagnostics = {.trace = options.trace,
                                             .recorded_steps = options.recorded_steps,
                                             .name = options.recorded_name}};
  std::optional<RankDevice> device;
  if (options.backend == Backend::kCuda) {
    device = rank_device(is_process ? local_rank(std::getenv, world.rank()) : world.rank(),
                         world.size(), options.reserved_sms);
    gpu::set_device(device->device);
    layer_options.cuda.device = device->device;
    layer_options.cuda.reserved_sms = device->reserved_sms;
  }
  MoeLayer layer(world, source.spec, source.weights, layer_options);

  const DType output_dtype = value_type(options.compute);
  const ShareLayout layout(source.spec, most_tokens, output_dtype);
  Blocks outputs(world, layout.bytes);
  const Share share = share_of(tokens, world.rank(), world.size());
  const std::vector<PassTimes> times =
      time_passes(world, layer, input_of(batch, share, layout.slots_per_token),
                  output_to(outputs.own(), layout, share, output_dtype), options);

  const RankRecord record = record_of(layer);
  const auto records = gather(world.fabric(), record);
  outputs.collect();
  const auto all_times = gather_all<PassTimes>(world.fabric(), times);
  std::vector<PassTrace> traces;
  if (options.trace) traces = gather_traces(world, layer.trace());
  if (world.rank() != 0) return std::nullopt;

  RunResult result{.backend = options.backend};
  if (device) result.device = describe_devices(*device, world.size());
  result.ranks = world.size();
  result.fabric = world.fabric_name();
  result.processes = is_process;
  result.output_dtype = output_dtype;
  result.tokens_per_expert = layer.stats().tokens_per_expert;
  for (const RankRecord& r : records) add_record(result, r);
  result.pass_seconds =
      seconds_per_pass(all_times, result.ranks, options.repeat, world.fabric().proxy() == nullptr);
  copy_shares(result, outputs, layout, tokens);
  result.traces = std::move(traces);
  if (options.recorded_steps > 0) result.recording = layer.recording();
  return result;
}

// Returns how near a failure is to the cause. A rank that was told to stop is farthest from it.
// Next is a rank that gave up waiting.
int closeness(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kAborted) return 0;
    return error.code() == ErrorCode::kTimeout ? 1 : 2;
  } catch (...) {
    return 2;
  }
}

void throw_cause(const std::vector<std::exception_ptr>& failures) {
  std::exception_ptr cause;
  for (const std::exception_ptr& failure : failures) {
    if (failure && (!cause || closeness(failure) > closeness(cause))) cause = failure;
  }
  if (cause) std::rethrow_exception(cause);
}

}  // namespace

void on_every_rank(int num_ranks, const std::function<void(int)>& rank) {
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(num_ranks));
  Threads threads(0, num_ranks,
                  "use fewer ranks (--ranks), or raise the limits of threads (`ulimit -u`) and "
                  "memory (`ulimit -v`)",
                  [&](int r) {
                    try {
                      rank(r);
                    } catch (...) {
                      failures[static_cast<std::size_t>(r)] = std::current_exception();
                    }
                  });
  threads.join();
  throw_cause(failures);
}

RunResult run_as_threads(const Source& source, const Batch& batch, const RankOptions& options) {
  std::vector<World> worlds = World::threads(options.ranks, {.deadline = options.deadline});
  RunResult result;
  on_every_rank(options.ranks, [&](int r) {
    // Each thread owns its World: if it fails, the others see at once that it has left.
    auto mine =
        run_rank(std::move(worlds[static_cast<std::size_t>(r)]), false, source, batch, options);
    if (mine) result = std::move(*mine);
  });
  return result;
}

std::optional<RunResult> run_as_process(const Source& source, const Batch& batch,
                                        const RankOptions& options) {
  const WorldOptions world_options{.deadline = options.deadline};
  const auto join = [&] {
    try {
      return World::from_environment(world_options);
    } catch (const TimeoutError& error) {
      if (error.code() != ErrorCode::kTimeout) throw;
      throw TimeoutError(
          error.code(),
          fmt::format("{}, or give --ranks, which needs no other processes", error.what()),
          error.failure());
    }
  };
  return run_rank(join(), true, source, batch, options);
}

}  // namespace switchyard::run
