#include "results/visitors.h"

#include <fmt/core.h>

#include <cmath>
#include <utility>

#include "results/all_to_all_row.h"
#include "results/chain_row.h"
#include "results/exchange_row.h"
#include "results/grouped_row.h"
#include "results/hosts_row.h"
#include "results/late_row.h"
#include "results/ramp_row.h"
#include "results/row.h"

namespace switchyard::results {
namespace {

double rounded(double value, int digits) {
  const double scale = std::pow(10.0, digits);
  return std::round(value * scale) / scale;
}
// Events resolve half a microsecond or worse; more digits only make the files longer.
double hundredths(double value) { return rounded(value, 2); }

// Fields that only one kind of rows has. (Rows of hosts have the stage of an exchange, too.)
struct Mark {
  const char *field, *kind;
};
constexpr Mark kMarks[] = {
    {"rows_per_expert", GroupedRow::kKind},
    {"link_bytes", HostsRow::kKind},
    {"stage", ExchangeRow::kKind},
    {"rung", AllToAllRow::kKind},
    {"late_us", LateRow::kKind},
    {"early_launch", ChainRow::kKind},
    {"exhaustive_us", RampRow::kKind},
    {"prediction", RegionRow::kKind},
    {"intermediate", Row::kKind},
};

}  // namespace

void refuse_other_files(const Json& file, const std::string& source, std::string_view kind,
                        const char* remedy) {
  constexpr const char* kTraceRemedy = "give it with --trace, beside files of rows";
  if (file.contains("traceEvents")) refuse_file(source, "is a trace", kTraceRemedy);
  if (const Json* const told = file.find("file"); told != nullptr && told->is_string()) {
    if (told->text() == "switchyard profile") {
      refuse_file(source, "is a tuner's profile", "give it to 'switchyard report' with --profile");
    }
  }
  if (file.contains("benchmarks")) {
    refuse_file(source, "is a result of Google Benchmark, which has other rows", remedy);
  }
  if (!file.is_array()) {
    refuse_file(source, fmt::format("is not a list of rows, but {}", excerpt(file)), remedy);
  }
  if (file.elements().empty()) return;
  const Json& first = file.elements().front();
  if (first.contains("ph")) refuse_file(source, "is a trace", kTraceRemedy);
  if (first.contains("time_us") && first.contains("source")) {
    refuse_file(source, "lists what others publish",
                "give it to 'switchyard report' with --published");
  }
  for (const Mark& mark : kMarks) {
    if (!first.contains(mark.field)) continue;
    if (mark.kind == kind) return;
    refuse_file(source, fmt::format("has rows of {}, not of {}", mark.kind, kind), remedy);
  }
}

Remedies remedies_of(const char* other) {
  return {other, "give files that 'switchyard bench --json' wrote, or measure the point again",
          "measure the point again with 'switchyard bench --json'"};
}

void require_ordered(const FieldReader& read, double p10_us, double median_us, double p90_us) {
  if (p10_us > median_us) read.refuse("p10_us", fmt::format("at most the median, {}", median_us));
  if (p90_us < median_us) read.refuse("p90_us", fmt::format("at least the median, {}", median_us));
}

void FieldWriter::put(const char* field, Json value) { json_[field] = std::move(value); }
void FieldWriter::share(const char* field, const std::optional<double>& value) {
  put(field, value ? Json(rounded(*value, 4)) : Json());
}
void FieldWriter::ratio(const char* field, double value) { put(field, rounded(value, 4)); }
void FieldWriter::time(const char* field, double value) { put(field, hundredths(value)); }
void FieldWriter::time(const char* field, const std::optional<double>& value) {
  put(field, value ? Json(hundredths(*value)) : Json());
}
void FieldWriter::quantiles(const char* field, const std::vector<double>& values) {
  put(field, nullptr);
  for (const double value : values) json_[field].push_back(rounded(value, 3));
}
void FieldWriter::rival(const std::optional<Rival>& rival) {
  put(kRivalFields[0], rival ? Json(rival->name) : Json());
  time(kRivalFields[1], rival ? std::optional(rival->median_us) : std::nullopt);
  time(kRivalFields[2], rival ? rival->p10_us : std::nullopt);
  time(kRivalFields[3], rival ? rival->p90_us : std::nullopt);
}
void FieldWriter::times(const char* field, const std::vector<double>& values) {
  for (const double value : values) json_[field].push_back(hundredths(value));
}

}  // namespace switchyard::results
