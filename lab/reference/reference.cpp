#include "reference/reference.h"

#include <fmt/core.h>

#include <algorithm>
#include <barrier>
#include <charconv>
#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <string>
#include <thread>
#include <type_traits>

#include "base/threads.h"
#include "reference/decode.h"
#include "reference/multiply.h"
#include "switchyard/error.h"
#include "switchyard/routing.h"

namespace switchyard::reference {
namespace {

// A precision says how values are rounded. operand() rounds weights and the operands of the first
// product, h() rounds h, and result() rounds experts' outputs. Here nothing is rounded.
struct ExactPrecision {
  using Real = double;
  static Real operand(double value) { return value; }
  static Real h(double value) { return value; }
  static Real result(double value) { return value; }
};

// Inputs of every product and experts' outputs are rounded to bf16. Sums are in fp32.
struct Bf16Precision {
  using Real = float;
  static Real operand(double value) { return round_to_bf16(static_cast<float>(value)); }
  static Real h(double value) { return operand(value); }
  static Real result(double value) { return operand(value); }
};

// Like Bf16Precision, except for operands: they are codes times scales, and stay in fp32.
struct Fp8Precision {
  using Real = float;
  static Real operand(double value) { return static_cast<float>(value); }
  static Real h(double value) { return Bf16Precision::h(value); }
  static Real result(double value) { return Bf16Precision::result(value); }
};

// Replaces values by their quantised form, in the arithmetic of Real.
template <typename Real>
void quantise_row(Real* values, std::int64_t count, std::int64_t scale_columns) {
  constexpr Real kLargest = 448;
  const std::int64_t group = std::min(scale_columns, std::max(count, std::int64_t{1}));
  for (std::int64_t begin = 0; begin < count; begin += group) {
    const std::int64_t end = std::min(begin + group, count);
    Real amax = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const Real magnitude = std::abs(values[i]);
      if (magnitude > amax || std::isnan(magnitude)) amax = magnitude;
      if (std::isnan(amax)) break;
    }
    if (amax < Real{0x1p-100f}) amax = Real{0x1p-100f};
    const Real scale = amax * (1 / kLargest);
    const Real inverse = kLargest / amax;
    for (std::int64_t i = begin; i < end; ++i) {
      const double code = f8e4m3_to_double(nearest_f8e4m3(double{values[i] * inverse}));
      values[i] = static_cast<Real>(code) * scale;
    }
  }
}

bool is_floating(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16 ||
         dtype == DType::kF8E4M3;
}

void check_matrix(const std::string& name, const MatrixView& matrix, std::int64_t rows,
                  std::int64_t cols) {
  if (matrix.rows != rows || matrix.cols != cols || (matrix.empty() && rows * cols > 0)) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{} is [{}, {}]{}, expected [{}, {}]", name, matrix.rows, matrix.cols,
                            matrix.empty() ? " without data" : "", rows, cols));
  }
  if (!is_floating(matrix.dtype) && !is_four_bit(matrix.dtype)) {
    throw Error(ErrorCode::kDTypeMismatch, fmt::format("{} is {}, expected a floating-point matrix",
                                                       name, to_string(matrix.dtype)));
  }
}

void check_vector(const std::string& name, const VectorView& vector, std::int64_t size) {
  if (vector.empty() || vector.size != size) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("{} has {} elements{}, expected {}", name, vector.size,
                            vector.empty() ? " and no data" : "", size));
  }
  if (!is_floating(vector.dtype)) {
    throw Error(ErrorCode::kDTypeMismatch, fmt::format("{} is {}, expected a floating-point vector",
                                                       name, to_string(vector.dtype)));
  }
}

void check_size(const char* name, std::size_t size, std::size_t expected) {
  if (size != expected) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} has {} elements, expected {}", name, size, expected));
  }
}

std::vector<double> decoded(const VectorView& vector) {
  std::vector<double> result(static_cast<std::size_t>(vector.size));
  decode_vector(vector, result.data());
  return result;
}

// The bias, or zeros where the model has none.
std::vector<double> decoded_bias(const std::string& name, const VectorView& bias,
                                 std::int64_t size) {
  if (bias.empty()) return std::vector<double>(static_cast<std::size_t>(size), 0.0);
  check_vector(name, bias, size);
  return decoded(bias);
}

std::vector<double> decoded(const MatrixView& matrix) {
  std::vector<double> result(static_cast<std::size_t>(matrix.rows * matrix.cols));
  for (std::int64_t r = 0; r < matrix.rows; ++r) decode_row(matrix, r, &result[r * matrix.cols]);
  return result;
}

template <typename Real>
Real activate(const Activation& activation, Real v) {
  switch (activation.kind) {
    case ActivationKind::kSilu: return v / (1 + std::exp(-static_cast<Real>(activation.alpha) * v));
    case ActivationKind::kGelu: return v * (1 + std::erf(v / std::numbers::sqrt2_v<Real>)) / 2;
    case ActivationKind::kGeluTanh: {
      const Real inner = v + static_cast<Real>(0.044715) * v * v * v;
      const Real slope = std::numbers::sqrt2_v<Real> * std::numbers::inv_sqrtpi_v<Real>;
      return v * (1 + std::tanh(slope * inner)) / 2;
    }
    case ActivationKind::kRelu: return std::max(v, Real{0});
    case ActivationKind::kRelu2: {
      const Real positive = std::max(v, Real{0});  // NaN if v is
      return positive * positive;
    }
    case ActivationKind::kIdentity: return v;
    case ActivationKind::kSitu: {
      const auto alpha = static_cast<Real>(activation.alpha);
      return alpha * std::tanh(v / alpha) / (1 + std::exp(-v));
    }
  }
  return v;
}

template <typename Real>
Real hidden_value(const Activation& activation, Real gate, Real up) {
  if (!activation.gated) return activate(activation, up);
  const auto limit = static_cast<Real>(activation.limit);
  if (activation.kind == ActivationKind::kSitu) {
    const Real bent = std::isfinite(limit) ? limit * std::tanh(up / limit) : up;
    return activate(activation, gate) * (bent + static_cast<Real>(activation.up_bias));
  }
  return activate(activation, std::min(gate, limit)) *
         (std::clamp(up, -limit, limit) + static_cast<Real>(activation.up_bias));
}

// One FFN and the tokens it serves.
struct Job {
  std::string name;
  const FfnWeights* ffn = nullptr;
  std::int64_t intermediate = 0;
  bool weight_on_input = false;
  std::vector<std::int64_t> tokens;
  std::vector<double> token_weights;
  bool shared = false;
};

// A shared expert is multiplied by itself, by kernels of FP8 weights.
constexpr std::int64_t kSharedScaleColumns = 128;

struct Plan {
  std::int64_t num_tokens = 0;
  bool quantised = false;
  std::int64_t scale_columns = 0;   // of routed experts, that share one, where it is quantised
  std::vector<double> activations;  // [T, H], as the gates see them
  std::vector<double> operands;     // [T, H], as the experts see them; empty: as the gates do
  // The same as a shared expert sees them, if its scales are of other columns.
  std::vector<double> shared_operands;
  ReferenceOutput routed;  // `output` is not set
  std::vector<Job> jobs;
};

std::vector<double> logits_of(const LayerSpec& spec, const MoeWeights& weights,
                              const std::vector<double>& x) {
  check_matrix("router", weights.router, spec.num_experts, spec.hidden);
  const std::vector<double> router = decoded(weights.router);
  const auto num_tokens = static_cast<std::int64_t>(x.size()) / spec.hidden;
  std::vector<double> logits(static_cast<std::size_t>(num_tokens) * spec.num_experts);
  multiply(x.data(), num_tokens, router.data(), spec.num_experts, spec.hidden, logits.data(),
           spec.num_experts);
  if (spec.router_bias) {
    check_vector("router_bias", weights.router_bias, spec.num_experts);
    const std::vector<double> bias = decoded(weights.router_bias);
    for (std::size_t i = 0; i < logits.size(); ++i) logits[i] += bias[i % bias.size()];
  }
  return logits;
}

// Sets the activations as the gates of an FP8 layer see them, and the operands of its experts.
void quantise_activations(const LayerSpec& spec, const ReferenceInput& input, Plan& plan) {
  if (input.activations.dtype == DType::kF8E4M3) {
    if (plan.num_tokens > 0 && (input.topk_ids.empty() || spec.shared_sigmoid_gate)) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the activations are f8_e4m3, of which no gate can be computed; give topk_ids "
                  "and topk_weights, and no sigmoid-gated shared expert");
    }
    return;
  }
  std::vector<float> rows(plan.activations.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = round_to_bf16(static_cast<float>(plan.activations[i]));
  }
  plan.activations.assign(rows.begin(), rows.end());
  const auto quantised = [&](std::int64_t scale_columns) {
    std::vector<float> operands = rows;
    for (std::int64_t t = 0; t < plan.num_tokens; ++t) {
      quantise_row(&operands[static_cast<std::size_t>(t * spec.hidden)], spec.hidden,
                   scale_columns);
    }
    return std::vector<double>(operands.begin(), operands.end());
  };
  plan.operands = quantised(plan.scale_columns);
  if (spec.shared_intermediate > 0 && plan.scale_columns != kSharedScaleColumns) {
    plan.shared_operands = quantised(kSharedScaleColumns);
  }
}

std::vector<std::int32_t> hash_table_rows(const LayerSpec& spec, const MatrixView& table,
                                          std::span<const std::int32_t> token_ids) {
  if (table.empty() || table.cols != spec.top_k ||
      (table.dtype != DType::kI32 && table.dtype != DType::kI64)) {
    throw Error(ErrorCode::kShapeMismatch,
                fmt::format("hash_table is {} [{}, {}], expected i32 or i64 with {} columns",
                            to_string(table.dtype), table.rows, table.cols, spec.top_k));
  }
  std::vector<std::int32_t> ids;
  for (std::int32_t token_id : token_ids) {
    if (token_id < 0 || token_id >= table.rows) {
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("token id {} is outside the hash table's {} rows", token_id, table.rows));
    }
    for (int k = 0; k < spec.top_k; ++k) {
      const std::int64_t i = k * table.col_stride;
      const void* row = table.row(token_id);
      const std::int64_t id = table.dtype == DType::kI32 ? static_cast<const std::int32_t*>(row)[i]
                                                         : static_cast<const std::int64_t*>(row)[i];
      if (id < 0 || id >= spec.num_experts) {
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("the hash table has expert {} for token id {}; expert ids are 0 to "
                                "{}, check the model's token-id table",
                                id, token_id, spec.num_experts - 1));
      }
      ids.push_back(static_cast<std::int32_t>(id));
    }
  }
  return ids;
}

void route_into(const LayerSpec& spec, const MoeWeights& weights, const ReferenceInput& input,
                Plan& plan) {
  const auto num_tokens = static_cast<std::size_t>(plan.num_tokens);
  const std::size_t num_slots = num_tokens * static_cast<std::size_t>(spec.top_k);
  if (num_slots == 0 || !input.topk_ids.empty() || !input.topk_weights.empty()) {
    check_size("topk_ids", input.topk_ids.size(), num_slots);
    check_size("topk_weights", input.topk_weights.size(), num_slots);
    plan.routed.ids.assign(input.topk_ids.begin(), input.topk_ids.end());
    plan.routed.weights.assign(input.topk_weights.begin(), input.topk_weights.end());
  } else {
    std::vector<std::int32_t> hashed_ids;
    if (spec.routing.method == RoutingMethod::kHash) {
      check_size("token_ids", input.token_ids.size(), num_tokens);
      hashed_ids = hash_table_rows(spec, weights.hash_table, input.token_ids);
    }
    std::vector<float> correction_bias;
    if (spec.routing.has_correction_bias) {
      check_vector("correction_bias", weights.correction_bias, spec.num_experts);
      for (double bias : decoded(weights.correction_bias)) {
        correction_bias.push_back(static_cast<float>(bias));
      }
    }
    Routing routing =
        route(spec, logits_of(spec, weights, plan.activations), correction_bias, hashed_ids);
    plan.routed.ids = std::move(routing.ids);
    plan.routed.weights = std::move(routing.weights);
  }
}

// Fills the routed experts' jobs in token order, rank by rank, up to each expert's capacity.
void assign_slots(const LayerSpec& spec, const ReferenceInput& input, Plan& plan) {
  std::vector<std::int64_t> tokens_per_rank(input.tokens_per_rank.begin(),
                                            input.tokens_per_rank.end());
  if (tokens_per_rank.empty()) tokens_per_rank.push_back(plan.num_tokens);
  const std::int64_t held =
      std::accumulate(tokens_per_rank.begin(), tokens_per_rank.end(), std::int64_t{0});
  if (held != plan.num_tokens) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("tokens_per_rank adds up to {}, but there are {} tokens", held,
                            plan.num_tokens));
  }
  std::int64_t token = 0;
  for (std::int64_t rank_tokens : tokens_per_rank) {
    double capacity = std::numeric_limits<double>::infinity();
    if (spec.capacity_factor > 0) {
      const int per_token = spec.capacity_rule == CapacityRule::kTokens ? 1 : spec.top_k;
      // The factor that its decimals say, not the float that stands for them.
      const std::string decimals = fmt::format("{}", spec.capacity_factor);
      double factor = 0;
      std::from_chars(decimals.data(), decimals.data() + decimals.size(), factor);
      const double slots = factor * per_token * static_cast<double>(rank_tokens) / spec.num_experts;
      constexpr double kNoise = 1e-12;  // of the products
      capacity = std::ceil(slots - slots * kNoise);
    }
    std::vector<std::int64_t> used(static_cast<std::size_t>(spec.num_experts), 0);
    for (const std::int64_t end = token + rank_tokens; token < end; ++token) {
      for (int k = 0; k < spec.top_k; ++k) {
        const std::int64_t slot = token * spec.top_k + k;
        const std::int32_t id = plan.routed.ids[slot];
        if (id == kNoExpert) continue;
        if (id < 0 || id >= spec.num_experts) {
          throw Error(ErrorCode::kInvalidArgument,
                      fmt::format("topk_ids names expert {} for token {}, but experts are 0 to {}",
                                  id, token, spec.num_experts - 1));
        }
        if (static_cast<double>(used[id]) >= capacity) {
          ++plan.routed.num_dropped;
          continue;
        }
        ++used[id];
        plan.jobs[id].tokens.push_back(token);
        plan.jobs[id].token_weights.push_back(plan.routed.weights[slot]);
      }
    }
  }
}

Job shared_job(const LayerSpec& spec, const MoeWeights& weights, const Plan& plan) {
  Job job{"the shared expert", &weights.shared, spec.shared_intermediate, false, {}, {}};
  job.tokens.resize(static_cast<std::size_t>(plan.num_tokens));
  std::iota(job.tokens.begin(), job.tokens.end(), 0);
  job.token_weights.assign(job.tokens.size(), 1.0);
  job.shared = true;
  if (spec.shared_sigmoid_gate) {
    check_vector("shared_gate", weights.shared_gate, spec.hidden);
    const std::vector<double> gate = decoded(weights.shared_gate);
    std::vector<double> logits(job.tokens.size());
    multiply(plan.activations.data(), plan.num_tokens, gate.data(), 1, spec.hidden, logits.data(),
             1);
    for (std::size_t t = 0; t < logits.size(); ++t) {
      job.token_weights[t] = 1 / (1 + std::exp(-logits[t]));
    }
  }
  return job;
}

Plan make_plan(const LayerSpec& spec, const MoeWeights& weights, const ReferenceInput& input) {
  Plan plan;
  plan.num_tokens = input.activations.rows;
  check_matrix("activations", input.activations, plan.num_tokens, spec.hidden);
  plan.activations = decoded(input.activations);
  plan.quantised = input.quantised;
  plan.scale_columns = input.scale_columns;
  if (input.quantised) quantise_activations(spec, input, plan);
  check_size("weights.experts", weights.experts.size(), static_cast<std::size_t>(spec.num_experts));
  for (int e = 0; e < spec.num_experts; ++e) {
    plan.jobs.push_back({fmt::format("expert {}", e),
                         &weights.experts[e],
                         spec.intermediate,
                         spec.weight_on_input,
                         {},
                         {}});
  }
  route_into(spec, weights, input, plan);
  assign_slots(spec, input, plan);
  if (spec.shared_intermediate > 0) plan.jobs.push_back(shared_job(spec, weights, plan));
  std::erase_if(plan.jobs, [](const Job& job) { return job.tokens.empty(); });
  for (const Job& job : plan.jobs) {
    if (spec.activation.gated) {
      check_matrix(job.name + "'s gate", job.ffn->gate, job.intermediate, spec.hidden);
    }
    check_matrix(job.name + "'s up", job.ffn->up, job.intermediate, spec.hidden);
    check_matrix(job.name + "'s down", job.ffn->down, spec.hidden, job.intermediate);
  }
  return plan;
}

// Runs all jobs one after the other. Each job is spread over the threads by weight rows. A thread
// owns its columns of the output, so that sums have one order whatever the number of threads.
template <typename Precision>
class Runner {
 public:
  using Real = typename Precision::Real;

  Runner(const LayerSpec& spec, const Plan& plan)
      : spec_(spec),
        plan_(plan),
        output_(static_cast<std::size_t>(plan.num_tokens) * spec.hidden, Real{0}),
        num_threads_(choose_num_threads(spec, plan)),
        phase_end_(num_threads_) {
    for (const Job& job : plan.jobs) {
      biases_.push_back({decoded_bias(job.name + "'s gate_bias", job.ffn->gate_bias,
                                      spec.activation.gated ? job.intermediate : 0),
                         decoded_bias(job.name + "'s up_bias", job.ffn->up_bias, job.intermediate),
                         decoded_bias(job.name + "'s down_bias", job.ffn->down_bias, spec.hidden)});
      const auto rows = std::min(kMaxRows, static_cast<std::int64_t>(job.tokens.size()));
      x_.resize(std::max(x_.size(), static_cast<std::size_t>(rows * spec.hidden)));
      h_.resize(std::max(h_.size(), static_cast<std::size_t>(rows * job.intermediate)));
    }
  }

  std::vector<Real> run() {
    Threads threads(1, num_threads_, kThreadRemedy, [this](int i) { work(i); });
    work(0);
    threads.join();
    return std::move(output_);
  }

 private:
  // Tokens computed at a time, which bounds the memory for x and h.
  static constexpr std::int64_t kMaxRows = 1024;
  // Weight rows decoded at a time; 16 rows of doubles stay in a second-level cache.
  static constexpr std::int64_t kWeightRows = 16;

  struct Biases {
    std::vector<double> gate, up, down;
  };
  struct Range {
    std::int64_t begin, end;
  };
  // A thread's own buffers.
  struct Scratch {
    std::vector<double> decoded_row;
    std::vector<Real> gate_rows, up_rows, gate_out, up_out;
  };

  static int choose_num_threads(const LayerSpec& spec, const Plan& plan) {
    double products = 0;
    for (const Job& job : plan.jobs) {
      products += static_cast<double>(job.tokens.size()) * spec.hidden *
                  static_cast<double>(job.intermediate);
    }
    // Below a million products the work is shorter than starting a thread.
    if (products < 1e6) return 1;
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  }

  Range share_of(std::int64_t size, int thread_idx) const {
    return {size * thread_idx / num_threads_, size * (thread_idx + 1) / num_threads_};
  }

  void work(int thread_idx) {
    Scratch scratch;
    for (std::size_t j = 0; j < plan_.jobs.size(); ++j) {
      const Job& job = plan_.jobs[j];
      const auto num_tokens = static_cast<std::int64_t>(job.tokens.size());
      for (std::int64_t first = 0; first < num_tokens; first += kMaxRows) {
        const Range rows{first, std::min(first + kMaxRows, num_tokens)};
        gather(job, rows, share_of(rows.end - rows.begin, thread_idx));
        phase_end_.arrive_and_wait();
        up_projection(job, biases_[j], rows, share_of(job.intermediate, thread_idx), scratch);
        phase_end_.arrive_and_wait();
        if (plan_.quantised) {
          quantise_h(job, share_of(rows.end - rows.begin, thread_idx));
          phase_end_.arrive_and_wait();
        }
        down_projection(job, biases_[j], rows, share_of(spec_.hidden, thread_idx), scratch);
        phase_end_.arrive_and_wait();
      }
    }
  }

  void quantise_h(const Job& job, Range share) {
    for (std::int64_t row = share.begin; row < share.end; ++row) {
      quantise_row(&h_[static_cast<std::size_t>(row * job.intermediate)], job.intermediate,
                   job.shared ? kSharedScaleColumns : plan_.scale_columns);
    }
  }

  void gather(const Job& job, Range rows, Range share) {
    const std::vector<double>& x = job.shared && !plan_.shared_operands.empty()
                                       ? plan_.shared_operands
                                   : plan_.operands.empty() ? plan_.activations
                                                            : plan_.operands;
    for (std::int64_t row = share.begin; row < share.end; ++row) {
      const double* source = &x[job.tokens[rows.begin + row] * spec_.hidden];
      const double factor = job.weight_on_input ? job.token_weights[rows.begin + row] : 1.0;
      for (std::int64_t c = 0; c < spec_.hidden; ++c) {
        x_[row * spec_.hidden + c] = Precision::operand(Precision::operand(source[c]) * factor);
      }
    }
  }

  void decode_rows(const MatrixView& matrix, Range rows, Scratch& scratch, std::vector<Real>& out) {
    scratch.decoded_row.resize(static_cast<std::size_t>(matrix.cols));
    out.resize(static_cast<std::size_t>(kWeightRows * matrix.cols));
    for (std::int64_t r = rows.begin; r < rows.end; ++r) {
      decode_row(matrix, r, scratch.decoded_row.data());
      std::transform(scratch.decoded_row.begin(), scratch.decoded_row.end(),
                     out.begin() + (r - rows.begin) * matrix.cols, Precision::operand);
    }
  }

  void up_projection(const Job& job, const Biases& biases, Range rows, Range share,
                     Scratch& scratch) {
    const std::int64_t num_rows = rows.end - rows.begin;
    const bool gated = spec_.activation.gated;
    scratch.gate_out.resize(static_cast<std::size_t>(num_rows * kWeightRows));
    scratch.up_out.resize(static_cast<std::size_t>(num_rows * kWeightRows));
    for (std::int64_t i = share.begin; i < share.end; i += kWeightRows) {
      const Range block{i, std::min(i + kWeightRows, share.end)};
      const std::int64_t width = block.end - block.begin;
      if (gated) {
        decode_rows(job.ffn->gate, block, scratch, scratch.gate_rows);
        multiply(x_.data(), num_rows, scratch.gate_rows.data(), width, spec_.hidden,
                 scratch.gate_out.data(), kWeightRows);
      }
      decode_rows(job.ffn->up, block, scratch, scratch.up_rows);
      multiply(x_.data(), num_rows, scratch.up_rows.data(), width, spec_.hidden,
               scratch.up_out.data(), kWeightRows);
      for (std::int64_t row = 0; row < num_rows; ++row) {
        for (std::int64_t c = 0; c < width; ++c) {
          const std::int64_t from = row * kWeightRows + c;
          const Real gate =
              gated ? scratch.gate_out[from] + static_cast<Real>(biases.gate[i + c]) : Real{0};
          const Real up = scratch.up_out[from] + static_cast<Real>(biases.up[i + c]);
          h_[row * job.intermediate + i + c] =
              Precision::h(hidden_value(spec_.activation, gate, up));
        }
      }
    }
  }

  void down_projection(const Job& job, const Biases& biases, Range rows, Range share,
                       Scratch& scratch) {
    const std::int64_t num_rows = rows.end - rows.begin;
    scratch.up_out.resize(static_cast<std::size_t>(num_rows * kWeightRows));
    for (std::int64_t i = share.begin; i < share.end; i += kWeightRows) {
      const Range block{i, std::min(i + kWeightRows, share.end)};
      const std::int64_t width = block.end - block.begin;
      decode_rows(job.ffn->down, block, scratch, scratch.up_rows);
      multiply(h_.data(), num_rows, scratch.up_rows.data(), width, job.intermediate,
               scratch.up_out.data(), kWeightRows);
      for (std::int64_t row = 0; row < num_rows; ++row) {
        const std::int64_t token = job.tokens[rows.begin + row];
        const auto factor =
            static_cast<Real>(job.weight_on_input ? 1.0 : job.token_weights[rows.begin + row]);
        for (std::int64_t c = 0; c < width; ++c) {
          const Real y = Precision::result(scratch.up_out[row * kWeightRows + c] +
                                           static_cast<Real>(biases.down[i + c]));
          output_[token * spec_.hidden + i + c] += factor * y;
        }
      }
    }
  }

  const LayerSpec& spec_;
  const Plan& plan_;
  std::vector<Biases> biases_;  // of each job
  std::vector<Real> x_, h_;     // of the current job's current rows
  std::vector<Real> output_;
  int num_threads_;
  std::barrier<> phase_end_;
};

template <typename Actual>
double frobenius_error(std::span<const Actual> actual, std::span<const double> expected) {
  check_size("actual", actual.size(), expected.size());
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double d = static_cast<double>(actual[i]) - expected[i];
    difference += d * d;
    norm += expected[i] * expected[i];
  }
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

}  // namespace

std::vector<double> router_logits(const LayerSpec& spec, const MoeWeights& weights,
                                  const MatrixView& activations) {
  check_matrix("activations", activations, activations.rows, spec.hidden);
  return logits_of(spec, weights, decoded(activations));
}

ReferenceOutput forward(const LayerSpec& spec, const MoeWeights& weights,
                        const ReferenceInput& input) {
  Plan plan = make_plan(spec, weights, input);
  ReferenceOutput result = std::move(plan.routed);
  result.output = Runner<ExactPrecision>(spec, plan).run();
  return result;
}

std::vector<float> straightforward_bf16(const LayerSpec& spec, const MoeWeights& weights,
                                        const ReferenceInput& input) {
  const Plan plan = make_plan(spec, weights, input);
  std::vector<float> output = Runner<Bf16Precision>(spec, plan).run();
  for (float& value : output) value = round_to_bf16(value);
  return output;
}

std::vector<float> straightforward_fp8(const LayerSpec& spec, const MoeWeights& weights,
                                       const ReferenceInput& input) {
  ReferenceInput quantised = input;
  quantised.quantised = true;
  const Plan plan = make_plan(spec, weights, quantised);
  std::vector<float> output = Runner<Fp8Precision>(spec, plan).run();
  for (float& value : output) value = round_to_bf16(value);
  return output;
}

double relative_error(std::span<const float> actual, std::span<const double> expected) {
  return frobenius_error(actual, expected);
}

double relative_error(std::span<const double> actual, std::span<const double> expected) {
  return frobenius_error(actual, expected);
}

}  // namespace switchyard::reference
