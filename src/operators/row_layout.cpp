#include "operators/row_layout.h"

#include <fmt/core.h>

#include <algorithm>
#include <limits>

#include "base/limits.h"
#include "protocol/partition.h"
#include "switchyard/error.h"

namespace switchyard {

using Kind = RowLayout::Kind;

void check_layout(const char* name, const RowLayout& layout) {
  const auto refuse = [&](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("{} {}", name, message));
  };
  switch (layout.kind) {
    case Kind::kPacked:
      if (layout.size != 0) {
        refuse(fmt::format("is packed, but has size {}; leave it at 0, or use blocked or padded",
                           layout.size));
      }
      return;
    case Kind::kBlocked:
    case Kind::kPadded: {
      if (layout.size >= 1 && layout.size <= kMostRows) return;
      refuse(fmt::format("is {} with size {}; use 1 to {} rows",
                         layout.kind == Kind::kBlocked ? "blocked" : "padded", layout.size,
                         kMostRows));
    }
  }
  refuse(fmt::format("has kind {}; use packed, blocked or padded", static_cast<int>(layout.kind)));
}

std::int64_t rows_needed(const RowLayout& layout, int num_experts, std::int64_t rows) {
  check_layout("the layout", layout);
  require_within("num_experts", num_experts, 0, std::numeric_limits<std::int32_t>::max());
  require_within("the number of rows", rows, 0, kMostRows);
  std::int64_t needed = rows;
  if (layout.kind == Kind::kBlocked) {
    // The most gaps are in blocks of one row; no expert without rows has a block.
    needed = (rows + std::min<std::int64_t>(num_experts, rows) * (layout.size - 1)) / layout.size *
             layout.size;
  } else if (layout.kind == Kind::kPadded) {
    needed = num_experts * layout.size;
  }
  if (needed <= kMostRows) return needed;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} rows of {} experts may need {} rows in a layout of size {}; an i32 "
                          "numbers up to {}: use a layout with less padding, or fewer rows at a "
                          "time",
                          rows, num_experts, needed, layout.size, kMostRows));
}

std::vector<std::int64_t> first_rows(const RowLayout& layout, std::span<const std::int64_t> ends) {
  check_layout("the layout", layout);
  std::vector<std::int64_t> first{0};
  first.reserve(ends.size() + 1);
  std::int64_t before = 0;
  for (std::size_t e = 0; e < ends.size(); ++e) {
    const std::int64_t rows = ends[e] - before;
    if (rows < 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("ends[{}] is {}, and {} rows are before it; ends are running sums of "
                              "the experts' rows, which never decrease",
                              e, ends[e], before));
    }
    if (layout.kind == Kind::kPadded && rows > layout.size) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("expert {} has {} rows, and the padded layout room for {}; make its "
                              "size at least that, or use a packed or blocked one",
                              e, rows, layout.size));
    }
    require_within("the experts' rows together", ends[e], 0, kMostRows);
    before = ends[e];
    first.push_back(first.back() + (layout.kind == Kind::kPacked ? rows
                                    : layout.kind == Kind::kBlocked
                                        ? protocol::round_up(rows, layout.size)
                                        : layout.size));
  }
  return first;
}

}  // namespace switchyard
