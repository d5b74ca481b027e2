#include "exchange/staged_layer.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/convert.h"
#include "base/mapping.h"
#include "exchange/host_experts.h"
#include "exchange/staged_calls.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "layer/agreement.h"
#include "layer/call.h"
#include "layer/compute.h"
#include "layer/failure.h"
#include "layer/shared_beside.h"
#include "network/proxy.h"
#include "protocol/partition.h"
#include "routing/route.h"
#include "switchyard/grouped_gemm.h"
#include "switchyard/routing.h"

namespace switchyard {
namespace {

using Clock = std::chrono::steady_clock;
using Device = StagingDevice;

// Columns of the gate's product come in multiples of this.
constexpr int kGateMultiple = 8;

[[noreturn]] void refuse(const char* what, const char* remedy) {
  throw Error(
      ErrorCode::kUnsupported,
      fmt::format("{}; layers of GPUs on several hosts do not have that: {}", what, remedy));
}

void check_options(const LayerOptions& options) {
  if (options.diagnostics.trace)
    refuse("trace is set", "leave it unset, or trace a world of one host");
  if (options.diagnostics.recorded_steps > 0) {
    refuse("recorded_steps is set", "leave it at 0, or record on the CPU or on one host");
  }
}

float as_float(const std::byte* from, DType dtype) {
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, from, sizeof value);
    return value;
  }
  std::uint16_t code = 0;
  std::memcpy(&code, from, sizeof code);
  return dtype == DType::kBF16 ? bf16_to_f32(code) : f16_to_f32(code);
}

// The router's rows and the shared gate's, as sums of bf16 matrices that hold all their bits.
struct GatePlanes {
  int columns = 0;  // of one plane
  int planes = 0;
  std::vector<std::uint16_t> values;  // [planes, columns, H]
};

class Core {
 public:
  Core(const World& world, const LayerSpec& spec, const MoeWeights& weights,
       const LayerOptions& options, std::unique_ptr<Device> device, Backend kernels,
       std::int64_t most_rows);

  StagedCalls& calls() { return calls_; }
  DType compute() const { return compute_; }
  const MoeWeights& weights() const { return weights_; }
  std::uint64_t device_bytes() const { return context_->device_bytes; }
  const ForwardStats& stats() const { return stats_; }

  void pass(const ForwardInput& input, const ForwardOutput& output);
  void refresh();
  void rebind(const MoeWeights& weights);

 private:
  using Buffer = StagedContext::Buffer;

  DType value() const { return context_->value(); }
  std::vector<float> floats(const VectorView& v) const;
  GatePlanes gate_planes() const;
  void make_gate();
  void warm_gate();
  void set_up_shared();

  void start_own(const ForwardInput& input);
  void route(const ForwardInput& input);
  void read_shared_factors(std::int64_t tokens);
  void finish(const ForwardInput& input, const ForwardOutput& output);
  template <typename T>
  std::vector<T> fetch(const void* from, std::size_t count) const {
    std::vector<T> values(count);
    const std::size_t bytes = count * sizeof(T);
    if (count != 0) {
      device_.to_host(reinterpret_cast<std::byte*>(values.data()), bytes, from, bytes, {bytes, 1});
    }
    return values;
  }
  // Device memory that has a value so many times.
  template <typename T>
  Buffer repeated(std::int64_t count, T value) {
    const std::vector<T> values(static_cast<std::size_t>(count), value);
    Buffer buffer = context_->allocate(count, sizeof(T));
    store(buffer.get(), values.data(), values.size() * sizeof(T));
    device_.await_stream();
    return buffer;
  }
  void store(void* to, const void* from, std::size_t bytes) const {
    context_->store(to, from, bytes);
  }

  const World world_;
  const LayerSpec spec_;
  MoeWeights weights_;
  const LayerOptions options_;
  const Backend kernels_;
  Device& device_;  // of the calls
  DType compute_ = DType::kBF16;
  std::optional<StagedContext> context_;
  std::optional<HostExperts> experts_;
  // The device also computes the shared expert and the gate's product.
  World alone_;
  std::unique_ptr<LayerEngine> shared_;
  std::optional<GroupedGemm> gate_;
  GatePlanes planes_;
  // Device memory: products of the gate, and the ids, weights and number of rows that choose the
  // only network of the gate and of the shared expert.
  Buffer products_, first_, ones_, end_;
  // Host memory, committed by the tokens that really go through it.
  Mapping host_slots_, host_products_;
  std::int32_t num_tokens_ = 0;  // of the gate's product
  std::vector<std::int32_t> ids_;
  std::vector<float> token_weights_, shared_factors_, router_bias_, correction_bias_;
  MatrixView hash_table_;  // in host memory
  std::vector<std::byte> hash_copy_;
  ForwardStats stats_;
  StagedCalls calls_;  // last: its thread uses the rest
};

// ------------------------------------------------------------------------------------- making

Core::Core(const World& world, const LayerSpec& spec, const MoeWeights& weights,
           const LayerOptions& options, std::unique_ptr<Device> device, Backend kernels,
           std::int64_t most_rows)
    : world_(world),
      spec_(spec),
      weights_(weights),
      options_(options),
      kernels_(kernels),
      device_(*device),
      alone_(World::single()),
      calls_(std::move(device)) {
  Fabric& fabric = world.fabric();
  const int places = options.placement.num_places(spec.num_experts);
  attempt_together(fabric, [&] {
    check_options(options);
    validate(spec);
    validate(options.placement, spec.num_experts);
    validate(spec, weights, own_experts(places, world.rank(), world.size()), places);
    require_host_layers(fabric.proxy()->hosts(), {places, world.size()});
    routing::check_routable(spec);
  });
  compute_ = agree_on_compute(fabric, weights, options.compute);
  attempt_together(fabric, [&] {
    if (kernels != Backend::kCuda || compute_ != DType::kF32) return;
    if (options.compute) refuse("compute is f32", "use bf16 or f8_e4m3, or the CPU engine");
    compute_ = DType::kBF16;
  });
  agree(fabric, {spec, options.max_tokens, compute_, summary_of(options.placement),
                 options.pre_sum_per_host});
  const std::optional<DType> routed = agree_on_routed_type(fabric, weights);
  const bool by_row = kernels == Backend::kCuda && routed && is_four_bit(*routed);
  context_.emplace(
      StagedContext{world_, spec_, options_, device_, kernels_, compute_, by_row, most_rows});
  experts_.emplace(*context_, weights_);
  attempt_together(fabric, [&] {
    set_up_shared();
    make_gate();
    host_slots_ = lent_memory(
        device_, bytes_of_rows(options.max_tokens, static_cast<std::size_t>(spec.top_k) *
                                                       (sizeof(std::int64_t) + sizeof(float))));
  });
}

void Core::set_up_shared() {
  if (spec_.shared_intermediate == 0) return;
  const std::int64_t tokens = options_.max_tokens;
  const FfnWeights& shared = weights_.shared;
  const bool biased = !shared.up_bias.empty() || !shared.down_bias.empty();
  shared_ =
      context_->make_networks(alone_, spec_of_networks(spec_, 1, spec_.shared_intermediate, biased),
                              only_shared(weights_), tokens, options_.deadline);
  first_ = repeated<std::int32_t>(tokens, 0);
  ones_ = repeated(tokens, 1.0f);
}

// Numbers that stand `stride` elements apart, in the host's memory or the device's.
std::vector<float> Core::floats(const VectorView& v) const {
  const std::size_t element = size_of(v.dtype), count = static_cast<std::size_t>(v.size);
  std::vector<float> values(v.empty() ? 0 : count);
  if (values.empty()) return values;
  std::vector<std::byte> bytes(count * element);
  device_.to_host(bytes.data(), element, v.data, static_cast<std::size_t>(v.stride) * element,
                  {element, count});
  for (std::size_t i = 0; i < count; ++i) values[i] = as_float(&bytes[i * element], v.dtype);
  return values;
}

GatePlanes Core::gate_planes() const {
  const auto num_planes = [](DType dtype) {
    return dtype == DType::kBF16 ? 1 : dtype == DType::kF16 ? 2 : 3;
  };
  GatePlanes gate;
  const MatrixView& router = weights_.router;
  const bool sigmoid = spec_.shared_sigmoid_gate;
  if (router.empty() && !sigmoid) return gate;
  gate.planes = std::max(router.empty() ? 0 : num_planes(router.dtype),
                         sigmoid ? num_planes(weights_.shared_gate.dtype) : 0);
  gate.columns = protocol::round_up(spec_.num_experts + 1, kGateMultiple);
  const auto hidden = static_cast<std::size_t>(spec_.hidden);
  gate.values.resize(static_cast<std::size_t>(gate.planes) *
                     static_cast<std::size_t>(gate.columns) * hidden);
  const auto put = [&](int column, std::vector<float> rest) {
    for (int p = 0; p < gate.planes; ++p) {
      const auto row = static_cast<std::size_t>(p) * static_cast<std::size_t>(gate.columns) +
                       static_cast<std::size_t>(column);
      for (std::size_t i = 0; i < hidden; ++i) {
        const std::uint16_t code = f32_to_bf16(rest[i]);
        gate.values[row * hidden + i] = code;
        rest[i] -= bf16_to_f32(code);
      }
    }
  };
  for (int e = 0; e < spec_.num_experts && !router.empty(); ++e) {
    put(e, floats({router.row(e), router.dtype, router.cols, router.col_stride}));
  }
  if (sigmoid) put(spec_.num_experts, floats(weights_.shared_gate));
  return gate;
}

// Makes the gate's product, and the vectors and tables that the host routes by.
void Core::make_gate() {
  router_bias_ = floats(weights_.router_bias);
  correction_bias_ = floats(weights_.correction_bias);
  const MatrixView& table = weights_.hash_table;
  if (!table.empty() && spec_.routing.method == RoutingMethod::kHash) {
    const std::size_t element = size_of(table.dtype),
                      width = static_cast<std::size_t>(table.cols) * element;
    hash_copy_.resize(static_cast<std::size_t>(table.rows) * width);
    device_.to_host(hash_copy_.data(), width, table.data,
                    static_cast<std::size_t>(table.row_stride) * element,
                    {width, static_cast<std::size_t>(table.rows)});
    hash_table_ = table;
    hash_table_.data = hash_copy_.data();
    hash_table_.row_stride = table.cols;
  }
  planes_ = gate_planes();
  if (planes_.planes == 0) return;
  const int n = planes_.planes * planes_.columns;
  GroupedGemmSpec spec;
  spec.num_experts = 1;
  spec.n = n;
  spec.k = spec_.hidden;
  GroupedGemmWeights weights;
  weights.matrices = {{planes_.values.data(), DType::kBF16, n, spec_.hidden, spec_.hidden}};
  GroupedGemmOptions options;
  options.backend = kernels_;
  options.max_rows = options_.max_tokens;
  if (kernels_ == Backend::kCuda) {
    options.device = options_.cuda.device;
    options.compute = DType::kBF16;
    options.reserved_sms = options_.cuda.reserved_sms + 1;
  } else {
    options.compute = value();
  }
  gate_.emplace(spec, weights, options);
  if (products_ != nullptr) return;
  products_ = context_->allocate(options_.max_tokens, static_cast<std::size_t>(n) * sizeof(float));
  end_ = context_->allocate(1, sizeof(std::int32_t));
  host_products_ = lent_memory(
      device_, bytes_of_rows(options_.max_tokens, static_cast<std::size_t>(n) * sizeof(float)));
  warm_gate();
}

// The operator's memory for rows that it converts grows with a call's, and freeing the old memory
// would wait for a stream that stands still.
void Core::warm_gate() {
  const auto elements = static_cast<std::size_t>(spec_.hidden);
  const Buffer x = device_.allocate(bytes_of_rows(options_.max_tokens, elements * sizeof(float)));
  num_tokens_ = 0;
  store(end_.get(), &num_tokens_, sizeof num_tokens_);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    GroupedInput input;
    input.x = {x.get(), dtype, options_.max_tokens, spec_.hidden, spec_.hidden};
    input.ends = SlotView(end_.get(), DType::kI32, 1);
    input.stream = device_.stream();
    GroupedOutput output;
    output.data = products_.get();
    output.dtype = DType::kF32;
    gate_->run(input, output);
  }
  device_.await_stream();
}

void Core::refresh() {
  experts_->refresh();
  if (shared_) shared_->refresh(device_.stream());
  make_gate();
  device_.await_stream();
}

void Core::rebind(const MoeWeights& weights) {
  experts_->rebind(weights);
  if (shared_) shared_->rebind(only_shared(weights), nullptr);
  weights_ = weights;
  make_gate();
}

// -------------------------------------------------------------------------------------- a pass

void Core::pass(const ForwardInput& input, const ForwardOutput& output) {
  const Clock::time_point start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  experts_->check();
  const std::uint64_t epoch = stats_.epoch + 1;
  stats_ = {};
  stats_.epoch = epoch;
  stats_.tokens = input.activations.rows;
  stats_.tokens_per_expert.assign(static_cast<std::size_t>(spec_.num_experts), 0);
  start_own(input);
  experts_->load_tokens(input.activations);
  route(input);
  stats_.gate_seconds = stats_.plan_seconds = seconds();
  experts_->compute(ids_, token_weights_, stats_.tokens_per_expert);
  finish(input, output);
  const ExchangeStats traffic = experts_->traffic();
  stats_.dispatch_bytes = traffic.dispatch_bytes;
  stats_.combine_bytes = traffic.combine_bytes;
  stats_.signal_bytes = traffic.signal_bytes;
  stats_.heap_bytes_reserved = traffic.heap_bytes_reserved;
  stats_.workspace_bytes_used = context_->device_bytes;
  stats_.total_seconds = seconds();
}

// Starts what needs no other rank: the gate's product, and the shared expert.
void Core::start_own(const ForwardInput& input) {
  const MatrixView& x = input.activations;
  if (x.rows == 0) return;
  const bool gates = input.topk_ids.empty() && input.logits.empty();
  if (gate_ && (gates || spec_.shared_sigmoid_gate)) {
    num_tokens_ = static_cast<std::int32_t>(x.rows);
    store(end_.get(), &num_tokens_, sizeof num_tokens_);
    GroupedInput of_gate;
    of_gate.x = x;
    of_gate.ends = SlotView(end_.get(), DType::kI32, 1);
    of_gate.stream = device_.stream();
    GroupedOutput products;
    products.data = products_.get();
    products.dtype = DType::kF32;
    gate_->run(of_gate, products);
    const std::size_t width = static_cast<std::size_t>(planes_.columns) *
                              static_cast<std::size_t>(planes_.planes) * sizeof(float);
    device_.enqueue_to_host(host_products_.data(), width, products_.get(), width,
                            {width, static_cast<std::size_t>(x.rows)});
  }
  if (shared_) {
    ForwardInput of_shared;
    of_shared.activations = x;
    of_shared.topk_ids = SlotView(first_.get(), DType::kI32, static_cast<std::size_t>(x.rows));
    of_shared.topk_weights = SlotView(ones_.get(), DType::kF32, static_cast<std::size_t>(x.rows));
    of_shared.stream = device_.stream();
    ForwardOutput results;
    results.data = experts_->shared_results();
    results.dtype = value();
    shared_->forward(of_shared, results);
  }
}

// Makes ids_ and token_weights_, and the shared expert's factors, once what was fetched has come.
void Core::route(const ForwardInput& input) {
  const std::int64_t tokens = input.activations.rows;
  const auto top_k = static_cast<std::size_t>(spec_.top_k);
  const std::size_t slots = static_cast<std::size_t>(tokens) * top_k;
  ids_.assign(slots, kNoExpert);
  token_weights_.assign(slots, 0.0f);
  if (tokens == 0) return;
  const bool given = !input.topk_ids.empty();
  const bool gates = !given && input.logits.empty();
  ForwardInput host = input;  // with what the host reads in its memory
  std::size_t fetched = 0;
  const auto fetch_slots = [&](const SlotView& view) {
    const std::size_t bytes = view.size() * size_of(view.dtype());
    std::byte* const to = host_slots_.data() + std::exchange(fetched, fetched + bytes);
    device_.enqueue_to_host(to, bytes, view.data(), bytes, {bytes, 1});
    return SlotView(to, view.dtype(), view.size());
  };
  if (given) {
    host.topk_ids = fetch_slots(input.topk_ids);
    host.topk_weights = fetch_slots(input.topk_weights);
  }
  device_.await_stream();
  if (gate_ && spec_.shared_sigmoid_gate) read_shared_factors(tokens);
  std::vector<std::int32_t> token_ids;
  if (!given && spec_.routing.method == RoutingMethod::kHash) {
    token_ids = fetch<std::int32_t>(input.token_ids.data(), input.token_ids.size());
    host.token_ids = token_ids;
  }
  MoeWeights tables;  // what check_ids() reads of weights
  tables.hash_table = hash_table_;
  try {
    check_ids(spec_, tables, host, {options_.bad_ids, options_.large_ids_are_none});
  } catch (const Error& error) {
    calls_.note(error.code(), std::string(error.what()) + "; such slots were skipped");
  }
  const IdRules skip{BadIds::kSkip, options_.large_ids_are_none};
  if (given) {
    stats_.bad_slots = read_routing(spec_, host, skip, ids_, token_weights_);
  } else {
    std::vector<std::byte> logits_bytes;
    const MatrixView& logits = input.logits;
    const std::size_t element = gates ? sizeof(float) : size_of(logits.dtype);
    const auto experts = static_cast<std::size_t>(spec_.num_experts);
    if (!gates) {
      logits_bytes.resize(static_cast<std::size_t>(tokens) * experts * element);
      device_.to_host(logits_bytes.data(), experts * element, logits.data,
                      static_cast<std::size_t>(logits.row_stride) * element,
                      {experts * element, static_cast<std::size_t>(tokens)});
    }
    const auto* const products = reinterpret_cast<const float*>(host_products_.data());
    const auto columns = static_cast<std::size_t>(planes_.columns),
               stride = columns * static_cast<std::size_t>(planes_.planes);
    std::vector<float> row(experts);
    std::vector<std::int32_t> hashed;
    for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
      for (std::size_t e = 0; e < experts; ++e) {
        if (!gates) {
          row[e] = as_float(&logits_bytes[(t * experts + e) * element], logits.dtype);
          continue;
        }
        row[e] = router_bias_.empty() ? 0.0f : router_bias_[e];
        for (std::size_t p = 0; p < static_cast<std::size_t>(planes_.planes); ++p) {
          row[e] += products[t * stride + p * columns + e];
        }
      }
      const bool is_hashed = spec_.routing.method == RoutingMethod::kHash;
      bool is_bad = false;
      if (is_hashed) {
        hashed.clear();
        is_bad = token_ids[t] < 0 || token_ids[t] >= hash_table_.rows;
        routing::append_hashed_ids(hash_table_, is_bad ? 0 : token_ids[t], hashed);
      }
      const int nan = routing::route_token(spec_, row.data(), correction_bias_.data(),
                                           is_hashed ? hashed.data() : nullptr, &ids_[t * top_k],
                                           &token_weights_[t * top_k]);
      stats_.nan_logits += nan;
      stats_.nan_tokens += nan > 0 ? 1 : 0;
      if (!is_bad) continue;
      std::fill_n(&ids_[t * top_k], top_k, kNoExpert);
      std::fill_n(&token_weights_[t * top_k], top_k, 0.0f);
      stats_.bad_slots += spec_.top_k;
    }
  }
  stats_.dropped_slots = drop_over_capacity(spec_, tokens, ids_, token_weights_);
}

// Makes the shared expert's factors of the gate's products.
void Core::read_shared_factors(std::int64_t tokens) {
  const auto columns = static_cast<std::size_t>(planes_.columns),
             stride = columns * static_cast<std::size_t>(planes_.planes);
  shared_factors_.resize(static_cast<std::size_t>(tokens));
  const auto* const products = reinterpret_cast<const float*>(host_products_.data());
  for (std::size_t t = 0; t < shared_factors_.size(); ++t) {
    float sum = 0;
    for (std::size_t p = 0; p < static_cast<std::size_t>(planes_.planes); ++p) {
      sum += products[t * stride + p * columns + static_cast<std::size_t>(spec_.num_experts)];
    }
    shared_factors_[t] = 1.0f / (1.0f + std::exp(-sum));
  }
}

void Core::finish(const ForwardInput& input, const ForwardOutput& output) {
  const std::int64_t tokens = input.activations.rows;
  experts_->sum(output, shared_factors_);
  if (tokens == 0) return;
  if (!output.topk_ids.empty()) {
    store(output.topk_ids.data(), ids_.data(), ids_.size() * sizeof(std::int32_t));
  }
  if (!output.topk_weights.empty()) {
    store(output.topk_weights.data(), token_weights_.data(), token_weights_.size() * sizeof(float));
  }
  device_.await_stream();
}

// ------------------------------------------------------------------------------------- engine

class Engine final : public LayerEngine {
 public:
  Engine(const World& world, const LayerSpec& spec, const MoeWeights& weights,
         const LayerOptions& options, std::unique_ptr<Device> device, Backend kernels,
         std::int64_t most_rows)
      : world_(world),
        spec_(spec),
        options_(options),
        core_(std::make_unique<Core>(world, spec, weights, options, std::move(device), kernels,
                                     most_rows)) {
    keep_agreed_compute(world, spec, core_->compute(), options_);
  }
  ~Engine() override {
    // A stream that does not come to an end may still reach a call.
    if (!core_->calls().device().is_idle(options_.deadline)) (void)core_.release();
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  void forward(const ForwardInput& input, const ForwardOutput& output) override {
    check_call(spec_, core_->weights(), options_.max_tokens, world_.rank(), input, output,
               core_->compute());
    check();
    require_aligned("activations", input.activations.data, input.activations.row_stride,
                    input.activations.dtype, input.activations.rows);
    require_aligned("outputs", output.data,
                    output.row_stride == 0 ? spec_.hidden : output.row_stride, output.dtype,
                    input.activations.rows);
    core_->calls().enqueue(input.stream,
                           [core = core_.get(), input, output] { core->pass(input, output); });
  }
  void check() override {
    core_->calls().throw_found();
    throw_if_aborted(world_);
  }
  void refresh(void* stream) override {
    core_->calls().device().synchronize(stream);
    core_->calls().alone([&] { core_->refresh(); });
  }
  // At least the gate is copied.
  bool copies() const override { return true; }
  void rebind(const MoeWeights& weights, const ExpertPlacement* placement) override {
    if (placement != nullptr) {
      refuse("rebind() is called with a placement", "make the layer anew with it");
    }
    const int places = options_.placement.num_places(spec_.num_experts);
    validate(spec_, weights, own_experts(places, world_.rank(), world_.size()), places);
    const DType compute = resolve_compute(weights, options_.compute);
    const bool rounds = compute == DType::kF32 && !options_.compute;
    require_same_weights(core_->weights(), weights, core_->compute(),
                         rounds ? core_->compute() : compute);
    core_->calls().device().synchronize_all();
    core_->calls().alone([&] { core_->rebind(weights); });
  }
  const ForwardStats& stats() override {
    core_->calls().device().synchronize_all();
    core_->calls().alone([&] { stats_ = core_->stats(); });
    return stats_;
  }
  Recording recording() override { return {}; }  // Refused when the layer is made, as traces are.
  bool records() const override { return false; }
  PassTrace trace() override { return {}; }
  bool traces() const override { return false; }
  const LayerSpec& spec() const override { return spec_; }
  Backend backend() const override { return options_.backend; }
  DType compute() const override { return core_->compute(); }
  int num_threads() const override { return 0; }
  std::uint64_t workspace_bytes() const override { return core_->device_bytes(); }

 private:
  const World world_;
  const LayerSpec spec_;
  LayerOptions options_;
  std::unique_ptr<Core> core_;
  ForwardStats stats_;
};

}  // namespace

std::unique_ptr<LayerEngine> make_staged_layer(const World& world, const LayerSpec& spec,
                                               const MoeWeights& weights,
                                               const LayerOptions& options,
                                               std::unique_ptr<StagingDevice> device,
                                               Backend kernels, std::int64_t most_rows) {
  return std::make_unique<Engine>(world, spec, weights, options, std::move(device), kernels,
                                  most_rows);
}

namespace gpu {

std::unique_ptr<LayerEngine> make_engine_over_hosts(const World& world, const LayerSpec& spec,
                                                    const MoeWeights& weights,
                                                    const LayerOptions& options) {
  std::unique_ptr<StagingDevice> device;
  attempt_together(world.fabric(), [&] { device = make_staging_device(options.cuda.device); });
  return make_staged_layer(world, spec, weights, options, std::move(device));
}

}  // namespace gpu

}  // namespace switchyard
