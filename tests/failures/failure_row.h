// A row of failure_trials: what came of the trials of one kind.
#pragma once

#include <fmt/core.h>

#include <cstdint>
#include <optional>
#include <string>

#include "results/row_file.h"

namespace switchyard::failures {

struct FailureRow {
  std::string suite = "failures", machine, commit, command;
  std::string kind;  // Trial::kind()
  // Trials, and those in which a rank did not name the victim, a message accused another rank, a
  // rank or the launcher was late, a rank hung, or the launcher's last line named another rank.
  std::int64_t trials = 0;
  double wrong = 0, innocents = 0, late = 0, hangs = 0, launcher = 0;
  double nobody_failed = 0;  // trials whose survivors had all they needed
  double first_seed = 0;
  std::int64_t deadline_ms = 0, slack_ms = 0, at_once_ms = 0;
  // Times from the harm until a survivor named the victim, and until the launcher ended.
  std::optional<double> named_us, named_longest_us, launcher_us, launcher_longest_us;

  static constexpr const char* kKind = "failure_trials";
  static constexpr const char* kRemedy = "give a file that 'failure_trials --json' wrote";

  template <typename RowType, typename Visitor>
  static void visit(RowType& row, Visitor&& field) {
    results::visit_head(row, field);
    field.text("kind", row.kind);
    field.count("trials", row.trials);
    field.amount("wrong", row.wrong);
    field.amount("innocents", row.innocents);
    field.amount("late", row.late);
    field.amount("hangs", row.hangs);
    field.amount("launcher", row.launcher);
    field.amount("nobody_failed", row.nobody_failed);
    field.amount("first_seed", row.first_seed);
    field.count("deadline_ms", row.deadline_ms);
    field.count("slack_ms", row.slack_ms);
    field.count("at_once_ms", row.at_once_ms);
    field.time("until_named_us", row.named_us);
    field.time("until_named_longest_us", row.named_longest_us);
    field.time("until_launcher_ended_us", row.launcher_us);
    field.time("until_launcher_ended_longest_us", row.launcher_longest_us);
  }
  std::string point() const { return fmt::format("{}: {}", suite, kind); }
};

}  // namespace switchyard::failures
