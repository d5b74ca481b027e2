#include "common/nearest.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

namespace switchyard {
namespace {

// Longer names are cut off, so that a megabyte of argument costs no quadratic time.
constexpr std::size_t kMostLetters = 64;

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::vector<std::string> nearest(std::string_view wanted, std::span<const std::string> names,
                                 std::size_t count) {
  std::vector<std::pair<std::size_t, std::string>> ranked;
  for (const std::string& name : names)
    ranked.emplace_back(edit_distance(wanted.substr(0, kMostLetters), name), name);
  std::sort(ranked.begin(), ranked.end());
  std::vector<std::string> result;
  for (std::size_t i = 0; i < std::min(count, ranked.size()); ++i)
    result.push_back(ranked[i].second);
  return result;
}

std::string likely_name(std::string_view wanted, std::span<const std::string> names) {
  for (const std::string& name : names)
    if (!wanted.empty() && wanted.size() > 3 && name.starts_with(wanted)) return name;  // cut short
  const std::vector<std::string> found = nearest(wanted, names, 1);
  if (found.empty()) return "";
  const std::size_t most = std::max<std::size_t>(2, wanted.size() / 3);
  return edit_distance(wanted.substr(0, kMostLetters), found.front()) <= most ? found.front() : "";
}

}  // namespace switchyard
