// Keeps threads out of the GEMM library while the process ends.
//
// The library destroys its generated code and its tables in handlers of exit(). A thread that is
// still in a pass, one that nobody joined, would then run code that is gone. So the first handler
// that runs is the gate's: it lets threads that are inside come out, and threads that want to enter
// sleep until the process has ended.
#pragma once

#include <atomic>

namespace switchyard::cpu {

// A thread's way through the gate. Each has a line of its own: threads do not disturb each other.
class alignas(64) LibraryUser {
 public:
  LibraryUser();
  ~LibraryUser();
  LibraryUser(const LibraryUser&) = delete;
  LibraryUser& operator=(const LibraryUser&) = delete;

  // While an object of this class exists, the library's tables do.
  class Visit {
   public:
    explicit Visit(LibraryUser& user) : user_(user) { user_.enter(); }
    // Release: the handler of exit() acquires what the visit did.
    ~Visit() { user_.inside_.store(false, std::memory_order_release); }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

   private:
    LibraryUser& user_;
  };

 private:
  friend struct LibraryGate;
  void enter();

  std::atomic<bool> inside_{false};
};

// Puts the gate's handler before those that the library has registered up to now. Call it after the
// library did something for the first time: its tables are made, and their ends registered, when
// they are first used.
void close_gate_first();

}  // namespace switchyard::cpu
