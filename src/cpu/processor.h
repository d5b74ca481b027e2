// A Processor of one rank: a thread's scratch memory and what it does with a task.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/expert_gemm.h"
#include "cpu/kernels.h"
#include "cpu/pass.h"
#include "cpu/thread_trace.h"
#include "cpu/tile_gemm.h"

namespace switchyard::cpu {

struct NanCounts {
  std::int64_t logits = 0;
  std::int64_t tokens = 0;  // with a NaN among their logits
};

class Processor {
 public:
  // `trace` is told of the flags that tasks raise for other ranks; it may be null.
  Processor(const LayerState& layer, ThreadTrace* trace);

  // Tokens [begin, end): logits, choice, shared-expert gate. `hashed_ids` is [tokens, K] or null.
  NanCounts gate(Pass& pass, std::int64_t begin, std::int64_t end, const std::int32_t* hashed_ids);

  void run(Pass& pass, const protocol::Task& task);

  static constexpr std::int64_t kGateBlock = kOwnTokensShape.max_height;  // tokens
  // The most bytes of scratch that the tasks of a layer need.
  std::size_t scratch_bytes() const;

 private:
  void multiply_gate(const Pass& pass, std::int64_t begin, int n);
  void dispatch(Pass& pass, int peer, std::uint32_t chunk);
  template <typename To>
  void send_tokens(Pass& pass, int peer, std::uint32_t chunk, To& to);
  void gemm1(Pass& pass, Tile& tile, std::uint32_t tile_index, std::uint32_t block);
  void gemm2(Pass& pass, Tile& tile, std::uint32_t tile_index, std::uint32_t block);
  // Sends the tile's rows to their source on another host; or marks them as there, and sends the
  // sums of tokens of which they are this host's last.
  void send_back(Pass& pass, const Tile& tile, int source);
  void combine(Pass& pass, std::uint32_t chunk);

  bool is_shared(const Pass& pass, const Tile& tile) const;
  const Ffn& ffn(const Pass& pass, const Tile& tile) const;
  void gather(Pass& pass, const Tile& tile, std::uint32_t tile_index);
  // A token's row of the wire, times `scale`, in the GEMM's type.
  void unpack(const std::byte* from, float scale, std::byte* to);
  static std::byte* intermediate(const Pass& pass, const Tile& tile);
  // Where the tile's row waits for its other columns, if its token's rank is on another host.
  std::byte* staged(const Pass& pass, const Tile& tile, std::uint32_t row) const {
    return intermediate(pass, tile) + pass.staging_offset + row * layer_.cell_bytes();
  }

  // Where GEMM2 puts row `r` of the tile.
  std::byte* result_address(const Pass& pass, const Tile& tile, std::uint32_t r,
                            const Row& row) const;

  const LayerState& layer_;
  ThreadTrace* trace_;
  const Kernels& kernels_;
  ExpertGemm gemm_;
  TileGemm gate_gemm_;
  std::vector<float> product_, product_up_;
  std::vector<float> bias_, up_bias_;  // of a block, where they have to be converted
  std::vector<std::byte> gathered_;    // one tile of activations, [padded][H] in the GEMM's type
  std::vector<std::uint16_t> h_;       // a block of h that is to be quantised
  std::vector<void*> row_addresses_;
  std::uint64_t gathered_epoch_ = 0;
  std::uint32_t gathered_tile_ = 0;
};

}  // namespace switchyard::cpu
