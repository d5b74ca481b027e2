// Which bytes of a symmetric heap are allocated: offsets only, so that ranks that make the same
// calls come to the same answers.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace switchyard {

class Blocks {
 public:
  explicit Blocks(std::uint64_t bytes) : bytes_(bytes) {}

  // The lowest place for `bytes` bytes, or none. `bytes` is not 0, `alignment` a power of two.
  std::optional<std::uint64_t> allocate(std::uint64_t bytes, std::uint64_t alignment);
  // False if nothing was allocated there.
  bool free(std::uint64_t offset);
  void reset();

  std::uint64_t allocated() const { return allocated_; }
  std::uint64_t most_allocated() const { return most_; }
  std::uint64_t count() const { return used_.size(); }
  std::uint64_t largest_free() const;

 private:
  // Calls visit(begin, end) for the free ranges from the lowest on until it returns true.
  template <typename Visit>
  void visit_free(const Visit& visit) const;

  std::uint64_t bytes_, allocated_ = 0, most_ = 0;
  std::map<std::uint64_t, std::uint64_t> used_;  // offset and bytes
};

}  // namespace switchyard
