#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <stdexcept>

#include "gpu/exchange_soak_kernels.h"
#include "gpu/ptx/clock.cuh"

namespace switchyard::testing {
namespace {

constexpr unsigned kBlocks = 16, kThreads = 256;

// A whole number of bf16, different in neighbouring calls, tokens, ranks and columns.
__device__ float element_of(std::uint32_t call, int rank, std::uint32_t token,
                            std::uint32_t column) {
  const std::uint32_t sum = call * 29 + static_cast<std::uint32_t>(rank) * 101 + token * 7 + column;
  return static_cast<float>(sum % 251);
}

// The expert of a slot, or -1. A token's experts are distinct: the number of experts is a power of
// two, and the step odd.
__device__ std::int32_t expert_of(const SoakCall& call, int rank, std::uint32_t token, int k) {
  const std::uint32_t h = soak_hash(static_cast<std::uint32_t>(rank), call.ids_of, token);
  if ((h >> 24) % 16 == static_cast<std::uint32_t>(k)) return -1;
  const std::uint32_t step = (h >> 10) | 1;
  return static_cast<std::int32_t>((h + static_cast<std::uint32_t>(k) * step) %
                                   static_cast<std::uint32_t>(call.shape.experts));
}
__device__ float weight_of(int k) { return static_cast<float>(k + 1); }

__global__ void fill(const SoakCall call, const SoakMemory memory) {
  const int tokens = soak_tokens(call.shape, call.rank, call.ids_of);
  const unsigned first = blockIdx.x * kThreads + threadIdx.x, stride = kBlocks * kThreads;
  const auto hidden = static_cast<unsigned>(call.shape.hidden);
  const auto top_k = static_cast<unsigned>(call.shape.top_k);
  for (unsigned i = first; i < static_cast<unsigned>(tokens) * hidden; i += stride) {
    const float value = element_of(call.call, call.rank, i / hidden, i % hidden);
    memory.tokens[i] = __bfloat16_as_ushort(__float2bfloat16(value));
  }
  for (unsigned i = first; i < static_cast<unsigned>(tokens) * top_k; i += stride) {
    const int k = static_cast<int>(i % top_k);
    memory.ids[i] = expert_of(call, call.rank, i / top_k, k);
    memory.weights[i] = weight_of(k);
  }
}

__device__ void report(SoakFindings* findings, std::uint32_t call, bool rows, bool wrong) {
  atomicAdd(reinterpret_cast<unsigned long long*>(rows ? &findings->rows : &findings->sums), 1ull);
  if (!wrong) return;
  atomicAdd(
      reinterpret_cast<unsigned long long*>(rows ? &findings->wrong_rows : &findings->wrong_sums),
      1ull);
  atomicCAS(&findings->first_wrong, 0u, call + 1);
}

// Four columns of a row, others in each call: the first and the last are always among them.
__device__ std::uint32_t column_of(const SoakCall& call, std::uint32_t row, int i) {
  const auto hidden = static_cast<std::uint32_t>(call.shape.hidden);
  return i == 0 ? 0 : i == 1 ? hidden - 1 : soak_hash(call.call, row, i) % hidden;
}

// Rows are packed: an expert's are in the order of ranks and tokens.
__global__ void check_rows(const SoakCall call, const SoakMemory memory, SoakFindings* findings) {
  const int own = call.shape.experts / call.shape.ranks, begin = own * call.rank;
  const int rows = *memory.num_rows;
  for (int row = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); row < rows;
       row += static_cast<int>(kBlocks * kThreads)) {
    const RowOrigin from = memory.origins[row];
    bool wrong = from.rank < 0 || from.rank >= call.shape.ranks || from.token < 0 || from.k < 0 ||
                 from.k >= call.shape.top_k;
    wrong = wrong || from.token >= soak_tokens(call.shape, from.rank, call.ids_of);
    if (!wrong) {
      const auto token = static_cast<std::uint32_t>(from.token);
      const int expert = expert_of(call, from.rank, token, from.k) - begin;
      wrong = expert < 0 || expert >= own;
      const int first = wrong || expert == 0 ? 0 : memory.ends[expert - 1];
      wrong = wrong || row < first || row >= memory.ends[expert];
      if (!wrong && row > first) {
        const RowOrigin before = memory.origins[row - 1];
        wrong = before.rank > from.rank || (before.rank == from.rank && before.token >= from.token);
      }
      wrong = wrong || memory.row_weights[row] != weight_of(from.k);
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t column = column_of(call, static_cast<std::uint32_t>(row), i);
        const std::uint16_t bits =
            memory.rows[static_cast<std::size_t>(row) * call.shape.hidden + column];
        wrong = wrong || __bfloat162float(__ushort_as_bfloat16(bits)) !=
                             element_of(call.call, from.rank, token, column);
      }
    }
    report(findings, call.call, true, wrong);
  }
  // With as many rows as there should be, all different, none is missing.
  if (blockIdx.x != 0) return;
  __shared__ int expected;
  if (threadIdx.x == 0) expected = 0;
  __syncthreads();
  for (int rank = 0; rank < call.shape.ranks; ++rank) {
    const int slots = soak_tokens(call.shape, rank, call.ids_of) * call.shape.top_k;
    for (int i = static_cast<int>(threadIdx.x); i < slots; i += static_cast<int>(kThreads)) {
      const int expert = expert_of(call, rank, static_cast<std::uint32_t>(i / call.shape.top_k),
                                   i % call.shape.top_k) -
                         begin;
      if (expert >= 0 && expert < own) atomicAdd(&expected, 1);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) report(findings, call.call, true, expected != rows);
}

// Experts return what they get.
__global__ void check_sums(const SoakCall call, const SoakMemory memory, SoakFindings* findings) {
  const int tokens = soak_tokens(call.shape, call.rank, call.ids_of);
  for (int t = static_cast<int>(blockIdx.x * kThreads + threadIdx.x); t < tokens;
       t += static_cast<int>(kBlocks * kThreads)) {
    const auto token = static_cast<std::uint32_t>(t);
    float weights = 0;
    for (int k = 0; k < call.shape.top_k; ++k) {
      if (expert_of(call, call.rank, token, k) >= 0) weights += weight_of(k);
    }
    bool wrong = false;
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t column = column_of(call, token, i);
      wrong = wrong || memory.out[static_cast<std::size_t>(t) * call.shape.hidden + column] !=
                           weights * element_of(call.call, call.rank, token, column);
    }
    report(findings, call.call, false, wrong);
  }
}

__global__ void wait_for(const volatile std::uint32_t* word) {
  const std::uint64_t begin = gpu::device_now_ns();
  while (*word == 0 && gpu::device_now_ns() - begin < 10'000'000'000ull) __nanosleep(1000);
}

void require(cudaError_t result) {
  if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
}

}  // namespace

void soak_fill(const SoakCall& call, const SoakMemory& memory, void* stream) {
  fill<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(call, memory);
  require(cudaGetLastError());
}
void soak_check_rows(const SoakCall& call, const SoakMemory& memory, SoakFindings* findings,
                     void* stream) {
  check_rows<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(call, memory, findings);
  require(cudaGetLastError());
}
void soak_check_sums(const SoakCall& call, const SoakMemory& memory, SoakFindings* findings,
                     void* stream) {
  check_sums<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(call, memory, findings);
  require(cudaGetLastError());
}

void soak_load() {
  cudaFuncAttributes facts;
  require(cudaFuncGetAttributes(&facts, fill));
  require(cudaFuncGetAttributes(&facts, check_rows));
  require(cudaFuncGetAttributes(&facts, check_sums));
}

Gate::Gate() {
  require(cudaHostAlloc(&word_, sizeof *word_, cudaHostAllocMapped | cudaHostAllocPortable));
  *word_ = 0;
}
Gate::~Gate() { cudaFreeHost(word_); }
void Gate::hold(void* stream) const {
  wait_for<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(word_);
  require(cudaGetLastError());
}
void Gate::open() { *static_cast<volatile std::uint32_t*>(word_) = 1; }

}  // namespace switchyard::testing
