// Objects that belong to the process that made them.
//
// After fork() the child has a copy of every object, but none of the parent's threads, and its
// sockets and shared memory are the parent's. A call on such a copy would wait for ever, and its
// destructor would join threads that are not there. So each of these objects remembers the process
// that made it; calls of another process are refused, and there the object is never destroyed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace switchyard {

// Numbers this process among its forefathers: 0 in the one that loaded the library, and one more
// after each fork().
extern std::atomic<std::uint64_t> process_generation;
// Set when exit() has begun to end what objects use. From then on objects are not destroyed either:
// their threads may be in the midst of work, and never come back.
extern std::atomic<bool> process_is_ending;

class Origin {
 public:
  Origin() noexcept : generation_(process_generation.load(std::memory_order_relaxed)) {}

  bool is_here() const noexcept {
    return generation_ == process_generation.load(std::memory_order_relaxed);
  }
  // Throws Error{kInvalidArgument} in a process that inherited the object. `what` is its name: "the
  // layer".
  void require_here(const char* what) const {
    if (!is_here()) [[unlikely]] {
      refuse_inherited(what);
    }
  }

 private:
  [[noreturn]] static void refuse_inherited(const char* what);

  std::uint64_t generation_;
};

// True if an object is to be destroyed. Otherwise it is left behind.
inline bool ends_here(const Origin& origin) noexcept {
  return origin.is_here() && !process_is_ending.load(std::memory_order_relaxed);
}

// Leaves an object behind unless it ends here. T has a member `origin`.
template <typename T>
void leave_inherited(std::unique_ptr<T>& owned) noexcept {
  if (owned != nullptr && !ends_here(owned->origin)) (void)owned.release();
}

[[noreturn]] void refuse_moved(const char* what);
// The object of a handle. Throws Error{kInvalidArgument} for a handle that was moved from; `what`
// is the object's name: "the layer".
template <typename Owner>
auto& held(const Owner& owned, const char* what) {
  if (owned == nullptr) [[unlikely]] {
    refuse_moved(what);
  }
  return *owned;
}
// The same, and throws as Origin::require_here().
template <typename Owner>
auto& held_here(const Owner& owned, const char* what) {
  auto& object = held(owned, what);
  object.origin.require_here(what);
  return object;
}

// Does the same as std::make_shared(), but the object is left behind in a process that inherited
// it.
template <typename T, typename... Arguments>
std::shared_ptr<T> make_shared_here(Arguments&&... arguments) {
  return {new T(std::forward<Arguments>(arguments)...), [origin = Origin()](T* object) {
            if (ends_here(origin)) delete object;
          }};
}

// One T for each process, made when it is first asked for. It is never destroyed: threads may use
// it while the process ends.
template <typename T>
class PerProcess {
 public:
  T& get() {
    Held* held = held_.load(std::memory_order_acquire);
    if (held != nullptr && held->origin.is_here()) [[likely]] {
      return held->value;
    }
    auto* const fresh = new Held();
    if (held_.compare_exchange_strong(held, fresh, std::memory_order_acq_rel)) return fresh->value;
    delete fresh;  // another thread was first
    return held->value;
  }

 private:
  struct Held {
    Origin origin;
    T value;
  };
  std::atomic<Held*> held_{nullptr};
};

}  // namespace switchyard
