// Kernels of the tests of exchanges: batches, whether they came right, and other work.
#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "switchyard/exchange.h"

namespace switchyard::testing {

struct SoakShape {
  int ranks, experts, top_k, hidden, max_tokens;
};

// The tokens of a rank in a call: often none, often the most, and otherwise few or any number.
SWITCHYARD_HOST_DEVICE inline std::uint32_t soak_hash(std::uint32_t a, std::uint32_t b,
                                                      std::uint32_t c) {
  std::uint32_t h = a * 0x9e3779b1u ^ b * 0x85ebca6bu ^ c * 0xc2b2ae35u;
  h ^= h >> 15;
  h *= 0x2c1b3c6du;
  h ^= h >> 12;
  h *= 0x297a2d39u;
  return h ^ h >> 15;
}
SWITCHYARD_HOST_DEVICE inline int soak_tokens(const SoakShape& shape, int rank,
                                              std::uint32_t call) {
  const std::uint32_t h = soak_hash(static_cast<std::uint32_t>(rank), call, 77);
  const auto most = static_cast<std::uint32_t>(shape.max_tokens);
  switch (h % 8) {
    case 0: return 0;
    case 1: return shape.max_tokens;
    case 2:
    case 3:
    case 4: return static_cast<int>((h >> 8) % 17);
    default: return static_cast<int>((h >> 8) % (most + 1));
  }
}

// A call, and the one whose ids it uses: itself, or the one before.
struct SoakCall {
  SoakShape shape;
  int rank;
  std::uint32_t call, ids_of;
};

struct SoakMemory {
  std::uint16_t* tokens;  // bf16
  std::int32_t* ids;
  float* weights;
  std::uint16_t* rows;
  std::int32_t *ends, *num_rows;
  RowOrigin* origins;
  float* row_weights;
  float* out;
};

struct SoakFindings {
  std::uint64_t rows, sums;              // that were looked at
  std::uint64_t wrong_rows, wrong_sums;  // and were wrong
  std::uint32_t first_wrong;             // 1 + the call; 0: none
};

// All enqueue; `stream` is a cudaStream_t.
void soak_fill(const SoakCall& call, const SoakMemory& memory, void* stream);
void soak_check_rows(const SoakCall& call, const SoakMemory& memory, SoakFindings* findings,
                     void* stream);
void soak_check_sums(const SoakCall& call, const SoakMemory& memory, SoakFindings* findings,
                     void* stream);
// Loads them all: that could wait for the device later.
void soak_load();

// A kernel that is busy until the gate is opened, or for ten seconds.
class Gate {
 public:
  Gate();
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void hold(void* stream) const;  // enqueues the kernel
  void open();

 private:
  std::uint32_t* word_ = nullptr;  // in memory that the host and devices share
};

}  // namespace switchyard::testing
