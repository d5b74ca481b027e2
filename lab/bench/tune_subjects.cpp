#include "bench/tune_subjects.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "base/convert.h"
#include "base/mix64.h"
#include "bench/activations.h"
#include "bench/grouped_operands.h"
#include "bench/measure.h"
#include "switchyard/error.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::bench {
namespace {

constexpr std::uint8_t kPoison = 0xff;  // NaN in every floating type
constexpr std::int64_t kSampledRows = 8;

// Memory of the backend.
class Buffer {
 public:
  Buffer(Backend backend, std::size_t bytes) {
    if (backend == Backend::kCuda) {
      device_.emplace(bytes);
    } else {
      host_.resize(bytes);
    }
  }
  Buffer(Backend backend, const void* data, std::size_t bytes) : Buffer(backend, bytes) {
    set(data, bytes);
  }

  std::byte* data() { return device_ ? device_->data() : host_.data(); }
  void set(const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    if (device_) {
      device_->upload(from, bytes);
    } else {
      std::memcpy(host_.data(), from, bytes);
    }
  }
  void poison(const gpu::Stream* stream) {
    if (device_) {
      device_->fill(kPoison, *stream);
    } else {
      std::fill(host_.begin(), host_.end(), std::byte{kPoison});
    }
  }
  void get(void* to, std::size_t bytes, std::size_t offset) const {
    if (device_) {
      device_->download(to, bytes, offset);
    } else {
      std::memcpy(to, host_.data() + offset, bytes);
    }
  }

 private:
  std::optional<gpu::DeviceBuffer> device_;
  std::vector<std::byte> host_;
};

// A copy of matrices in memory of the backend; on the CPU the operands themselves.
struct Matrices {
  std::optional<Buffer> weights, scales;
  GroupedOperands::Addresses at;

  Matrices(const GroupedOperands& operands, Backend backend) : at(operands.here()) {
    if (backend == Backend::kCpu) return;
    weights.emplace(backend, operands.weights.data(), operands.weights.size());
    scales.emplace(backend, operands.weight_scales.data(), operands.weight_scales.size());
    at.weights = weights->data();
    at.weight_scales = scales->data();
  }
};

float value_of(DType dtype, const std::byte* at) {
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t code = 0;
  std::memcpy(&code, at, sizeof code);
  return dtype == DType::kBF16 ? bf16_to_f32(code) : f16_to_f32(code);
}

std::vector<float> sample_rows(const Buffer& output, DType dtype, std::int64_t rows,
                               std::int64_t columns) {
  const std::size_t row_bytes = static_cast<std::size_t>(columns) * size_of(dtype);
  const std::int64_t count = std::min(rows, kSampledRows);
  std::vector<std::byte> row(row_bytes);
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t r = count == 1 ? 0 : i * (rows - 1) / (count - 1);
    output.get(row.data(), row_bytes, static_cast<std::size_t>(r) * row_bytes);
    for (std::size_t at = 0; at < row_bytes; at += size_of(dtype)) {
      values.push_back(value_of(dtype, &row[at]));
    }
  }
  return values;
}

std::uint64_t hit_experts(std::span<const std::int64_t> counts) {
  return static_cast<std::uint64_t>(
      std::count_if(counts.begin(), counts.end(), [](std::int64_t c) { return c > 0; }));
}

std::optional<gpu::Stream> stream_of(Backend backend) {
  if (backend == Backend::kCpu) return {};
  return gpu::Stream();
}

const gpu::Stream& require_stream(const std::optional<gpu::Stream>& stream) {
  if (stream) return *stream;
  throw Error(ErrorCode::kUnsupported, "the CPU has no stream; use Backend::kCuda");
}

class GroupedSubject : public TuneSubject {
 public:
  GroupedSubject(const TuneModel& model, const TuneOptions& options,
                 const std::vector<GroupedChoice>& choices)
      : backend_(options.backend),
        choices_(choices),
        most_rows_(std::int64_t{options.max_tokens} * model.model.top_k),
        operands_(model.model.num_experts, model.model.n, model.model.k, most_rows_, options.dtype,
                  options.seed),
        stream_(stream_of(backend_)),
        x_(backend_, operands_.x.data(), operands_.x.size()),
        x_scales_(backend_, operands_.x_scales.data(), operands_.x_scales.size() * sizeof(float)),
        ends_(backend_, static_cast<std::size_t>(operands_.experts) * sizeof(std::int32_t)),
        output_(backend_, static_cast<std::size_t>(most_rows_ * (operands_.n / 2)) *
                              size_of(operands_.output_dtype())) {}

  void set_counts(std::span<const std::int64_t> counts) override {
    gemms_.clear();
    std::vector<std::int32_t> ends;
    rows_ = 0;
    for (const std::int64_t count : counts) {
      ends.push_back(static_cast<std::int32_t>(rows_ += count));
    }
    ends_.set(ends.data(), ends.size() * sizeof(std::int32_t));
  }
  std::uint64_t touched_bytes(std::span<const std::int64_t> counts) const override {
    return hit_experts(counts) * operands_.matrix_bytes();
  }
  void choose(std::size_t configuration, int copies) override {
    gemms_.clear();
    while (matrices_.size() < static_cast<std::size_t>(copies)) {
      matrices_.push_back(std::make_unique<Matrices>(operands_, backend_));
    }
    GroupedGemmSpec spec;
    spec.num_experts = operands_.experts;
    spec.n = operands_.n;
    spec.k = operands_.k;
    spec.epilogue = Activation{ActivationKind::kSilu, true};
    GroupedGemmOptions options;
    options.backend = backend_;
    options.max_rows = static_cast<int>(most_rows_);
    options.schedule = choices_[configuration].schedule;
    options.num_threads = choices_[configuration].num_threads;
    for (int copy = 0; copy < copies; ++copy) {
      GroupedGemmWeights weights;
      weights.matrices = operands_.matrices(matrices_[static_cast<std::size_t>(copy)]->at);
      gemms_.push_back(std::make_unique<GroupedGemm>(spec, weights, options));
    }
  }
  void poison_output() override { output_.poison(stream_ ? &*stream_ : nullptr); }
  void run(int copy) override {
    GroupedInput input;
    input.x = operands_.first_rows(
        {nullptr, x_.data(), nullptr, reinterpret_cast<const float*>(x_scales_.data())}, rows_);
    input.ends = {ends_.data(), DType::kI32, static_cast<std::size_t>(operands_.experts)};
    if (stream_) input.stream = stream_->handle();
    GroupedOutput output;
    output.data = output_.data();
    output.dtype = operands_.output_dtype();
    output.rows = rows_;
    gemms_[static_cast<std::size_t>(copy)]->run(input, output);
  }
  const gpu::Stream& stream() const override { return require_stream(stream_); }
  std::vector<float> sample() override {
    if (stream_) stream_->synchronize();
    return sample_rows(output_, operands_.output_dtype(), rows_, operands_.n / 2);
  }

 private:
  Backend backend_;
  const std::vector<GroupedChoice>& choices_;
  std::int64_t most_rows_;
  GroupedOperands operands_;
  std::optional<gpu::Stream> stream_;
  Buffer x_, x_scales_, ends_, output_;
  std::vector<std::unique_ptr<Matrices>> matrices_;
  std::vector<std::unique_ptr<GroupedGemm>> gemms_;
  std::int64_t rows_ = 0;
};

class LayerSubject : public TuneSubject {
 public:
  LayerSubject(const TuneModel& model, const TuneOptions& options,
               const std::vector<LayerChoice>& choices)
      : backend_(options.backend),
        choices_(choices),
        spec_(model.spec),
        compute_(options.dtype),
        dtype_(activation_dtype(options.dtype)),
        max_tokens_(options.max_tokens),
        first_(spec_.num_experts, 2 * spec_.intermediate, spec_.hidden, 1, options.dtype,
               options.seed),
        second_(spec_.num_experts, spec_.hidden, spec_.intermediate, 1, options.dtype,
                options.seed + 1),
        stream_(stream_of(backend_)),
        x_(backend_, token_bytes(max_tokens_)),
        output_(backend_, token_bytes(max_tokens_)),
        ids_(backend_, slots(max_tokens_) * sizeof(std::int32_t)),
        weights_(backend_, slots(max_tokens_) * sizeof(float)) {
    const std::vector<std::byte> x =
        random_activations(dtype_, max_tokens_, spec_.hidden, mix64(options.seed ^ 0x7a9e));
    x_.set(x.data(), x.size());
    const std::vector<float> equal(slots(max_tokens_), 1.0f / static_cast<float>(spec_.top_k));
    weights_.set(equal.data(), equal.size() * sizeof(float));
  }

  void set_counts(std::span<const std::int64_t> counts) override {
    layers_.clear();
    const std::vector<std::int32_t> ids = ids_of(counts, spec_.top_k);
    tokens_ = static_cast<std::int64_t>(ids.size()) / spec_.top_k;
    ids_.set(ids.data(), ids.size() * sizeof(std::int32_t));
  }
  std::uint64_t touched_bytes(std::span<const std::int64_t> counts) const override {
    return hit_experts(counts) * (first_.matrix_bytes() + second_.matrix_bytes());
  }
  void choose(std::size_t configuration, int copies) override {
    layers_.clear();
    const LayerChoice& choice = choices_[configuration];
    if (choice.schedule.small_tokens.value_or(0) > 0 && !is_small()) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("the kernel for few tokens takes {} tokens and {} slots; use fewer",
                              kMostSmallTokens, kMostSmallSlots));
    }
    while (first_copies_.size() < static_cast<std::size_t>(copies)) {
      first_copies_.push_back(std::make_unique<Matrices>(first_, backend_));
      second_copies_.push_back(std::make_unique<Matrices>(second_, backend_));
    }
    for (int copy = 0; copy < copies; ++copy) {
      LayerOptions options;
      options.backend = backend_;
      options.max_tokens = static_cast<int>(max_tokens_);
      options.compute = compute_;
      options.cuda.schedule = choice.schedule;
      options.cpu.num_threads = choice.num_threads;
      layers_.push_back(std::make_unique<MoeLayer>(
          world_, spec_, weights_of(static_cast<std::size_t>(copy)), options));
    }
  }
  void poison_output() override { output_.poison(stream_ ? &*stream_ : nullptr); }
  void run(int copy) override {
    ForwardInput input;
    input.activations = {x_.data(), dtype_, tokens_, spec_.hidden, spec_.hidden};
    const std::size_t count = slots(tokens_);
    input.topk_ids = {ids_.data(), DType::kI32, count};
    input.topk_weights = {weights_.data(), DType::kF32, count};
    if (stream_) input.stream = stream_->handle();
    ForwardOutput output;
    output.data = output_.data();
    output.dtype = dtype_;
    layers_[static_cast<std::size_t>(copy)]->forward(input, output);
  }
  const gpu::Stream& stream() const override { return require_stream(stream_); }
  std::vector<float> sample() override {
    if (stream_) stream_->synchronize();
    for (const auto& layer : layers_) layer->check();
    return sample_rows(output_, dtype_, tokens_, spec_.hidden);
  }

 private:
  static constexpr std::int64_t kMostSmallSlots = 512;  // kMaxOwnSlots of src/gpu/route/limits.h

  bool is_small() const {
    return tokens_ <= kMostSmallTokens && tokens_ * spec_.top_k <= kMostSmallSlots;
  }
  std::size_t token_bytes(std::int64_t tokens) const {
    return static_cast<std::size_t>(tokens * spec_.hidden) * size_of(dtype_);
  }
  std::size_t slots(std::int64_t tokens) const {
    return static_cast<std::size_t>(tokens * spec_.top_k);
  }
  MoeWeights weights_of(std::size_t copy) const {
    const std::vector<MatrixView> first = first_.matrices(first_copies_[copy]->at);
    const std::vector<MatrixView> second = second_.matrices(second_copies_[copy]->at);
    MoeWeights weights;
    for (std::size_t e = 0; e < first.size(); ++e) {
      FfnWeights expert;
      expert.gate = expert.up = first[e];
      expert.gate.rows = expert.up.rows = spec_.intermediate;
      expert.up.data = first[e].row(spec_.intermediate);
      if (first[e].scale != nullptr) {
        expert.up.scale = first[e].row_scale(spec_.intermediate);
      }
      expert.down = second[e];
      weights.experts.push_back(expert);
    }
    return weights;
  }

  Backend backend_;
  const std::vector<LayerChoice>& choices_;
  LayerSpec spec_;
  DType compute_, dtype_;
  std::int64_t max_tokens_;
  GroupedOperands first_, second_;
  World world_ = World::single();
  std::optional<gpu::Stream> stream_;
  Buffer x_, output_, ids_, weights_;
  std::vector<std::unique_ptr<Matrices>> first_copies_, second_copies_;
  std::vector<std::unique_ptr<MoeLayer>> layers_;
  std::int64_t tokens_ = 0;
};

}  // namespace

std::unique_ptr<TuneSubject> make_grouped_subject(const TuneModel& model,
                                                  const TuneOptions& options,
                                                  const std::vector<GroupedChoice>& choices) {
  return std::make_unique<GroupedSubject>(model, options, choices);
}

std::unique_ptr<TuneSubject> make_layer_subject(const TuneModel& model, const TuneOptions& options,
                                                const std::vector<LayerChoice>& choices) {
  // Gate and up are halves of one matrix here, whose blocks of scales must not be shared.
  if (options.dtype == DType::kF8E4M3 && model.spec.intermediate % 128 != 0) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("the model {} has an intermediate size of {}; in fp8 layers are tuned "
                            "with multiples of 128",
                            model.model.name, model.spec.intermediate));
  }
  return std::make_unique<LayerSubject>(model, options, choices);
}

}  // namespace switchyard::bench
