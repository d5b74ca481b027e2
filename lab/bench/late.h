// Times passes in which one rank, or every rank, comes late.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/observer.h"
#include "bench/run_note.h"
#include "results/late_row.h"
#include "switchyard/layer.h"

namespace switchyard::bench {

inline constexpr const char* kLateSuite = "late";

struct LateOptions : RunNote {
  // With kCuda ranks share the GPUs that there are.
  Backend backend = Backend::kCpu;
  int ranks = 2;
  std::vector<std::string> models;    // of the table; see late_suite()
  std::vector<std::int64_t> tokens;   // of each rank
  std::vector<std::int64_t> late_us;  // of the last rank, and at most of every rank
  DType dtype = DType::kBF16;         // of the weights; the layer computes in it
  int repeat = 0;                     // timed passes of a point; 0: 20
  std::optional<LayerSpec> spec;      // instead of the models', for tests
};

// The models, tokens and times that the suite has where the user gives none.
LateOptions late_suite(Backend backend);

using LateObserver = Observer<results::LateRow>;

class LateSession {
 public:
  // Throws Error{kUnsupported} if there is no GPU for kCuda.
  LateSession(LateOptions options, LateObserver& observer);

  const std::string& machine() const { return machine_; }
  // Measures the points. Those that fail are left out.
  void run();

 private:
  void measure(const std::string& model, const LayerSpec& spec);

  LateOptions options_;
  LateObserver& observer_;
  std::string machine_;
  std::uint64_t done_ = 0;
};

}  // namespace switchyard::bench
