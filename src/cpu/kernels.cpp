#include "cpu/kernels.h"

namespace switchyard::cpu {

const Kernels& kernels() {
  static const Kernels* const best = [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      return &avx512::table;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &avx2::table;
#endif
    return &baseline::table;
  }();
  return *best;
}

}  // namespace switchyard::cpu
