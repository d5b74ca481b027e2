#include "gpu/grouped_gemm.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/quantize.h"
#include "gpu/device.h"
#include "gpu/grouped/params.h"
#include "gpu/host/activation_form.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/device_scope.h"
#include "gpu/host/grouped_choices.h"
#include "gpu/host/mapped_memory.h"
#include "gpu/host/tensor_map.h"
#include "gpu/host/weights.h"
#include "gpu/schedule/rules.h"
#include "layer/engine.h"
#include "protocol/partition.h"
#include "switchyard/error.h"
#include "switchyard/tuner.h"

namespace switchyard::gpu {
namespace {

// The longest wait within a block, where everything waits for memory only.
constexpr std::uint64_t kDeadlineNs = 10'000'000'000;
constexpr int kMostLog2Splits = std::countr_zero(static_cast<unsigned>(kMostGroupedSplits));

[[noreturn]] void unsupported(const std::string& message) {
  throw Error(ErrorCode::kUnsupported, message);
}

template <typename C>
GroupedEntry entry_of(const GroupedGemmSpec& spec) {
  if (!spec.epilogue) return grouped_entry<C, false, false>();
  return spec.epilogue->gated ? grouped_entry<C, true, true>() : grouped_entry<C, false, true>();
}

// The types that a kernel is compiled for.
struct KernelTypes {
  DType weights;  // if they are of four bits; else as computed in
  DType compute;
  bool operator==(const KernelTypes&) const = default;
  std::string text() const {
    if (weights == compute) return std::string(to_string(compute));
    return fmt::format("{} of {}", to_string(compute), to_string(weights));
  }
};

// Finds a compiled kernel.
GroupedEntry entry_of(const GroupedGemmSpec& spec, const KernelTypes& types) {
  std::string compiled;
#define SWITCHYARD_GROUPED(config, weights, compute)                         \
  if (types == KernelTypes{weights, compute}) return entry_of<config>(spec); \
  compiled += (compiled.empty() ? "" : ", ") + KernelTypes{weights, compute}.text();
#include "gpu/grouped_list.inc"
#undef SWITCHYARD_GROUPED
  unsupported(
      fmt::format("GroupedGemm computes in {} here, and on the GPU this build has kernels for {}; "
                  "set compute to one of them, use Backend::kCpu, or see "
                  "SWITCHYARD_GPU_GROUPED_TYPES in src/gpu/CMakeLists.txt",
                  types.text(), compiled));
}

// Returns an expert's matrix as a layer has it: gate and up with an activation, else down.
FfnWeights as_ffn(const GroupedGemmSpec& spec, const MatrixView& matrix, const VectorView& bias) {
  FfnWeights ffn;
  if (!spec.epilogue) {
    ffn.down = matrix;
    ffn.down_bias = bias;
    return ffn;
  }
  if (!spec.epilogue->gated) {
    ffn.up = matrix;
    ffn.up_bias = bias;
    return ffn;
  }
  const int half = spec.n / 2;
  const bool in_turn = spec.order == GateOrder::kInterleaved;
  const auto part = [&](bool second, MatrixView& rows, VectorView& values) {
    const std::int64_t first = !second ? 0 : in_turn ? 1 : half;
    rows = matrix;
    rows.rows = half;
    rows.data = matrix.row(first);
    rows.row_stride = matrix.row_stride * (in_turn ? 2 : 1);
    if (matrix.scale != nullptr && matrix.scale_rows < matrix.rows) {
      // (A scale that all rows share stays as it is.)
      const bool of_rows = matrix.scale_rows == 1;
      if (in_turn ? !of_rows : half % matrix.scale_rows != 0) {
        unsupported(fmt::format(
            "a scale of w is shared by {} rows, of which some are gate's and some are up's; on the "
            "GPU use an order and an n in which {} rows of gate stand together",
            matrix.scale_rows, matrix.scale_rows));
      }
      rows.scale = matrix.row_scale(first);
      if (in_turn) rows.scale_stride = 2 * matrix.scale_stride;
    }
    values = bias;
    if (bias.empty()) return;
    values.size = half;
    values.data = static_cast<const std::byte*>(bias.data) +
                  static_cast<std::size_t>(first * bias.stride) * size_of(bias.dtype);
    values.stride = bias.stride * (in_turn ? 2 : 1);
  };
  const bool up_first = spec.order == GateOrder::kUpGate;
  part(up_first, ffn.gate, ffn.gate_bias);
  part(!up_first, ffn.up, ffn.up_bias);
  return ffn;
}

int checked_device(const GroupedGemmOptions& options) {
  LayerOptions layer;
  layer.backend = Backend::kCuda;
  layer.cuda.device = options.device;
  layer.cuda.reserved_sms = options.reserved_sms;
  return choose_device(layer);
}

void require_multiple(const char* what, std::int64_t value, int of) {
  if (value % of == 0) return;
  unsupported(fmt::format("{} is {}; the GPU moves 16 bytes at a time, use a multiple of {}", what,
                          value, of));
}

void require_aligned(const char* what, const void* data) {
  if (reinterpret_cast<std::uintptr_t>(data) % 16 == 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} starts at {}; the GPU moves 16 bytes at a time, use a multiple of 16",
                          what, data));
}

}  // namespace

struct GroupedGemmEngine::State {
  GroupedGemmSpec spec;
  GroupedSchedule schedule;
  int device;
  GroupedEntry entry;
  unsigned blocks = 0;
  DeviceFfn weights;
  DeviceBuffer nowhere;
  // Memory for calls with up to so many rows. Graphs may still use earlier rooms.
  struct Room {
    std::int64_t rows = 0;
    // Rows that were gathered or converted, and their scales; or sums of parts of K, and the
    // numbers of parts that are stored.
    DeviceBuffer data, more;
  };
  std::vector<Room> prepared;
  std::array<std::vector<Room>, kMostLog2Splits + 1> split;  // by log2 of the splits
  GroupedChoices choices{};                                  // of a table; or none
  std::array<DeviceBuffer, 2> candidates;                    // of single blocks and of pairs
  MappedMemory<Failures> failures;
  GroupedParams params{};

  State(const GroupedGemmSpec& its, const GroupedSchedule& how, int on, const GroupedEntry& kernel)
      : spec(its), schedule(how), device(on), entry(kernel) {}
  bool token_major() const { return entry.tile.orientation == Orientation::kTokenMajor; }
  // The scales of a row in FP8.
  int scales_of_row() const {
    if (entry.numerics.makes_codes()) return 1;
    return entry.numerics.scaled() ? protocol::ceil_div(spec.k, kQuantGroup) : 0;
  }
  // The number of sums that an output row has.
  std::int64_t width() const { return std::int64_t{params.columns} * (params.up_at != 0 ? 2 : 1); }
  void choose_schedule(const tuner::Table* table, int num_sms);
  void describe_choice(std::int64_t rows, GroupedCall& call) const;
  // Returns room for so many rows. If need be it calls allocate(Room&), which is not possible while
  // the stream is captured.
  template <typename Allocate>
  static const Room& room_for(std::vector<Room>& rooms, const char* why, std::int64_t rows,
                              void* stream, Allocate&& allocate);
  // Makes the call's rows ones that the kernel takes, if they are not.
  void describe_rows(const GroupedInput& input, GroupedCall& call);
  void describe_parts(std::int64_t rows, void* stream, GroupedCall& call);
};

template <typename Allocate>
const GroupedGemmEngine::State::Room& GroupedGemmEngine::State::room_for(std::vector<Room>& rooms,
                                                                         const char* why,
                                                                         std::int64_t rows,
                                                                         void* stream,
                                                                         Allocate&& allocate) {
  if (!rooms.empty() && rooms.back().rows >= rows) return rooms.back();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  SWITCHYARD_CUDA(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status));
  if (status != cudaStreamCaptureStatusNone) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} of {} rows need memory, and the stream is being captured; make a "
                            "call of this size before it",
                            why, rows));
  }
  Room room;
  room.rows = rows;
  allocate(room);
  rooms.push_back(std::move(room));
  return rooms.back();
}

// Chooses the schedule: the caller's values or the rules', and a table's configurations.
void GroupedGemmEngine::State::choose_schedule(const tuner::Table* table, int num_sms) {
  const CutFacts facts{entry.tile.token_rows, token_major(), params.k_blocks};
  params.cut = cut_of(schedule, facts);
  params.may_halve = token_major() && !schedule.tile_rows && params.cut.log2_splits == 0;
  if (schedule.paired.value_or(false) && blocks < kPair) {
    unsupported("schedule.paired is true, but there is one multiprocessor; leave it");
  }
  if (table == nullptr) return;
  if (entry.numerics.four_bit()) {
    unsupported(fmt::format(
        "a table is given, but the weights are {}, whose kernels nothing tunes; leave the table",
        to_string(entry.numerics.weight.storage)));
  }
  choices = choices_of(
      *table, {facts, entry.numerics.token.compute, spec.num_experts, spec.n, spec.k, num_sms});
  if (schedule.paired && choices.of(*schedule.paired).empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("schedule.paired is {}, but all of the table's configurations are {}; "
                            "leave it",
                            *schedule.paired, *schedule.paired ? "single" : "paired"));
  }
  params.rule = choices.rule;
  for (const bool pairs : {false, true}) {
    const std::vector<Candidate>& list = choices.of(pairs);
    if (list.empty()) continue;
    candidates[pairs ? 1 : 0] = DeviceBuffer(list.size() * sizeof(Candidate));
    candidates[pairs ? 1 : 0].upload(list.data(), list.size() * sizeof(Candidate));
  }
}

// Describes how the call is launched and what it may choose from. `rows`: the most that it may
// have, which is all that the host knows of them.
void GroupedGemmEngine::State::describe_choice(std::int64_t rows, GroupedCall& call) const {
  const bool pairs_fit = blocks >= kPair;
  const bool by_rule = rows >= std::int64_t{kPairedRows} * spec.num_experts && pairs_fit;
  if (choices.single.empty() && choices.paired.empty()) {
    call.paired = schedule.paired.value_or(by_rule) ? 1 : 0;
    return;
  }
  const std::uint32_t most = most_log2_splits(rows, width());
  const bool pairs =
      schedule.paired.value_or(pairs_fit && choose_pairs(choices, spec.num_experts, rows, most));
  call.paired = pairs ? 1 : 0;
  call.candidates = reinterpret_cast<const Candidate*>(candidates[pairs ? 1 : 0].data());
  call.num_candidates = GroupedChoices::count(choices.of(pairs), most);
}

void GroupedGemmEngine::State::describe_parts(std::int64_t rows, void* stream, GroupedCall& call) {
  // Candidates stand in the order of their splits.
  const std::uint32_t log2_splits =
      call.num_candidates == 0 ? params.cut.log2_splits
                               : choices.of(call.paired != 0)[call.num_candidates - 1].log2_splits;
  if (log2_splits == 0) return;
  const Room& room = room_for(split[log2_splits], "parts of K", rows, stream, [&](Room& its) {
    const auto count = static_cast<std::size_t>(rows);
    // An expert's last tile may be lower than the others.
    const std::size_t tiles = static_cast<std::size_t>(spec.num_experts) + count / kUnitRows;
    its.data =
        DeviceBuffer((count << log2_splits) * static_cast<std::size_t>(width()) * sizeof(float));
    its.more = DeviceBuffer(tiles * params.paired_row_blocks * kMathGroups * sizeof(std::uint32_t));
    SWITCHYARD_CUDA(cudaMemset(its.more.data(), 0, its.more.bytes()));
    SWITCHYARD_CUDA(cudaStreamSynchronize(nullptr));
  });
  call.sums = reinterpret_cast<float*>(room.data.data());
  call.split_rows = room.rows;
  call.stored = reinterpret_cast<std::uint32_t*>(room.more.data());
}

void GroupedGemmEngine::State::describe_rows(const GroupedInput& input, GroupedCall& call) {
  const MatrixView& x = input.x;
  const int element = entry.numerics.token_bytes();
  // Rows through an index: blocks that stand alone copy them from where they are. In pairs every
  // block would copy the rows that both share.
  const bool in_place = !input.index.empty() && call.paired == 0;
  const bool as_they_are = x.dtype == entry.numerics.token.storage &&
                           !entry.numerics.makes_codes() && (input.index.empty() || in_place) &&
                           reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 &&
                           (x.rows <= 1 || (x.row_stride > 0 && x.row_stride * element % 16 == 0));
  if (as_they_are) {
    const auto* const data = static_cast<const std::byte*>(x.data);
    const std::int64_t row_stride = x.rows > 1 ? x.row_stride : spec.k;
    if (!in_place) {
      call.x_maps = token_maps(data, element, x.rows, spec.k, row_stride);
    } else {
      call.x = data;
      call.x_row_bytes = row_stride * element;
      call.gathers = 1;
      call.index_in = static_cast<const std::int32_t*>(input.index.data());
      call.x_rows = static_cast<std::uint32_t>(x.rows);
    }
    call.x_scales = x.f32_scale();
    call.scale_stride = x.scale_stride;
    return;
  }
  const std::int64_t rows =
      input.index.empty() ? x.rows : static_cast<std::int64_t>(input.index.size());
  const Room& room =
      room_for(prepared, "gathered or converted rows", rows, input.stream, [&](Room& its) {
        const auto columns = static_cast<std::size_t>(spec.k),
                   count = static_cast<std::size_t>(rows);
        its.data = DeviceBuffer(count * columns * static_cast<std::size_t>(element));
        its.more = DeviceBuffer((count * static_cast<std::size_t>(scales_of_row()) +
                                 (scales_of_row() == 1 ? kMostTileRows : 0)) *
                                sizeof(float));
      });
  PrepareCall prepare{};
  static_cast<GroupedRows&>(prepare) = call;
  prepare.x = x.data;
  prepare.type = x.dtype;
  prepare.x_stride = x.row_stride;
  prepare.x_rows = x.rows;
  prepare.x_scales = x.f32_scale();
  prepare.scale_stride = x.scale_stride;
  prepare.index = static_cast<const std::int32_t*>(input.index.data());
  prepare.num_experts = spec.num_experts;
  prepare.columns = spec.k;
  prepare.to = room.data.data();
  prepare.to_type = entry.numerics.token.storage;
  prepare.to_scales = reinterpret_cast<float*>(room.more.data());
  prepare.by_row = entry.numerics.makes_codes();
  SWITCHYARD_CUDA(prepare_rows(prepare, rows, static_cast<int>(blocks),
                               static_cast<cudaStream_t>(input.stream)));
  call.in = RowLayout::packed();
  call.x_maps = token_maps(room.data.data(), element, room.rows, spec.k, spec.k);
  call.x_scales = prepare.to_scales;
  call.scale_stride = scales_of_row();
}

GroupedGemmEngine::GroupedGemmEngine(const GroupedGemmSpec& spec, const GroupedGemmWeights& weights,
                                     DType compute, const GroupedGemmOptions& options) {
  const int device = checked_device(options);
  const MatrixView& one = weights.matrices.front();
  if (is_four_bit(one.dtype)) require_boxes(one, compute);
  const GroupedEntry entry =
      entry_of(spec, {is_four_bit(one.dtype) ? one.dtype : compute, compute});
  require_multiple("k", spec.k, entry.numerics.alignment());
  require_multiple("the number of output columns", spec.output_columns(), 8);
  const DeviceScope scope(device);
  state_ = std::make_unique<State>(spec, options.schedule, device, entry);
  State& state = *state_;
  state.blocks = static_cast<unsigned>(device_info(device).num_sms - options.reserved_sms);
  SWITCHYARD_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(state.entry.kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(state.entry.shared_bytes)));
  std::vector<FfnWeights> experts;
  for (std::size_t e = 0; e < weights.matrices.size(); ++e) {
    experts.push_back(as_ffn(spec, weights.matrices[e],
                             weights.biases.empty() ? VectorView{} : weights.biases[e]));
  }
  const bool first = spec.epilogue.has_value();
  state.weights = DeviceFfn(entry.numerics, experts, first ? spec.k : spec.n,
                            first ? spec.output_columns() : spec.k, first && spec.epilogue->gated);
  SWITCHYARD_CUDA(cudaStreamSynchronize(nullptr));
  state.nowhere = DeviceBuffer(static_cast<std::size_t>(spec.output_columns()) * sizeof(float));

  GroupedParams& params = state.params;
  params.routed = state.weights.params();
  params.num_experts = spec.num_experts;
  params.hidden = first ? spec.k : spec.n;
  params.columns = static_cast<std::uint32_t>(spec.output_columns());
  params.in_columns = static_cast<std::uint32_t>(spec.k);
  params.limit = INFINITY;
  params.product_step = 1;
  if (first) {
    params.form = form_of(*spec.epilogue);
    params.limit = spec.epilogue->limit;
    params.up_bias = spec.epilogue->up_bias;
    if (spec.epilogue->gated) {
      const bool in_turn = spec.order == GateOrder::kInterleaved;
      params.gate_at = spec.order == GateOrder::kUpGate ? params.columns : 0;
      params.up_at = in_turn ? 1 : params.columns - params.gate_at;
      params.product_step = in_turn ? 2 : 1;
    }
  }
  params.clamps = std::isfinite(params.limit) || params.up_bias != 0;
  FfnParams& ffn = params.routed;
  ffn.more_of_first = params.clamps || ffn.up_bias != nullptr || ffn.up_scale != nullptr;
  ffn.more_of_second = ffn.down_bias != nullptr || ffn.down_scale != nullptr;
  params.k_blocks = static_cast<std::uint32_t>(
      protocol::ceil_div(spec.k * entry.numerics.token_bytes(), kStageRowBytes));
  params.row_blocks = protocol::ceil_div(first ? ffn.gemm1_rows : ffn.gemm2_rows,
                                         static_cast<std::uint32_t>(entry.tile.weight_rows));
  params.paired_row_blocks = protocol::round_up<std::uint32_t>(params.row_blocks, kPair);
  state.choose_schedule(options.table.get(), device_info(device).num_sms);
  params.deadline_ns = kDeadlineNs;
  params.block_deadline_ns = block_deadline(kDeadlineNs);
  params.failures = state.failures.on_device();
}
GroupedGemmEngine::~GroupedGemmEngine() = default;

bool GroupedGemmEngine::copies() const { return !state_->weights.layout().empty(); }

void GroupedGemmEngine::refresh(void* stream) {
  const WeightLayout& layout = state_->weights.layout();
  if (layout.empty()) return;
  const DeviceScope scope(state_->device);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  SWITCHYARD_CUDA(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture));
  if (capture != cudaStreamCaptureStatusNone && !layout.capturable()) {
    unsupported(
        "refresh() is captured in a graph, but weights that the operator copied are in host "
        "memory; put them into the device's, or call it outside of graphs");
  }
  layout.run(stream);
}

void GroupedGemmEngine::run(const GroupedInput& input, const GroupedOutput& output) {
  State& state = *state_;
  const GroupedGemmSpec& spec = state.spec;
  if ((*state.failures).given_up != 0) {
    throw Error(ErrorCode::kTimeout,
                fmt::format("an earlier call of GroupedGemm waited {} s for the GPU's memory, and "
                            "gave up; make the operator anew",
                            kDeadlineNs / 1'000'000'000));
  }
  const MatrixView& x = input.x;
  const auto rows = input.index.empty() ? x.rows : static_cast<std::int64_t>(input.index.size());
  if (x.rows == 0 || rows == 0) return;
  if (output.products != nullptr && state.params.clamps) {
    unsupported(
        "products are to be stored of an activation that clamps; on the GPU they are clamped "
        "before they can be stored, use Backend::kCpu");
  }
  const std::int64_t stride = output.row_stride == 0 ? spec.output_columns() : output.row_stride;
  if (output.dtype != DType::kF32) {
    require_multiple("the output's row_stride", stride, 8);
    require_aligned("the output", output.data);
  }
  GroupedCall call{};
  call.ends = input.ends.data();
  call.wide_ends = input.ends.dtype() == DType::kI64;
  call.in = input.layout;
  call.out = output.layout;
  call.index = static_cast<const std::int32_t*>(output.index.data());
  call.weights = static_cast<const float*>(output.weights.data());
  call.y = output.data;
  call.type = output.dtype;
  call.y_stride = stride;
  call.products = output.products;
  call.products_stride = output.products_stride == 0 ? spec.n : output.products_stride;
  call.nowhere = state.nowhere.data();
  // (There may be fewer rows than x has room for. The host does not know.)
  state.describe_choice(rows, call);
  call.chosen = output.chosen;
  const DeviceScope scope(state.device);
  state.describe_rows(input, call);
  state.describe_parts(rows, input.stream, call);
  void* arguments[] = {&state.params, &call};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(call.paired != 0 ? state.blocks / kPair * kPair : state.blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = state.entry.shared_bytes;
  config.stream = static_cast<cudaStream_t>(input.stream);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kPair, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = call.paired;
  SWITCHYARD_CUDA(
      cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(state.entry.kernel), arguments));
}

}  // namespace switchyard::gpu
