// What GCC's static libstdc++ and our own objects use, and glibc 2.28 lacks. scripts/portable.sh
// puts these functions into the library that a portable link takes in place of this machine's
// glibc. Nothing else may use them.
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

namespace {

// A time of a clock as one of the realtime clock, as both stand now. False if there is no such
// clock.
bool to_realtime(clockid_t clock, const timespec& time, timespec& realtime) {
  constexpr int64_t kNanosecondsPerSecond = 1'000'000'000;
  timespec now{}, now_realtime{};
  if (clock_gettime(clock, &now) != 0 || clock_gettime(CLOCK_REALTIME, &now_realtime) != 0)
    return false;
  const int64_t nanoseconds = now_realtime.tv_nsec + (time.tv_nsec - now.tv_nsec);
  // More than -1 second and less than 2, so this carries one second at most.
  const int64_t carry = nanoseconds < 0 ? -1 : nanoseconds / kNanosecondsPerSecond;
  realtime.tv_sec = now_realtime.tv_sec + (time.tv_sec - now.tv_sec) + carry;
  realtime.tv_nsec = nanoseconds - carry * kNanosecondsPerSecond;
  return true;
}

}  // namespace

extern "C" {

// glibc 2.32 sets this while a process has one thread, and shared_ptr then counts without atomic
// instructions. Atomic instructions are right in both cases.
char __libc_single_threaded = 0;

// glibc 2.36. std::random_device asks for it.
uint32_t arc4random() {
  uint32_t value = 0;
  // So few bytes come whole or not at all.
  while (getrandom(&value, sizeof value, 0) != sizeof value) {
    if (errno != EINTR)
      abort();  // the kernel has no random numbers, and this function cannot say so
  }
  return value;
}

// glibc 2.32. strsignal() has the same words, in the language that setlocale() chose; only for
// numbers that are no ordinary signal it writes into a buffer that threads share.
const char* sigdescr_np(int signal) {
  return signal > 0 && signal <= SIGSYS ? strsignal(signal) : nullptr;
}

// glibc 2.30. Waits of std::condition_variable until a time of steady_clock end here. An older
// glibc gets the deadline in the realtime clock: the caller looks at its own clock after every
// wake-up, so a realtime clock that is set meanwhile makes one wait longer or shorter, as it did
// before GCC 10.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* deadline) {
  using Function = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const auto newer =
      reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (newer) return newer(condition, mutex, clock, deadline);
  timespec there{};
  if (!to_realtime(clock, *deadline, there)) return EINVAL;
  return pthread_cond_timedwait(condition, mutex, &there);
}

// glibc 2.30, for std::timed_mutex. The caller does not look at its clock afterwards, so this does.
int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const timespec* deadline) {
  using Function = int (*)(pthread_mutex_t*, clockid_t, const timespec*);
  static const auto newer =
      reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "pthread_mutex_clocklock"));
  if (newer) return newer(mutex, clock, deadline);
  while (true) {
    timespec there{}, now{};
    if (!to_realtime(clock, *deadline, there)) return EINVAL;
    const int result = pthread_mutex_timedlock(mutex, &there);
    if (result != ETIMEDOUT || clock_gettime(clock, &now) != 0) return result;
    const bool is_over = now.tv_sec > deadline->tv_sec ||
                         (now.tv_sec == deadline->tv_sec && now.tv_nsec >= deadline->tv_nsec);
    if (is_over) return result;
  }
}

}  // extern "C"
