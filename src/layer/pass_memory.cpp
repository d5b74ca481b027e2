#include "layer/pass_memory.h"

#include <fmt/core.h>

#include <atomic>
#include <cstddef>

#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "switchyard/error.h"

namespace switchyard {

std::uint64_t agree_on_memory(Fabric& fabric, const PassMemory* given) {
  static std::atomic<std::uint64_t> count{0};
  const std::vector<std::uint64_t> ids =
      gather(fabric, given != nullptr ? given->id() << 1 | 1 : ++count << 1);
  for (std::size_t r = 1; r < ids.size(); ++r) {
    if ((ids[0] & 1) == (ids[r] & 1) && (ids[0] == ids[r] || (ids[0] & 1) == 0)) continue;
    throw Error(ErrorCode::kSpecMismatch,
                fmt::format("rank 0 and rank {} do not work in the same memory; give workspace and "
                            "workspace_slot alike on all ranks",
                            r));
  }
  return ids[0] >> 1;
}

void require_restored(const PassMemory& memory) {
  if (!memory.released()) return;
  throw Error(ErrorCode::kInvalidArgument,
              "the layer's workspace was released; call restore() on all ranks before a pass");
}

void throw_given_up() {
  throw Error(ErrorCode::kAborted,
              "a pass was given up in the workspace, which is the end of its layers; make it and "
              "them anew");
}

void throw_no_room(std::uint64_t needed, std::uint64_t there) {
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format(
          "the layer does not fit into the memory that it is given{}; make the workspace for "
          "the largest layer (its experts and their places, too), max_tokens, num_threads "
          "and compute type",
          needed > there
              ? fmt::format(": it needs {} bytes, laid out for its sizes, of {}", needed, there)
              : ", which is laid out for other sizes"));
}

}  // namespace switchyard
