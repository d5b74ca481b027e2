#include "symmetric/blocks.h"

#include <algorithm>

namespace switchyard {

template <typename Visit>
void Blocks::visit_free(const Visit& visit) const {
  std::uint64_t begin = 0;
  for (const auto& [offset, bytes] : used_) {
    if (offset > begin && visit(begin, offset)) return;
    begin = offset + bytes;
  }
  if (begin < bytes_) visit(begin, bytes_);
}

std::optional<std::uint64_t> Blocks::allocate(std::uint64_t bytes, std::uint64_t alignment) {
  std::optional<std::uint64_t> found;
  visit_free([&](std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t past = begin & (alignment - 1);
    const std::uint64_t gap = past == 0 ? 0 : alignment - past;
    if (gap > end - begin || bytes > end - begin - gap) return false;
    found = begin + gap;
    return true;
  });
  if (!found) return found;
  used_.emplace(*found, bytes);
  allocated_ += bytes;
  most_ = std::max(most_, allocated_);
  return found;
}

bool Blocks::free(std::uint64_t offset) {
  const auto block = used_.find(offset);
  if (block == used_.end()) return false;
  allocated_ -= block->second;
  used_.erase(block);
  return true;
}

void Blocks::reset() {
  used_.clear();
  allocated_ = 0;
}

std::uint64_t Blocks::largest_free() const {
  std::uint64_t largest = 0;
  visit_free([&](std::uint64_t begin, std::uint64_t end) {
    largest = std::max(largest, end - begin);
    return false;
  });
  return largest;
}

}  // namespace switchyard
