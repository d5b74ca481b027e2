#include "cpu/tile_gemm.h"

#include <fmt/core.h>
#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <map>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/origin.h"
#include "base/posix.h"
#include "cpu/library_gate.h"
#include "switchyard/error.h"

namespace switchyard::cpu {

namespace {

using Dims = dnnl::memory::dims;

dnnl::memory::data_type to_dnnl(DType dtype) {
  return dtype == DType::kBF16 ? dnnl::memory::data_type::bf16 : dnnl::memory::data_type::f32;
}

dnnl::matmul::primitive_desc describe_matmul(const dnnl::engine& engine,
                                             const dnnl::memory::desc& a,
                                             const dnnl::memory::desc& b,
                                             const dnnl::memory::desc& c) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine, a, b, c};
#else
  return {dnnl::matmul::desc(a, b, c), engine};
#endif
}

// Room for what oneDNN allocates while an object of this class exists. oneDNN does not look whether
// it got the memory that it asked for, for its engines and for code that it generates: where a
// limit is near (`ulimit -v`), the process would die of a null pointer. Other threads wait for
// their room meanwhile. Those that begin at once share it with the C library, which reserves 128 MB
// for a thread's first small block, hence far more than one of them needs.
class LibraryRoom {
 public:
  LibraryRoom() : lock_(of_process_.get()) {
    constexpr std::size_t kRoom = std::size_t{256} << 20;
    void* const room =
        ::mmap(nullptr, kRoom, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
      throw Error(ErrorCode::kCapacityExceeded,
                  fmt::format("no room for the GEMM library's code: {}; raise the limit of memory "
                              "(`ulimit -v`), or use fewer ranks or threads",
                              errno_text(errno)));
    }
    ::munmap(room, kRoom);
  }

 private:
  static inline constinit PerProcess<std::mutex> of_process_;

  std::lock_guard<std::mutex> lock_;
};

// Notes the first use of a shape in the whole process. Another thread's first use of it makes
// nothing new.
void note_first_use(const std::array<std::int64_t, 7>& shape) {
  struct Known {
    std::mutex mutex;
    std::set<std::array<std::int64_t, 7>> shapes;
  };
  static constinit PerProcess<Known> of_process;
  Known& known = of_process.get();
  const std::lock_guard lock(known.mutex);
  if (known.shapes.insert(shape).second) close_gate_first();
}

}  // namespace

struct TileGemm::State {
  using Shape = std::array<std::int64_t, 6>;
  struct Generated {
    dnnl::matmul matmul;
    dnnl::memory a, x, c;
    std::unordered_map<int, dnnl::memory> arguments;
    bool is_used = false;
  };

  LibraryUser user;
  DType dtype;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::map<Shape, Generated> generated;

  Generated& get(const Shape& shape) {
    if (const auto found = generated.find(shape); found != generated.end()) return found->second;
    const LibraryRoom room;
    const auto [m, n, k, a_row_stride, a_col_stride, x_stride] = shape;
    const auto type = to_dnnl(dtype);
    // A single row has no stride to another one. oneDNN 3.7 takes a row whose stride is that of one
    // element, as that of [K, N] weights in memory, for a dense one, and its products are wrong.
    const std::int64_t row_stride = m == 1 ? k * a_col_stride : a_row_stride;
    try {
      const dnnl::memory::desc a({m, k}, type, Dims{row_stride, a_col_stride});
      const dnnl::memory::desc x({k, n}, type, Dims{1, x_stride});
      const dnnl::memory::desc c({m, n}, dnnl::memory::data_type::f32, Dims{n, 1});
      Generated fresh{dnnl::matmul(describe_matmul(engine, a, x, c)),
                      dnnl::memory(a, engine, nullptr),
                      dnnl::memory(x, engine, nullptr),
                      dnnl::memory(c, engine, nullptr),
                      {}};
      fresh.arguments = {
          {DNNL_ARG_SRC, fresh.a}, {DNNL_ARG_WEIGHTS, fresh.x}, {DNNL_ARG_DST, fresh.c}};
      return generated.emplace(shape, std::move(fresh)).first->second;
    } catch (const dnnl::error& error) {
      throw Error(
          ErrorCode::kUnsupported,
          fmt::format("oneDNN cannot multiply {} tiles of {} x {} x {} on this processor: {}",
                      to_string(dtype), m, n, k, error.what()));
    }
  }
};

TileGemm::TileGemm(DType dtype) {
  LibraryUser user;
  const LibraryUser::Visit visit(user);
  prepare_gemm_library();
  const LibraryRoom room;
  state_ = std::make_unique<State>();
  state_->dtype = dtype;
}

void TileGemm::multiply(int m, int n, int k, const void* a, std::int64_t a_row_stride,
                        std::int64_t a_col_stride, const void* x, std::int64_t x_stride, float* c) {
  const LibraryUser::Visit visit(state_->user);
  State::Generated& product = state_->get({m, n, k, a_row_stride, a_col_stride, x_stride});
  product.a.set_data_handle(const_cast<void*>(a));
  product.x.set_data_handle(const_cast<void*>(x));
  product.c.set_data_handle(c);
  product.matmul.execute(state_->stream, product.arguments);
  if (std::exchange(product.is_used, true)) return;
  note_first_use(
      {static_cast<std::int64_t>(dtype()), m, n, k, a_row_stride, a_col_stride, x_stride});
}

DType TileGemm::dtype() const { return state_->dtype; }

TileGemm::~TileGemm() {
  if (state_ == nullptr) return;
  if (process_is_ending) {
    (void)state_.release();
    return;
  }
  LibraryUser user;
  const LibraryUser::Visit visit(user);
  state_.reset();
}
TileGemm::TileGemm(TileGemm&&) noexcept = default;

}  // namespace switchyard::cpu
