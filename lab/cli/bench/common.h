// Options, printing and keeping of rows, which the subcommands of `switchyard bench` share.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/join.h"
#include "bench/observer.h"
#include "bench/run_note.h"
#include "cli/arguments.h"
#include "cli/output_file.h"
#include "cli/progress.h"
#include "results/row_file.h"

namespace switchyard::cli {

[[noreturn]] void refuse(const std::string& message);

struct CommonOptions : bench::RunNote {
  std::optional<Backend> backend;
  int repeat = 0;  // 0: the suite's
  bool quick = false;
  std::string json;

  explicit CommonOptions(const std::string& typed)
      : RunNote{.commit = "unknown", .command = typed} {}
  int repeat_or(int quick_repeat) const { return quick && repeat == 0 ? quick_repeat : repeat; }
  // Where the rows go, or an empty path. Refuses a file that rows of this type cannot join, before
  // anything is measured.
  template <typename Row>
  std::filesystem::path rows_file() const {
    if (json.empty()) return {};
    std::filesystem::path file = output_file("--json", json);
    results::require_mergeable<Row>(file);
    return file;
  }
  // Where ranks are threads of this process, on the CPU unless CUDA is asked for. Refuses CUDA
  // where there is no GPU.
  Backend backend_of_ranks(const char* suite) const;
};

// Passes of --quick.
int quick_repeats(bool on_cpu);

// Leaves those of `all` that were asked for; without any, all. Refuses others.
template <typename T>
void keep_named(std::vector<T>& all, const std::vector<T>& wanted, const std::string& option,
                const std::string& suite) {
  if (wanted.empty()) return;
  for (const T& value : wanted) {
    if (std::find(all.begin(), all.end(), value) != all.end()) continue;
    refuse(fmt::format("{} has {}, which is not in the suite {}; it has {}", option, value, suite,
                       join(all, ", ")));
  }
  all = wanted;
}

// Adds --hidden, --experts and --top-k.
void add_routing_options(Command& command, int& hidden, int& experts, int& top_k);
void require_top_k(int top_k, int experts);

// Adds --graph, --no-graph, --cold and --machine-facts.
void add_gpu_timing_options(Command& command, bool& only_graph, bool& no_graph, bool& cold,
                            std::string& machine_facts);
// Refuses options that only --backend cuda has. They would change nothing on the CPU, but the rows'
// command would name them.
void require_no_gpu_options(const Command& command, bool backend_given,
                            std::initializer_list<const char*> options);

// Adds --backend, --repeat, --quick and --seed under the heading "Measurement", and --json and
// --commit under "Report".
void add_common_options(Command& command, CommonOptions& options, const char* quick_help,
                        bool with_seed = true);

// Prints the line about the machine, why there is no floor (if it is not empty), and the heading of
// the table.
void print_head(const std::string& about, const std::string& why_no_floor,
                const std::string& heading);

// Prints a suite's rows, keeps them in a file, and shows its progress.
template <typename SuiteObserver, typename Row>
class RowsPrinter : public SuiteObserver {
 public:
  using Print = void (*)(const Row&);
  // `json` is the file for the rows. If it is empty, they are only printed.
  RowsPrinter(std::filesystem::path json, Print print, bool keep_rival = false)
      : json_(std::move(json)), print_(print), keep_rival_(keep_rival) {}

  int exit_code() const { return failed_ ? kExitVerification : kExitOk; }

  void measuring(std::uint64_t done, std::uint64_t all) override { progress_.update(done, all); }
  void measured(const Row& row) override {
    progress_.clear();
    print_(row);
    std::fflush(stdout);
  }
  void keep(const std::vector<Row>& rows) override {
    if (!json_.empty()) results::merge_rows(json_, rows, keep_rival_);
  }
  void failed(const std::string& what, const std::string& problem) override {
    failed_ = true;
    tell(what + ": " + problem);
  }

 protected:
  void tell(const std::string& text) {
    clear_progress();
    std::fflush(stdout);
    std::fprintf(stderr, "switchyard: %s\n", text.c_str());
  }
  void clear_progress() { progress_.clear(); }

 private:
  std::filesystem::path json_;
  Print print_;
  bool keep_rival_;
  ProgressBar progress_{"measuring", true, Counted::kPoints};
  bool failed_ = false;
};

// The suites. Each function adds one to `bench`. `typed` is the command line for the rows.
void add_layers(Command& bench, const std::string& typed);
void add_grouped(Command& bench, const std::string& typed);
void add_exchange(Command& bench, const std::string& typed);
void add_hosts(Command& bench, const std::string& typed);
void add_all_to_all(Command& bench, const std::string& typed);
void add_chain(Command& bench, const std::string& typed);
void add_late(Command& bench, const std::string& typed);

}  // namespace switchyard::cli
