// The GEMM library's view of this processor, and how it is kept on one thread.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <oneapi/dnnl/dnnl.hpp>

#include "cpu/tile_gemm.h"

// These belong to the OpenMP runtime that oneDNN uses (see CMakeLists.txt). They are declared here
// because omp.h comes with a compiler: Clang's is for another runtime, which oneDNN does not use.
extern "C" {
int omp_get_max_threads();
void omp_set_num_threads(int count);
}

namespace switchyard::cpu {

namespace {

// True if the processor has tiles (leaf 7, EDX bit 24) but none of leaf 1DH's palettes, which some
// hypervisors leave out. oneDNN then makes an empty tile configuration, whose first use is an
// illegal instruction.
bool lacks_tile_palettes() {
#if defined(__x86_64__)
  constexpr unsigned kTiles = 1U << 24, kPalettes = 0x1D;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTiles) == 0) return false;
  return __get_cpuid_count(kPalettes, 0, &a, &b, &c, &d) == 0 || a == 0;
#else
  return false;
#endif
}

bool has(dnnl::cpu_isa needed) {
  prepare_gemm_library();
  const auto all = static_cast<unsigned>(needed);
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & all) == all;
}

}  // namespace

void prepare_gemm_library() {
  static const bool prepared = [] {
    const bool told = std::getenv("ONEDNN_MAX_CPU_ISA") || std::getenv("DNNL_MAX_CPU_ISA");
    if (!told && lacks_tile_palettes()) dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx512_core_bf16);
    return true;
  }();
  (void)prepared;
}

bool has_native_bf16() { return has(dnnl::cpu_isa::avx512_core_bf16); }

DType gemm_dtype(DType compute) {
  return compute == DType::kBF16 && has_native_bf16() ? DType::kBF16 : DType::kF32;
}

const char* gemm_instruction_set() {
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
