// Measures all points of a plan one after the other, and the rival on the same points.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bench/floor.h"
#include "bench/measure.h"
#include "bench/observer.h"
#include "bench/run_note.h"
#include "bench/suite.h"
#include "bench/torch.h"
#include "results/row.h"

namespace switchyard::bench {

struct SessionOptions : RunNote {
  BenchPlan plan;
  MeasureOptions measure;
  std::optional<TorchOptions> torch;       // the rival, if one is wanted
  std::optional<machine::GpuFacts> facts;  // for kCuda: facts given for this run
  // Where files of the routing go, for rivals that are to have the same; empty: nowhere.
  std::filesystem::path routing;
};

// generating() may be called by another thread than the other functions.
class LayerObserver : public Observer<results::Row> {
 public:
  virtual void generating(const std::string& model, std::uint64_t done, std::uint64_t total) = 0;
  virtual void note(const std::string& text) = 0;
  virtual void rival_begins() = 0;
};

class Session {
 public:
  // Throws what choose_floor() throws.
  Session(SessionOptions options, LayerObserver& observer);
  ~Session();

  const std::string& machine() const { return machine_; }
  // The reason why rows have no floor. It is empty if they have one. It is also empty on the CPU,
  // for which no floors are defined.
  const std::string& why_no_floor() const { return floor_.why_not; }

  // Measures and returns the rows. Layers that fail are left out.
  std::vector<results::Row> run();

 private:
  void measure_layer(const BenchLayer& layer);
  results::Row row_of(const BenchLayer& layer, std::int64_t tokens, double beta,
                      const Measured& measured) const;
  std::map<std::size_t, TimedRival> run_rival();
  void add_rivals();

  SessionOptions options_;
  LayerObserver& observer_;
  std::string machine_;
  FloorChoice floor_;
  std::unique_ptr<TorchJob> job_;
  std::vector<results::Row> rows_;
};

}  // namespace switchyard::bench
