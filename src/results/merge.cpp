#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>

#include "base/posix.h"
#include "base/read_file.h"
#include "base/whole_file.h"
#include "results/list.h"
#include "results/row.h"

namespace switchyard::results {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRemedy =
    "give --json a file that 'switchyard bench --json' wrote, or one that does not exist yet";

// A row as the file has it, and its point. A row that is not replaced is written as it was.
struct KeptRow {
  Json json;
  std::string point;
  std::optional<Rival> rival;  // of layers
};

KeptRow kept_row(Json json, const Row& row) { return {std::move(json), point_of(row), row.rival}; }
template <typename RowType>  // the others, which have no rival
KeptRow kept_row(Json json, const RowType& row) {
  return {std::move(json), point_of(row), {}};
}

template <typename RowType>
std::vector<KeptRow> read_kept(const fs::path& file,
                               std::vector<RowType> (*rows_of_list)(const Json&, const std::string&,
                                                                    const char*)) {
  if (is_absent(file)) return {};
  const std::string source = file.string();
  Json list = parse(read_text(file, kMostFileBytes), source, kRemedy);
  const std::vector<RowType> rows = rows_of_list(list, source, kRemedy);
  std::vector<KeptRow> kept;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    kept.push_back(kept_row(std::move(list.elements()[i]), rows[i]));
  }
  return kept;
}

// Writes one row per line. So a diff of two versions of the file shows which points changed.
std::string text_of(const std::vector<KeptRow>& rows) {
  std::string text;
  for (const KeptRow& row : rows) {
    text += text.empty() ? "[\n" : ",\n";
    // dump() replaces what is not UTF-8, which may occur in a row's command line.
    text += row.json.dump();
  }
  return text.empty() ? "[]\n" : text + "\n]\n";
}

// A lock that one process holds at a time, as long as the object lives. It locks the directory: the
// file itself is replaced, and a separate lock file would stay behind. On a file system without
// locks, everything works except that processes do not wait for each other.
class DirectoryLock {
 public:
  explicit DirectoryLock(const fs::path& directory)
      : fd_(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    while (fd_ && ::flock(fd_.get(), LOCK_EX) != 0 && errno == EINTR) {
    }
  }

 private:
  UniqueFd fd_;
};

// Replaces the row of the same point, or appends.
void put_row(std::vector<KeptRow>& all, KeptRow row) {
  const auto same = std::find_if(all.begin(), all.end(),
                                 [&](const KeptRow& old) { return old.point == row.point; });
  if (same == all.end()) {
    all.push_back(std::move(row));
  } else {
    *same = std::move(row);
  }
}

template <typename RowType>
void merge(const fs::path& file, std::span<const RowType> rows,
           std::vector<RowType> (*rows_of_list)(const Json&, const std::string&, const char*)) {
  const DirectoryLock lock(fs::absolute(file).parent_path());
  std::vector<KeptRow> all = read_kept(file, rows_of_list);
  for (const RowType& row : rows) put_row(all, kept_row(to_json(row), row));
  write_whole(file, text_of(all));
}

std::optional<Rival> rival_of(const std::vector<KeptRow>& all, const std::string& point) {
  for (const KeptRow& row : all) {
    if (row.point == point) return row.rival;
  }
  return {};
}

}  // namespace

void require_mergeable(const fs::path& file) { read_kept(file, rows_of); }
void require_mergeable_grouped(const fs::path& file) { read_kept(file, grouped_rows_of); }
void require_mergeable_exchange(const fs::path& file) { read_kept(file, exchange_rows_of); }
void require_mergeable_hosts(const fs::path& file) { read_kept(file, hosts_rows_of); }
void require_mergeable_all_to_all(const fs::path& file) { read_kept(file, all_to_all_rows_of); }
void require_mergeable_late(const fs::path& file) { read_kept(file, late_rows_of); }
void require_mergeable_ramp(const fs::path& file) { read_kept(file, ramp_rows_of); }
void require_mergeable_regions(const fs::path& file) { read_kept(file, region_rows_of); }

void merge_rows(const fs::path& file, std::span<const Row> rows, bool keep_rival) {
  const DirectoryLock lock(fs::absolute(file).parent_path());
  std::vector<KeptRow> all = read_kept(file, rows_of);
  for (Row row : rows) {
    if (keep_rival && !row.rival) row.rival = rival_of(all, point_of(row));
    put_row(all, kept_row(to_json(row), row));
  }
  write_whole(file, text_of(all));
}

void merge_rows(const fs::path& file, std::span<const GroupedRow> rows) {
  merge(file, rows, grouped_rows_of);
}
void merge_rows(const fs::path& file, std::span<const RampRow> rows) {
  merge(file, rows, ramp_rows_of);
}
void merge_rows(const fs::path& file, std::span<const RegionRow> rows) {
  merge(file, rows, region_rows_of);
}

void merge_rows(const fs::path& file, std::span<const ExchangeRow> rows) {
  merge(file, rows, exchange_rows_of);
}
void merge_rows(const fs::path& file, std::span<const HostsRow> rows) {
  merge(file, rows, hosts_rows_of);
}
void merge_rows(const fs::path& file, std::span<const AllToAllRow> rows) {
  merge(file, rows, all_to_all_rows_of);
}
void merge_rows(const fs::path& file, std::span<const LateRow> rows) {
  merge(file, rows, late_rows_of);
}

}  // namespace switchyard::results
