#include "symmetric/calls.h"

#include <fmt/core.h>

#include <algorithm>
#include <string_view>
#include <type_traits>

#include "switchyard/error.h"

namespace switchyard {

static_assert(std::is_trivially_copyable_v<HeapCall> &&
                  std::has_unique_object_representations_v<HeapCall>,
              "calls are hashed, and travel, as their bytes");

std::string describe(const HeapCall& call) {
  switch (call.kind) {
    case HeapCall::Kind::kNone: return "nothing more";
    case HeapCall::Kind::kAllocate:
      return fmt::format("allocate({} bytes, alignment {}), which is at offset {}", call.bytes,
                         call.alignment, call.offset);
    case HeapCall::Kind::kFree: return fmt::format("free(offset {})", call.offset);
    case HeapCall::Kind::kReset: return "reset()";
  }
  return "an unknown call";
}

void HeapCalls::add(const HeapCall& call) {
  ++summary_.count;
  summary_.hash =
      fnv1a(summary_.hash, std::string_view(reinterpret_cast<const char*>(&call), sizeof call));
  if (remembered_.size() < kMostRemembered) remembered_.push_back(call);
}

void HeapCalls::check(Fabric& fabric, const std::vector<Summary>& all) {
  const auto other = std::find_if(all.begin(), all.end(),
                                  [&](const Summary& theirs) { return theirs != all.front(); });
  if (other == all.end()) {
    checked_ = summary_.count;
    remembered_.clear();
    return;
  }
  const auto rank = static_cast<std::size_t>(other - all.begin());
  // All ranks come here, with the same lengths, since all have the same summaries.
  std::uint64_t longest = 0;
  for (const Summary& theirs : all) longest = std::max(longest, theirs.count - checked_);
  std::vector<HeapCall> mine = remembered_;
  mine.resize(std::min<std::uint64_t>(longest, kMostRemembered));
  const std::vector<HeapCall> calls = gather_all(fabric, std::span<const HeapCall>(mine));
  const std::size_t length = mine.size();
  for (std::size_t i = 0; i < length; ++i) {
    const HeapCall &first = calls[i], &theirs = calls[rank * length + i];
    if (first == theirs) continue;
    throw Error(
        ErrorCode::kSpecMismatch,
        fmt::format("the ranks disagree on call {} of the symmetric heap: rank 0 called {}, rank "
                    "{} called {}; allocate and free the same on all ranks in the same order",
                    checked_ + i + 1, describe(first), rank, describe(theirs)));
  }
  throw Error(ErrorCode::kSpecMismatch,
              fmt::format("the ranks disagree on the calls of the symmetric heap: rank 0 made {}, "
                          "rank {} made {}, and the first {} since the last barrier() are the "
                          "same; allocate and free the same on all ranks in the same order",
                          all.front().count, rank, other->count, length));
}

}  // namespace switchyard
