#include "models/generate.h"

#include <fmt/core.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "base/mix64.h"
#include "base/threads.h"
#include "common/host_memory.h"
#include "models/random_tensor.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

constexpr std::uint64_t kAlignment = 64;  // a cache line

std::uint64_t align_up(std::uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::uint64_t total_bytes(const std::vector<RandomTensor>& tensors) {
  std::uint64_t total = 0;
  for (const RandomTensor& tensor : tensors)
    total += align_up(tensor.data_bytes()) + align_up(tensor.scale_bytes());
  return total;
}

// Anonymous memory whose pages are committed when first touched.
std::shared_ptr<std::byte> allocate(std::uint64_t bytes) {
  const std::uint64_t available = host_memory().available;
  const char* remedy = "choose fewer experts, a smaller dtype or a smaller layer, or free memory";
  if (bytes > available)
    throw Error(ErrorCode::kCapacityExceeded,
                fmt::format("the layer's weights need {} bytes of memory, but {} are available; {}",
                            bytes, available, remedy));
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw Error(ErrorCode::kCapacityExceeded,
                fmt::format("mapping {} bytes for the layer's weights failed: {}; {}", bytes,
                            std::strerror(errno), remedy));
  // Huge pages cause fewer faults and TLB misses; the memory works without them, too.
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  return {static_cast<std::byte*>(memory), [bytes](std::byte* p) { ::munmap(p, bytes); }};
}

struct Placed {
  RandomTensor tensor;
  std::byte* data = nullptr;
  std::byte* scales = nullptr;
};

void fill_all(const std::vector<Placed>& placed, const GenerateOptions& options) {
  std::vector<std::int64_t> first_block = {0};  // of each tensor, in one numbering
  std::uint64_t total = 0;
  for (const Placed& p : placed) {
    first_block.push_back(first_block.back() + (p.tensor.size() + kFillBlock - 1) / kFillBlock);
    total += p.tensor.data_bytes();
  }
  std::atomic<std::int64_t> next{0};
  std::atomic<std::uint64_t> done{0};
  std::mutex progress_mutex;
  const auto work = [&] {
    for (std::int64_t block; (block = next.fetch_add(1)) < first_block.back();) {
      const auto after = std::upper_bound(first_block.begin(), first_block.end(), block);
      const Placed& p = placed[static_cast<std::size_t>(after - first_block.begin() - 1)];
      const std::int64_t local = block - *(after - 1);
      fill_block(p.tensor, local, p.data + bytes_of(p.tensor.dtype, local * kFillBlock));
      if (local == 0 && p.scales) fill_scales(p.tensor, p.scales);
      const std::int64_t count = std::min(kFillBlock, p.tensor.size() - local * kFillBlock);
      done.fetch_add(static_cast<std::uint64_t>(bytes_of(p.tensor.dtype, count)));
      // A busy mutex means that someone else is reporting about now.
      if (options.progress && block % 64 == 0 && progress_mutex.try_lock()) {
        const std::lock_guard<std::mutex> lock(progress_mutex, std::adopt_lock);
        options.progress(done.load(), total);
      }
    }
  };
  const int wanted = options.num_threads > 0
                         ? options.num_threads
                         : static_cast<int>(std::thread::hardware_concurrency());
  const std::int64_t useful =
      std::clamp<std::int64_t>(wanted, 1, std::max<std::int64_t>(first_block.back(), 1));
  Threads helpers(1, static_cast<int>(useful), kThreadRemedy, [&](int) { work(); });
  work();
  helpers.join();
  if (options.progress) options.progress(total, total);
}

MatrixView matrix_view(const Placed& p) {
  MatrixView view;
  view.data = p.data;
  view.dtype = p.tensor.dtype;
  view.rows = p.tensor.rows;
  view.cols = p.tensor.cols;
  view.row_stride = p.tensor.cols;
  if (p.scales) {
    view.scale = p.scales;
    view.scale_dtype = p.tensor.scale_dtype();
    view.scale_rows = p.tensor.block_rows();
    view.scale_cols = p.tensor.block_cols();
    view.scale_stride = p.tensor.scale_cols();
  }
  return view;
}

VectorView vector_view(const Placed& p) { return {p.data, p.tensor.dtype, p.tensor.cols, 1}; }

void attach(MoeWeights& weights, const Placed& p) {
  FfnWeights& expert = weights.experts[static_cast<std::size_t>(p.tensor.expert)];
  switch (p.tensor.role) {
    case TensorRole::kRouter: weights.router = matrix_view(p); break;
    case TensorRole::kRouterBias: weights.router_bias = vector_view(p); break;
    case TensorRole::kCorrectionBias: weights.correction_bias = vector_view(p); break;
    case TensorRole::kHashTable: weights.hash_table = matrix_view(p); break;
    case TensorRole::kGate: expert.gate = matrix_view(p); break;
    case TensorRole::kUp: expert.up = matrix_view(p); break;
    case TensorRole::kDown: expert.down = matrix_view(p); break;
    case TensorRole::kGateBias: expert.gate_bias = vector_view(p); break;
    case TensorRole::kUpBias: expert.up_bias = vector_view(p); break;
    case TensorRole::kDownBias: expert.down_bias = vector_view(p); break;
    case TensorRole::kSharedGate: weights.shared.gate = matrix_view(p); break;
    case TensorRole::kSharedUp: weights.shared.up = matrix_view(p); break;
    case TensorRole::kSharedDown: weights.shared.down = matrix_view(p); break;
    case TensorRole::kSharedSigmoidGate: weights.shared_gate = vector_view(p); break;
  }
}

}  // namespace

std::uint64_t generated_bytes(const LayerSpec& spec, DType dtype, std::int64_t vocabulary) {
  validate(spec);
  return total_bytes(layer_tensors(spec, dtype, 0, vocabulary));
}

std::uint64_t layer_seed(std::uint64_t seed, int layer) {
  return mix64(mix64(seed) + static_cast<std::uint64_t>(layer));
}

MoeWeights generate_weights(const LayerSpec& spec, DType dtype, std::uint64_t seed,
                            const GenerateOptions& options) {
  validate(spec);
  const std::vector<RandomTensor> tensors = layer_tensors(spec, dtype, seed, options.vocabulary);
  const std::shared_ptr<std::byte> memory = allocate(total_bytes(tensors));

  std::vector<Placed> placed;
  placed.reserve(tensors.size());
  std::byte* next = memory.get();
  for (const RandomTensor& tensor : tensors) {
    Placed p{tensor, next, nullptr};
    next += align_up(tensor.data_bytes());
    if (tensor.num_scales() > 0) p.scales = next;
    next += align_up(tensor.scale_bytes());
    placed.push_back(p);
  }
  fill_all(placed, options);

  MoeWeights weights;
  weights.experts.resize(static_cast<std::size_t>(spec.num_experts));
  for (const Placed& p : placed) attach(weights, p);
  weights.owner = memory;
  return weights;
}

}  // namespace switchyard
