#include "cpu/library_gate.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>

#include "base/origin.h"

namespace switchyard::cpu {

struct LibraryGate {
  std::mutex mutex;  // of the users
  std::set<LibraryUser*> users;
  std::atomic<bool> closed{false};
  std::thread::id closer;  // called exit(); written before `closed`

  static LibraryGate& of_process() {
    static constinit PerProcess<LibraryGate> gate;
    return gate.get();
  }

  void close() {
    process_is_ending.store(true);
    if (closed.load()) return;  // handlers run one after the other
    closer = std::this_thread::get_id();
    closed.store(true);
    // A visit is one small product. A thread that called exit() in the midst of one, from a handler
    // of a signal, never comes out.
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    const auto somebody_is_inside = [&] {
      const std::lock_guard lock(mutex);
      for (const LibraryUser* user : users) {
        if (user->inside_.load()) return true;
      }
      return false;
    };
    while (somebody_is_inside() && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
};

LibraryUser::LibraryUser() {
  LibraryGate& gate = LibraryGate::of_process();
  const std::lock_guard lock(gate.mutex);
  gate.users.insert(this);
}

LibraryUser::~LibraryUser() {
  LibraryGate& gate = LibraryGate::of_process();
  const std::lock_guard lock(gate.mutex);
  gate.users.erase(this);
}

void LibraryUser::enter() {
  // Sequentially consistent, as the handler's store and loads: either it sees this thread inside,
  // or this thread sees the gate closed.
  inside_.store(true);
  const LibraryGate& gate = LibraryGate::of_process();
  if (!gate.closed.load()) [[likely]] {
    return;
  }
  // The thread that ends the process must go on, whatever it finds here.
  if (gate.closer == std::this_thread::get_id()) return;
  inside_.store(false);
  for (;;) ::pause();
}

void close_gate_first() {
  // Handlers run in the reverse of the order in which they were registered.
  (void)std::atexit([] { LibraryGate::of_process().close(); });
}

}  // namespace switchyard::cpu
