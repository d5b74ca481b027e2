// Times passes in which one rank, or every rank, comes late.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "results/late_row.h"
#include "switchyard/layer.h"

namespace switchyard::bench {

inline constexpr const char* kLateSuite = "late";

struct LateOptions {
  // With kCuda ranks share the GPUs that there are.
  Backend backend = Backend::kCpu;
  int ranks = 2;
  std::vector<std::string> models;    // of the table; see late_suite()
  std::vector<std::int64_t> tokens;   // of each rank
  std::vector<std::int64_t> late_us;  // of the last rank, and at most of every rank
  DType dtype = DType::kBF16;         // of the weights; the layer computes in it
  int repeat = 0;                     // timed passes of a point; 0: 20
  std::uint64_t seed = 0;             // of everything random
  std::optional<LayerSpec> spec;      // instead of the models', for tests
  std::string commit, command;        // to note in the rows
};

// The models, tokens and times that the suite has where the user gives none.
LateOptions late_suite(Backend backend);

// Receives the progress of a session, one call at a time.
class LateObserver {
 public:
  virtual ~LateObserver() = default;
  virtual void measuring(std::uint64_t done_points, std::uint64_t all_points) = 0;
  virtual void measured(const results::LateRow& row) = 0;
  // Called when a model's points are done: the rows must be kept.
  virtual void keep(const std::vector<results::LateRow>& rows) = 0;
  // Called when a point is wrong or failed; the session goes on.
  virtual void failed(const std::string& what, const std::string& problem) = 0;
};

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
