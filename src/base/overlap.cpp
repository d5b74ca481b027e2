#include "base/overlap.h"

#include <fmt/core.h>

#include "switchyard/error.h"

namespace switchyard {

bool CallArray::piece_shares_bytes(const CallArray& piece) const {
  if (piece.begin_ <= begin_) return true;
  const auto stride = static_cast<std::uintptr_t>(stride_),
             row = static_cast<std::uintptr_t>(row_bytes_);
  const std::uintptr_t in_row = (piece.begin_ - begin_) % stride;
  return in_row < row || in_row + (piece.end_ - piece.begin_) > stride;
}

bool CallArray::shares_bytes(const CallArray& other) const {
  if (!other.has_gaps()) return !has_gaps() || piece_shares_bytes(other);
  if (!has_gaps()) return other.piece_shares_bytes(*this);
  if (stride_ != other.stride_) return true;
  const CallArray& low = begin_ <= other.begin_ ? *this : other;
  const CallArray& high = begin_ <= other.begin_ ? other : *this;
  const auto stride = static_cast<std::uintptr_t>(stride_);
  const std::uintptr_t in_row = (high.begin_ - low.begin_) % stride;
  return in_row < static_cast<std::uintptr_t>(low.row_bytes_) ||
         in_row + static_cast<std::uintptr_t>(high.row_bytes_) > stride;
}

void require_apart(std::initializer_list<CallArray> outputs,
                   std::initializer_list<CallArray> inputs) {
  const auto refuse = [](const std::string& message) {
    throw Error(ErrorCode::kInvalidArgument, message);
  };
  for (const CallArray* out = outputs.begin(); out != outputs.end(); ++out) {
    if (out->rows_ == 0) continue;
    if (out->overlaps_itself()) [[unlikely]] {
      refuse(
          fmt::format("{}'s rows overlap each other: they have {} bytes and begin {} bytes "
                      "apart; pass memory for each row",
                      out->name_, out->row_bytes_, out->stride_));
    }
    for (const CallArray& in : inputs) {
      if (!out->meets(in)) [[likely]] {
        continue;
      }
      if (!out->shares_bytes(in)) continue;
      refuse(fmt::format("{0} overlaps {1}, which the call reads; pass memory of its own for {0}",
                         out->name_, in.name_));
    }
    for (const CallArray* other = out + 1; other != outputs.end(); ++other) {
      if (!out->meets(*other)) [[likely]] {
        continue;
      }
      if (!out->shares_bytes(*other)) continue;
      refuse(
          fmt::format("{} overlaps {}, and the call writes both; pass memory of its own for each",
                      out->name_, other->name_));
    }
  }
}

}  // namespace switchyard
