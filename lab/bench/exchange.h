// Times Exchange alone: dispatch and combine, each by itself, over ranks of this process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/observer.h"
#include "bench/run_note.h"
#include "results/exchange_row.h"
#include "switchyard/exchange.h"

namespace switchyard::bench {

struct ExchangePoint {
  int hidden = 0, experts = 0, top_k = 0;
  std::int64_t tokens = 0;  // of each rank
  DType dtype = DType::kBF16;

  bool operator==(const ExchangePoint&) const = default;
};

// The name of the suite, which is no plan of layers, and its points: DeepSeek-V3's routing.
inline constexpr const char* kExchangeSuite = "exchange";
std::vector<ExchangePoint> exchange_suite();

struct ExchangeBenchOptions : RunNote {
  // With kCuda ranks share the GPUs that there are, and a time is of a call among several in a
  // graph.
  Backend backend = Backend::kCpu;
  int ranks = 2;
  int repeat = 0;  // timed calls of a point; 0: by its size
  bool pre_sum = false;
};

using ExchangeObserver = Observer<results::ExchangeRow>;

class ExchangeSession {
 public:
  ExchangeSession(ExchangeBenchOptions options, ExchangeObserver& observer);

  const std::string& machine() const { return machine_; }
  // Measures the points, two rows each. Points that fail are left out.
  void run(const std::vector<ExchangePoint>& points);

 private:
  ExchangeBenchOptions options_;
  ExchangeObserver& observer_;
  std::string machine_;
};

}  // namespace switchyard::bench
