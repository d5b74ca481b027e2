// What the GEMM library makes of this processor, and how it is kept on one thread.
#include <omp.h>

#include <oneapi/dnnl/dnnl.hpp>

#include "cpu/tile_gemm.h"

namespace switchyard::cpu {

bool has_native_bf16() {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto needed = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  return (isa & needed) == needed;
}

const char* gemm_instruction_set() {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  const auto has = [isa](dnnl::cpu_isa needed) {
    return (isa & static_cast<unsigned>(needed)) == static_cast<unsigned>(needed);
  };
  if (has(dnnl::cpu_isa::avx512_core_amx)) return "amx_bf16";
  if (has(dnnl::cpu_isa::avx512_core_bf16)) return "avx512_bf16";
  if (has(dnnl::cpu_isa::avx512_core)) return "avx512";
  if (has(dnnl::cpu_isa::avx2)) return "avx2";
  return "sse4.1";
}

SingleThreadedLibrary::SingleThreadedLibrary() : threads_before_(omp_get_max_threads()) {
  omp_set_num_threads(1);
}
SingleThreadedLibrary::~SingleThreadedLibrary() { omp_set_num_threads(threads_before_); }

}  // namespace switchyard::cpu
