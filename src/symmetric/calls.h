// The calls that shaped a rank's symmetric heap, which must be those of all other ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fabric/fabric.h"
#include "fabric/hash.h"

namespace switchyard {

struct HeapCall {
  enum class Kind : std::uint64_t { kNone, kAllocate, kFree, kReset };
  Kind kind = Kind::kNone;
  std::uint64_t bytes = 0;      // kAllocate
  std::uint64_t alignment = 0;  // kAllocate
  std::uint64_t offset = 0;     // what allocate() returned, or what was freed
  bool operator==(const HeapCall&) const = default;
};
std::string describe(const HeapCall& call);

class HeapCalls {
 public:
  // A record of all calls, which ranks can compare without sending it.
  struct Summary {
    std::uint64_t count = 0, hash = kFnvBasis;
    bool operator==(const Summary&) const = default;
  };

  void add(const HeapCall& call);
  const Summary& summary() const { return summary_; }

  // Collective, with the summaries of all ranks. Throws the same Error{kSpecMismatch} on all if
  // they differ, and otherwise begins anew.
  void check(Fabric& fabric, const std::vector<Summary>& all);

 private:
  // The most calls that are remembered since the last check. A heap is mostly laid out at the
  // start, and a program that allocates for ever without a check must not run out of memory for
  // that.
  static constexpr std::size_t kMostRemembered = 1 << 16;

  Summary summary_;
  std::uint64_t checked_ = 0;  // calls before the first that is remembered
  std::vector<HeapCall> remembered_;
};

}  // namespace switchyard
