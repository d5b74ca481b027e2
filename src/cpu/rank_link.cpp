#include "cpu/rank_link.h"

#include <thread>
#include <utility>

#include "base/interrupt.h"
#include "layer/failure.h"

namespace switchyard::cpu {

using protocol::Missing;
using protocol::Phase;

RankLink::RankLink(const World& world, std::shared_ptr<const SymmetricSegment> segment,
                   const protocol::ExpertPartition& experts, const protocol::HostSums& sums,
                   std::chrono::nanoseconds deadline, const char* what)
    : world_(world),
      view_(world.fabric().view()),
      segment_(std::move(segment)),
      remote_(segment_->remote()),
      sums_(sums),
      deadline_ns_(static_cast<std::uint64_t>(deadline.count())),
      what_(what) {
  heaps_.experts = experts;
  heaps_.rank = world.rank();
  if (remote_ != nullptr) heaps_.arbiter = remote_->arbiter();
  for (int r = 0; r < num_ranks(); ++r) {
    heaps_.base[r] = segment_->base(r);
    const bool mapped = remote_ == nullptr || remote_->reaches(r);
    if (mapped) mapped_ |= std::uint64_t{1} << r;
    via_[static_cast<std::size_t>(r)] = mapped ? r : remote_->gateway_to(r);
  }
  abort_hook_.emplace(world_.fabric(), [heaps = heaps_, &fabric = world_.fabric()] {
    const std::uint64_t word = fabric.abort_word();
    for (int r = 0; r < heaps.size(); ++r) {
      // All ranks are told the failure that ended the world first.
      protocol::compare_exchange(&heaps.control(r)->abort, std::uint64_t{0}, word);
    }
  });
}

void RankLink::record(int threads, std::size_t trace_events) {
  traces_.reserve(static_cast<std::size_t>(threads));
  for (int i = 0; i < threads; ++i) traces_.emplace_back(i, trace_events);
  trace_bytes_ = traces_.size() * trace_events * sizeof(TraceEvent);
}

void RankLink::start_threads(int threads, std::function<void()> enter) {
  pool_ = std::make_unique<WorkerPool>(threads, std::move(enter));
}

void RankLink::in_parallel(std::uint64_t epoch, const std::function<void(int)>& body, bool alone) {
  if (view_.record) view_.record->go_on();
  const auto on_thread = [&](int thread) {
    try {
      body(thread);
    } catch (...) {
      const std::lock_guard lock(exception_mutex_);
      if (exception_) return;
      exception_ = std::current_exception();
      // The rank cannot do its part: the others need not wait for their deadlines to learn it.
      protocol::abort_world(heaps_, {rank(), rank(), Phase::kExperts, epoch, 0, 0, 0, 0, rank()});
    }
  };
  if (alone) {
    on_thread(0);
  } else {
    pool_->run(on_thread, [this] { heed_interrupts(); });
  }
  if (exception_) std::rethrow_exception(exception_);
}

PassTrace RankLink::trace(std::uint64_t epoch) const {
  PassTrace trace;
  trace.rank = rank();
  trace.num_ranks = num_ranks();
  trace.epoch = epoch;
  for (const ThreadTrace& thread : traces_) {
    trace.dropped += thread.dropped();
    trace.events.insert(trace.events.end(), thread.events().begin(), thread.events().end());
  }
  return trace;
}

void RankLink::heed_interrupts() const {
  // Raises the abort words, which end all waits of all ranks.
  if (interrupted()) world_.fabric().abort(AbortCause::kInterrupted);
}

void RankLink::await_abort() const {
  for (int i = 0; i < 1000 && !aborted(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void RankLink::fail() const {
  await_abort();  // Another thread of this rank may be about to raise the word.
  std::uint64_t abort = protocol::load_acquire(&heaps_.control(rank())->abort);
  if (abort == 0) abort = static_cast<std::uint64_t>(rank()) + 1;
  throw_abort(
      world_, abort, [&](int failed) { return heaps_.control(failed)->failure; }, what_);
}

void RankLink::give_up(const protocol::FailureRecord& record) const {
  if (HostPace(view_, remote_).propose(record)) await_abort();  // Somebody raises the word soon.
  if (!aborted()) protocol::abort_world(heaps_, record);
}

void RankLink::send(network::Lane lane, std::uint64_t epoch, int host, network::RecordKind kind,
                    std::span<const network::Target> targets, const void* from,
                    std::size_t bytes) const {
  std::size_t done = 0;
  while (!remote_->append(lane, host, kind, targets, from, bytes, done)) {
    // Credits need nothing but the other proxy. A process that has stopped gives none, and then
    // this rank need not say why: everybody sees that it is silent.
    const protocol::WaitResult result = wait(
        epoch, false, [&] { return remote_->may_append(lane, host); },
        [&] {
          return Missing{lane == network::Lane::kDispatch ? Phase::kDispatch : Phase::kCombine,
                         remote_->hosts().gateway(rank(), host), static_cast<std::uint64_t>(host),
                         bytes, done};
        });
    if (result != protocol::WaitResult::kReady) return;
  }
}

}  // namespace switchyard::cpu
