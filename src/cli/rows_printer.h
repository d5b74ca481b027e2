// What the suites' observers have in common: progress, rows that are printed and kept, and points
// that failed.
#pragma once

#include <fmt/core.h>

#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "cli/progress.h"

namespace switchyard::cli {

// `Observer` is a suite's, which is told of rows of type `Row`.
template <typename Observer, typename Row>
class RowsPrinter : public Observer {
 public:
  // `json` is the file for the rows. If it is empty, they are only printed.
  explicit RowsPrinter(std::filesystem::path json) : json_(std::move(json)) {}

  bool failed_any() const { return failed_; }

  void measuring(std::uint64_t done, std::uint64_t all) override { progress_.update(done, all); }
  void measured(const Row& row) override {
    progress_.clear();
    print(row);
    std::fflush(stdout);
  }
  void keep(const std::vector<Row>& rows) override {
    if (!json_.empty()) results::merge_rows(json_, rows);
  }
  void failed(const std::string& what, const std::string& problem) override {
    failed_ = true;
    progress_.clear();
    std::fflush(stdout);
    std::fprintf(stderr, "switchyard: %s: %s\n", what.c_str(), problem.c_str());
  }

 protected:
  virtual void print(const Row& row) = 0;
  void clear_progress() { progress_.clear(); }

 private:
  std::filesystem::path json_;
  ProgressBar progress_{"measuring", true, Counted::kPoints};
  bool failed_ = false;
};

}  // namespace switchyard::cli
