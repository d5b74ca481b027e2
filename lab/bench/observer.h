// Receives what a suite measures.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "switchyard/error.h"

namespace switchyard::bench {

// A suite calls these functions one at a time.
template <typename Row>
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void measuring(std::uint64_t done_points, std::uint64_t all_points) = 0;
  virtual void measured(const Row& row) = 0;
  // Called when some points that belong together are done: the rows measured so far must be kept.
  virtual void keep(const std::vector<Row>& rows) = 0;
  // Called when a point is wrong or failed; the suite goes on.
  virtual void failed(const std::string& what, const std::string& problem) = 0;
  void failed_by(const std::string& what, const Error& error) {
    failed(what, std::string(to_string(error.code())) + ": " + error.what());
  }
};

}  // namespace switchyard::bench
