#include "results/row_file.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>

#include "base/posix.h"
#include "base/read_file.h"
#include "base/whole_file.h"

namespace switchyard::results {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRemedy =
    "give --json a file that 'switchyard bench --json' wrote, or one that does not exist yet";

// A row that is not replaced is written as it was.
std::vector<NewRow> read_kept(const fs::path& file, PointsOf points_of) {
  if (is_absent(file)) return {};
  const std::string source = file.string();
  Json list = parse(read_text(file, kMostFileBytes), source, kRemedy);
  const std::vector<std::string> points = points_of(list, source, kRemedy);
  std::vector<NewRow> kept;
  for (std::size_t i = 0; i < points.size(); ++i) {
    kept.push_back({std::move(list.elements()[i]), points[i]});
  }
  return kept;
}

// Writes one row per line. So a diff of two versions of the file shows which points changed.
std::string text_of(const std::vector<NewRow>& rows) {
  std::string text;
  for (const NewRow& row : rows) {
    text += text.empty() ? "[\n" : ",\n";
    // dump() replaces what is not UTF-8, which may occur in a row's command line.
    text += row.json.dump();
  }
  return text.empty() ? "[]\n" : text + "\n]\n";
}

void keep_rival(const Json& old, Json& row) {
  const Json* const rival = row.find("rival");
  if (rival == nullptr || !rival->is_null()) return;
  for (const char* const field : kRivalFields) {
    if (const Json* const value = old.find(field)) row[field] = *value;
  }
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

}  // namespace

std::string card_of(std::string_view machine) {
  const std::size_t times = machine.find(" x ");
  const bool several =
      times != std::string_view::npos &&
      machine.substr(0, times).find_first_not_of("0123456789") == std::string_view::npos;
  if (several) machine.remove_prefix(times + 3);
  return std::string(machine.substr(0, machine.find(',')));
}

void require_mergeable(const fs::path& file, PointsOf points_of) { read_kept(file, points_of); }

void merge_new(const fs::path& file, std::vector<NewRow> rows, PointsOf points_of) {
  const DirectoryLock lock(fs::absolute(file).parent_path());
  std::vector<NewRow> all = read_kept(file, points_of);
  for (NewRow& row : rows) {
    const auto same = std::find_if(all.begin(), all.end(),
                                   [&](const NewRow& old) { return old.point == row.point; });
    if (same == all.end()) {
      all.push_back(std::move(row));
      continue;
    }
    if (row.keeps_rival) keep_rival(same->json, row.json);
    *same = std::move(row);
  }
  write_whole(file, text_of(all));
}

}  // namespace switchyard::results
