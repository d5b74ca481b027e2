#include "exchange/staged_calls.h"

#include <algorithm>
#include <utility>

namespace switchyard {

StagedCalls::StagedCalls(std::unique_ptr<StagingDevice> device)
    : device_(std::move(device)), thread_([this] { serve(); }) {}

StagedCalls::~StagedCalls() {
  {
    const std::lock_guard lock(mutex_);
    stops_ = true;
  }
  is_reached_.notify_one();
  thread_.join();
}

void StagedCalls::enqueue(void* stream, std::function<void()> work) {
  Call* call = nullptr;
  {
    const std::lock_guard lock(mutex_);
    const auto free = std::ranges::find_if(calls_, &Call::is_free);
    call = free != calls_.end() ? &*free : &calls_.emplace_back();
    call->calls = this;
    call->work = std::move(work);
    call->is_free = false;
  }
  try {
    const bool is_captured = device_->enqueue(stream, *call);
    const std::lock_guard lock(mutex_);
    call->is_captured = is_captured;
  } catch (...) {
    const std::lock_guard lock(mutex_);
    call->is_free = true;
    throw;
  }
}

void StagedCalls::push(Call& call) noexcept {
  {
    const std::lock_guard lock(mutex_);
    call.next = nullptr;
    (last_ == nullptr ? first_ : last_->next) = &call;
    last_ = &call;
  }
  is_reached_.notify_one();
}

void StagedCalls::serve() {
  for (;;) {
    Call* call = nullptr;
    {
      std::unique_lock lock(mutex_);
      is_reached_.wait(lock, [this] { return first_ != nullptr || stops_; });
      if (first_ == nullptr) return;
      call = first_;
      first_ = call->next;
      if (first_ == nullptr) last_ = nullptr;
    }
    serve(*call);
    {
      const std::lock_guard lock(mutex_);
      call->is_free = !call->is_captured;
    }
    device_->release();
  }
}

void StagedCalls::serve(Call& call) noexcept {
  const std::lock_guard turn(turn_);
  {
    const std::lock_guard lock(mutex_);
    if (end_) return;
  }
  try {
    call.work();
  } catch (...) {
    end(std::current_exception());
  }
}

void StagedCalls::end(std::exception_ptr failure) {
  const std::lock_guard lock(mutex_);
  if (!end_) end_ = std::move(failure);
}

void StagedCalls::note(ErrorCode code, const std::string& message) {
  const std::lock_guard lock(mutex_);
  if (found_) return;
  found_ = std::make_exception_ptr(Error(code, message + " (in a call that has ended)"));
}

void StagedCalls::throw_found() {
  std::exception_ptr found;
  {
    const std::lock_guard lock(mutex_);
    found = end_ ? end_ : std::exchange(found_, nullptr);
  }
  if (found) std::rethrow_exception(found);
}

}  // namespace switchyard
