// SymmetricHeap: who has which bytes, whether ranks agree, and how a heap that died says so.
#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/interrupt.h"
#include "base/limits.h"
#include "base/origin.h"
#include "base/posix.h"
#include "fabric/agreement.h"
#include "fabric/collective.h"
#include "fabric/fabric.h"
#include "layer/failure.h"
#include "switchyard/error.h"
#include "switchyard/peer.h"
#include "switchyard/symmetric_heap.h"
#include "symmetric/blocks.h"
#include "symmetric/calls.h"
#include "symmetric/memory.h"

namespace switchyard {
namespace {

constexpr const char* kName = "the symmetric heap";

static_assert(PeerControl::kCalledOff == protocol::kCalledOff && kMaxPeers == protocol::kMaxRanks);
static_assert(SymmetricHeap::kMostAlignment <= PeerControl::kBytes,
              "memory behind the control is as aligned as the control");

std::unique_ptr<HeapMemory> make_memory(const World& world, std::size_t bytes,
                                        const SymmetricHeapOptions& options,
                                        std::chrono::milliseconds deadline) {
  attempt_together(world.fabric(), [&] {
    if (bytes == 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  "a symmetric heap of 0 bytes was asked for; ask for at least 1");
    }
    require_device(options.device);
    if (options.backend != Backend::kCpu && options.backend != Backend::kCuda) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("backend is {}; use Backend::kCpu or Backend::kCuda",
                              static_cast<int>(options.backend)));
    }
    if (options.backend == Backend::kCpu && options.device >= 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("device is {}, but the heap's backend is cpu; leave it at -1",
                              options.device));
    }
    if (world.size() > kMaxPeers) {
      throw Error(ErrorCode::kUnsupported,
                  fmt::format("the world has {} ranks; a symmetric heap has up to {}", world.size(),
                              kMaxPeers));
    }
  });
  agree(world.fabric(), {{"backend", to_string(options.backend)}, {"bytes", bytes}},
        "give every rank the same symmetric heap");
  // An overflow asks for all there could be, and is refused as such.
  const std::size_t all =
      bytes > ~std::size_t{0} - PeerControl::kBytes ? bytes : bytes + PeerControl::kBytes;
  if (options.backend == Backend::kCpu) return cpu::make_heap_memory(world, all);
  return gpu::make_heap_memory(world, all, options.device, deadline);
}

}  // namespace

class SymmetricHeap::State {
 public:
  State(const World& of, std::size_t size, const SymmetricHeapOptions& options)
      : world(of),
        bytes(size),
        backend(options.backend),
        deadline(options.deadline.count() == 0 ? of.deadline()
                                               : checked_deadline(options.deadline)),
        memory(make_memory(of, size, options, deadline)),
        blocks(size) {
    map.rank = world.rank();
    map.size = world.size();
    map.bytes = bytes;
    map.deadline_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(deadline).count());
    for (int r = 0; r < map.size; ++r) map.bases[r] = memory->start(r) + PeerControl::kBytes;
    abort_hook.emplace(world.fabric(), [this] { memory->raise(world.fabric().abort_word()); });
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // Offset of a pointer in this rank's memory, or at its end.
  std::uint64_t offset_of(const void* pointer) const {
    const auto offset = reinterpret_cast<std::uintptr_t>(pointer) -
                        reinterpret_cast<std::uintptr_t>(map.bases[map.rank]);
    if (offset <= bytes) return offset;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is not in this rank's memory of the symmetric heap, {} bytes from "
                            "{} on; pass what allocate() returned on this rank",
                            pointer, bytes, static_cast<const void*>(map.bases[map.rank])));
  }
  std::byte* base(int rank) const {
    if (rank >= 0 && rank < map.size) return map.bases[rank];
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("rank {} of {} was asked for; ranks are numbered from 0 to {}", rank,
                            map.size, map.size - 1));
  }

  // Waits as host::wait_until() does, and shows in the world's record that it waits. A rank that is
  // gone is not waited for. `culprit` receives the rank to blame where the deadline passes.
  PeerWait wait(const std::uint64_t* flag, std::uint64_t value, int peer, int& culprit) const;
  [[noreturn]] void fail(std::uint64_t abort) const;
  [[noreturn]] void fail(const PeerControl::Failure& seen) const;

  const Origin origin;
  World world;
  std::size_t bytes;
  Backend backend;
  std::chrono::milliseconds deadline;
  std::unique_ptr<HeapMemory> memory;
  PeerMap map{};
  Blocks blocks;
  HeapCalls calls;
  std::optional<Fabric::AbortHook> abort_hook;  // last: it uses the memory
};

PeerWait SymmetricHeap::State::wait(const std::uint64_t* flag, std::uint64_t value, int peer,
                                    int& culprit) const {
  culprit = peer;
  using std::chrono::nanoseconds;
  constexpr auto kBeat =
      static_cast<std::uint64_t>(nanoseconds(protocol::WorldRecord::kBeat).count());
  const protocol::WorldView& view = world.fabric().view();
  const protocol::EndOfWait end_of_wait(view.record.get());
  std::uint64_t waited = 0;
  bool gone = false;
  for (;;) {
    const std::uint64_t left = map.deadline_ns - waited;
    PeerWait outcome =
        host::wait_until(map, flag, value, peer, Until::kAtLeast, gone ? 0 : std::min(kBeat, left));
    waited += outcome.waited_ns;
    if (outcome.state != PeerWait::State::kTimeout) return outcome;
    if (gone || waited >= map.deadline_ns) {
      const auto found = view.culprit(peer, nanoseconds(map.deadline_ns));
      if (found && found->rank != map.rank) culprit = found->rank;
      outcome.waited_ns = waited;
      return outcome;
    }
    // The hook raises the words of all ranks, and then the next wait ends.
    if (interrupted()) world.fabric().abort(AbortCause::kInterrupted);
    if (!view.record) continue;
    view.record->show({protocol::Phase::kSignal, view.name(peer), 0, peer == map.rank});
    view.record->look();
    // Its last stores may be seen only now, so the flag is looked at once more.
    gone = peer != map.rank && view.record->is_gone(view.name(peer));
  }
}

// Why the heap died, by an abort word that is not 0.
void SymmetricHeap::State::fail(std::uint64_t abort) const {
  const int rank = static_cast<int>(abort & (PeerControl::kCalledOff - 1)) - 1;
  if ((abort & PeerControl::kCalledOff) != 0) {
    throw_called_off(rank, cause_of(abort), "symmetric heap");
  }
  fail(memory->control(rank).failure);
}
void SymmetricHeap::State::fail(const PeerControl::Failure& seen) const {
  WaitFailure failure;
  failure.waiter_rank = seen.waiter;
  failure.peer_rank = seen.peer;
  failure.phase = "signal";
  failure.slot = seen.flag;
  failure.expected = seen.expected;
  failure.observed = seen.seen;
  failure.waited_seconds = static_cast<double>(seen.waited_ns) * 1e-9;
  const auto awaited = seen.awaited == 0 ? seen.peer : static_cast<int>(seen.awaited) - 1;
  std::string message =
      awaited == seen.peer
          ? fmt::format("rank {} did not raise the flag at offset {} of rank {}'s symmetric heap",
                        seen.peer, seen.flag, seen.waiter)
          : fmt::format(
                "rank {} did not go on: rank {} waits for it, and therefore did not raise "
                "the flag at offset {} of rank {}'s symmetric heap",
                seen.peer, awaited, seen.flag, seen.waiter);
  message += fmt::format(": rank {} waited {:.3f} s for {}, and saw {}", seen.waiter,
                         failure.waited_seconds, seen.expected, seen.seen);
  const Fabric& fabric = world.fabric();
  if (const std::string known = fabric.liveness(seen.peer); !known.empty()) {
    message += "; " + known;
  }
  message += "; this symmetric heap cannot be used any more, make a new one on every rank";
  const TimeoutError error(seen.waiter == map.rank ? ErrorCode::kTimeout : ErrorCode::kAborted,
                           message, failure);
  fabric.report(error);
  throw error;
}

SymmetricHeap::SymmetricHeap(const World& world, std::size_t bytes,
                             const SymmetricHeapOptions& options)
    : state_(std::make_unique<State>(world, bytes, options)) {}
SymmetricHeap::~SymmetricHeap() { leave_inherited(state_); }
SymmetricHeap::SymmetricHeap(SymmetricHeap&&) noexcept = default;
SymmetricHeap& SymmetricHeap::operator=(SymmetricHeap&& other) noexcept {
  leave_inherited(state_);
  state_ = std::move(other.state_);
  return *this;
}

SymmetricHeap::State& SymmetricHeap::state() const { return held_here(state_, kName); }

void* SymmetricHeap::allocate(std::size_t bytes, std::size_t alignment) {
  if (!std::has_single_bit(alignment) || alignment > kMostAlignment) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("an alignment of {} bytes was asked for; use a power of two up to {}",
                            alignment, kMostAlignment));
  }
  const std::optional<std::uint64_t> offset =
      state().blocks.allocate(bytes == 0 ? 1 : bytes, alignment);
  if (!offset) {
    throw Error(ErrorCode::kCapacityExceeded,
                fmt::format("{} bytes at a multiple of {} were asked for, and the symmetric heap "
                            "of {} bytes has {} in one piece; make a larger heap, or free some of "
                            "it",
                            bytes, alignment, state().bytes, state().blocks.largest_free()));
  }
  state().calls.add({HeapCall::Kind::kAllocate, bytes, alignment, *offset});
  return state().map.bases[state().map.rank] + *offset;
}

void SymmetricHeap::free(void* pointer) {
  if (pointer == nullptr) return;
  const std::uint64_t offset = state().offset_of(pointer);
  if (!state().blocks.free(offset)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("nothing is allocated at offset {} of the symmetric heap; pass what "
                            "allocate() returned, once",
                            offset));
  }
  state().calls.add({HeapCall::Kind::kFree, 0, 0, offset});
}

void SymmetricHeap::reset() {
  state().blocks.reset();
  state().calls.add({HeapCall::Kind::kReset, 0, 0, 0});
}

void* SymmetricHeap::translate(const void* pointer, int rank) const {
  std::byte* const base = state().base(rank);
  return base + state().offset_of(pointer);
}
std::byte* SymmetricHeap::base(int rank) const { return state().base(rank); }
PeerMap SymmetricHeap::peer_map() const { return state().map; }

void SymmetricHeap::wait(const std::uint64_t* flag, std::uint64_t value, int peer) {
  if (state().backend != Backend::kCpu) {
    throw Error(ErrorCode::kUnsupported,
                "wait() is for heaps of CPU memory; on a GPU a kernel waits, with "
                "device::wait_until()");
  }
  (void)state().base(peer);
  const std::uint64_t offset = state().offset_of(flag);
  if (offset % sizeof *flag != 0 || offset + sizeof *flag > state().bytes) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the flag is at offset {} of the symmetric heap's {} bytes; it must be "
                            "at a multiple of 8, and all of it in the heap",
                            offset, state().bytes));
  }
  int culprit = -1;
  const PeerWait outcome = state().wait(flag, value, peer, culprit);
  if (outcome) return;
  host::give_up(state().map, outcome, culprit);
  // Another thread of this rank may be about to raise the word.
  for (int i = 0; i < 1000; ++i) {
    check();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  state().fail({state().map.rank, outcome.rank, outcome.flag, outcome.expected, outcome.seen,
                outcome.waited_ns, 0});
}

void SymmetricHeap::check() const {
  const State& state = this->state();
  if (const std::uint64_t abort = state.memory->control(state.map.rank).abort; abort != 0) {
    state.fail(abort);
  }
}

void SymmetricHeap::barrier() {
  State& state = this->state();
  struct Arrival {
    HeapCalls::Summary calls;
    std::uint64_t abort;
  };
  // A rank whose heap is dead comes, too: the others would wait for it until their deadlines.
  const Arrival mine{state.calls.summary(), state.memory->control(state.map.rank).abort};
  const std::vector<Arrival> all = gather(state.world.fabric(), mine);
  std::vector<HeapCalls::Summary> calls;
  for (const Arrival& arrival : all) {
    if (arrival.abort != 0) state.fail(arrival.abort);
    calls.push_back(arrival.calls);
  }
  state.calls.check(state.world.fabric(), calls);
}

SymmetricHeapStats SymmetricHeap::stats() const {
  const Blocks& blocks = state().blocks;
  return {state().bytes,
          state().memory->reserved(),
          blocks.allocated(),
          blocks.most_allocated(),
          blocks.largest_free(),
          blocks.count(),
          state().calls.summary().count};
}
std::size_t SymmetricHeap::bytes() const { return held(state_, kName).bytes; }
Backend SymmetricHeap::backend() const { return held(state_, kName).backend; }
int SymmetricHeap::device() const { return held(state_, kName).memory->device(); }
const World& SymmetricHeap::world() const { return held(state_, kName).world; }

}  // namespace switchyard
