#include "cpu/processor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>

#include "protocol/atomics.h"
#include "routing/route.h"

namespace switchyard::cpu {

using network::Lane;
using protocol::Task;
using protocol::TaskKind;
using Step = ProtocolStep::Kind;

namespace {

// The gate multiplies in bf16 where both operands are: products of bf16 are exact in fp32.
DType gate_dtype(const LayerState& layer) {
  const bool both_bf16 = layer.gemm == DType::kBF16 && layer.weights.router.dtype == DType::kBF16;
  return both_bf16 ? DType::kBF16 : DType::kF32;
}

}  // namespace

Processor::Processor(const LayerState& layer, ThreadTrace* trace)
    : layer_(layer),
      trace_(trace),
      kernels_(kernels()),
      gemm_(layer.gemm),
      gate_gemm_(gate_dtype(layer)) {}

std::size_t Processor::scratch_bytes() const {
  return (product_.capacity() + product_up_.capacity()) * sizeof(float) + gathered_.capacity() +
         h_.capacity() * sizeof(std::uint16_t) +
         (bias_.capacity() + up_bias_.capacity()) * sizeof(float) + gemm_.scratch_bytes();
}

// Fills product_, [experts][kOwnTokensShape.max_height].
void Processor::multiply_gate(const Pass& pass, std::int64_t begin, int n) {
  constexpr int padded = kOwnTokensShape.max_height;
  const int experts = layer_.spec.num_experts;
  const DType dtype = gate_gemm_.dtype();
  const std::int64_t hidden = layer_.spec.hidden;
  const auto row_bytes = static_cast<std::size_t>(hidden) * size_of(dtype);

  gathered_epoch_ = 0;  // the buffer no longer holds a tile
  gathered_.resize(std::max(gathered_.size(), static_cast<std::size_t>(padded) * row_bytes));
  for (int j = 0; j < n; ++j) {
    kernels_.convert(pass.x_row(begin + j), layer_.value,
                     gathered_.data() + static_cast<std::size_t>(j) * row_bytes, dtype, hidden, 1);
  }
  std::memset(gathered_.data() + static_cast<std::size_t>(n) * row_bytes, 0,
              static_cast<std::size_t>(padded - n) * row_bytes);
  product_.resize(std::max(product_.size(), static_cast<std::size_t>(experts) * padded));
  const MatrixView& router = layer_.weights.router;
  gate_gemm_.multiply(experts, padded, layer_.spec.hidden, router.data, router.row_stride,
                      router.col_stride, gathered_.data(), hidden, product_.data());
}

NanCounts Processor::gate(Pass& pass, std::int64_t begin, std::int64_t end,
                          const std::int32_t* hashed_ids) {
  const LayerSpec& spec = layer_.spec;
  const int n = static_cast<int>(end - begin);
  constexpr int padded = kOwnTokensShape.max_height;
  const int experts = spec.num_experts;
  const bool given = !pass.logits.empty();
  if (!given) multiply_gate(pass, begin, n);

  float logits[routing::kMaxExperts];
  NanCounts nan;
  for (int j = 0; j < n; ++j) {
    if (given) {
      kernels_.convert(pass.logits.row(begin + j), pass.logits.dtype, logits, DType::kF32, experts,
                       1);
    }
    for (int e = 0; e < experts && !given; ++e) {
      logits[e] = product_[static_cast<std::size_t>(e) * padded + j];
      if (pass.router_bias != nullptr) logits[e] += pass.router_bias[e];
    }
    const std::int64_t slot = (begin + j) * spec.top_k;
    const int num_nan = routing::route_token(spec, logits, pass.correction_bias,
                                             hashed_ids == nullptr ? nullptr : hashed_ids + slot,
                                             pass.ids.data() + slot, pass.weights.data() + slot);
    nan.logits += num_nan;
    nan.tokens += num_nan > 0 ? 1 : 0;
  }
  return nan;
}

void Processor::run(Pass& pass, const Task& task) {
  switch (task.kind) {
    case TaskKind::kDispatch: dispatch(pass, task.peer, task.index); return;
    case TaskKind::kGemm1: gemm1(pass, pass.tiles[task.index], task.index, task.block); return;
    case TaskKind::kGemm2: gemm2(pass, pass.tiles[task.index], task.index, task.block); return;
    case TaskKind::kCombine: combine(pass, task.index); return;
    case TaskKind::kNone: return;
  }
}

// A rank's own tokens and entries stay where they are: `peer` is another rank.
void Processor::dispatch(Pass& pass, int peer, std::uint32_t chunk) {
  layer_.step(Step::kDispatch, peer, pass.epoch);
  layer_.link->to(peer, Lane::kDispatch, pass.epoch,
                  [&](auto& to) { send_tokens(pass, peer, chunk, to); });
}

// A token crosses to another host once, for all ranks there that have an expert of it.
template <typename To>
void Processor::send_tokens(Pass& pass, int peer, std::uint32_t chunk, To& to) {
  const protocol::Heap& heap = layer_.heap;
  const std::vector<std::uint32_t>& tokens = pass.tokens_for[static_cast<std::size_t>(peer)];
  const std::size_t begin = std::size_t{chunk} * kDispatchChunk;
  const std::size_t end = std::min(begin + kDispatchChunk, tokens.size());
  const auto top_k = static_cast<std::size_t>(layer_.spec.top_k);
  // Calls visit(slot's index, k, expert, its owner, the owner's number of the expert).
  const auto for_each_slot = [&](std::uint32_t token, auto&& visit) {
    for (std::size_t k = 0; k < top_k; ++k) {
      const std::size_t s = token * top_k + k;
      const int owner = pass.slots[s].owner;
      if (!to.takes(owner)) continue;
      const std::int32_t expert = pass.ids[s];
      visit(s, static_cast<std::uint32_t>(k), expert, owner,
            static_cast<std::uint32_t>(expert - layer_.places.begin(owner)));
    }
  };
  const bool summed = layer_.link->way_back(peer) == RankLink::Return::kSummed;
  const protocol::HostSums::Part sums =
      summed ? layer_.link->sums_at(peer) : protocol::HostSums::Part{};
  for (std::size_t i = begin; i < end; ++i) {
    const std::uint32_t token = tokens[i];
    [[maybe_unused]] std::uint32_t slots = 0;
    for_each_slot(token, [&](std::size_t s, std::uint32_t k, std::int32_t, int owner,
                             std::uint32_t of_owner) {
      std::byte* const base = layer_.heaps().base[owner];
      const std::uint32_t distance = layer_.link->distance_from(owner);
      const std::uint32_t position = pass.slots[s].position;
      to.target(owner, heap.pool(distance, token).in(base));
      to.store(owner, heap.entries(of_owner, distance).in(base) + position,
               protocol::SlotEntry::pack(token, k));
      if (layer_.spec.weight_on_input) {
        to.store(owner, heap.weights(of_owner, distance).in(base) + position, pass.weights[s]);
      }
      if constexpr (!To::kInPlace) {
        slots |= std::uint32_t{1} << k;
        if (summed && !layer_.spec.weight_on_input) {
          to.store(peer, sums.weights + s, pass.weights[s]);
        }
      }
    });
    if constexpr (!To::kInPlace) {
      if (summed) to.store(peer, sums.slots + token, slots);
    }
    to.put(pass.wire_row(token), layer_.wire_bytes());
  }
  if (trace_ != nullptr) trace_->complete();
  for (std::size_t i = begin; i < end; ++i) {
    for_each_slot(tokens[i], [&](std::size_t, std::uint32_t, std::int32_t expert, int owner,
                                 std::uint32_t of_owner) {
      // The thread that sends an expert's last row signals for all: the counter is acquire and
      // release, so the others' writes, or records, come before this rank's flag.
      std::uint32_t* const unsent = &pass.unsent[static_cast<std::size_t>(expert)];
      if (protocol::fetch_add(unsent, ~std::uint32_t{0}) != 1) return;
      layer_.step(Step::kArrived, owner, pass.epoch);
      if (trace_ != nullptr) {
        trace_->set_subject(TraceKind::kSend, owner, -1, layer_.expert_of(expert), 0);
      }
      to.signal(
          owner,
          heap.arrived(of_owner, layer_.link->distance_from(owner)).in(layer_.heaps().base[owner]),
          protocol::flag_of(pass.epoch));
    });
  }
}

bool Processor::is_shared(const Pass& pass, const Tile& tile) const {
  return &tile < pass.tiles.data() + pass.work.num_shared_tiles;
}

const Ffn& Processor::ffn(const Pass& pass, const Tile& tile) const {
  return is_shared(pass, tile) ? layer_.shared : layer_.expert(tile.expert);
}

void Processor::gather(Pass& pass, const Tile& tile, std::uint32_t tile_index) {
  if (gathered_epoch_ == pass.epoch && gathered_tile_ == tile_index) return;
  const std::int64_t hidden = layer_.spec.hidden;
  const auto row_bytes = static_cast<std::size_t>(hidden) * size_of(layer_.gemm);
  gathered_.resize(std::max(gathered_.size(), tile.padded * row_bytes));
  std::byte* to = gathered_.data();
  for (std::uint32_t r = 0; r < tile.rows; ++r, to += row_bytes) {
    const std::byte* from;
    float scale = 1;
    if (is_shared(pass, tile)) {
      from = pass.wire_row(tile.first_row + r);
    } else {
      const Row row = row_of(layer_, pass, tile, r);
      const std::uint32_t distance = row.distance;
      const bool own = distance == 0;
      if (!own) pass.note_received(distance, row.token, layer_.max_tokens);
      from = own ? pass.wire_row(row.token)
                 : layer_.heap.pool(distance, row.token).in(layer_.heaps().mine());
      if (layer_.spec.weight_on_input) {
        const auto of_owner = static_cast<std::uint32_t>(tile.expert - layer_.first_expert());
        scale =
            own ? pass.weights[row.token * static_cast<std::size_t>(layer_.spec.top_k) + row.k]
                : layer_.heap.weights(of_owner, distance).in(layer_.heaps().mine())[row.position];
      }
    }
    unpack(from, scale, to);
  }
  std::memset(to, 0, (tile.padded - tile.rows) * row_bytes);
  gathered_epoch_ = pass.epoch;
  gathered_tile_ = tile_index;
}

void Processor::unpack(const std::byte* from, float scale, std::byte* to) {
  const std::int64_t hidden = layer_.spec.hidden;
  if (!layer_.quantised()) {
    kernels_.convert(from, layer_.value, to, layer_.gemm, hidden, scale);
    return;
  }
  gemm_.unpack(reinterpret_cast<const std::uint8_t*>(from),
               reinterpret_cast<const float*>(from + layer_.heap.scale_offset()), hidden, scale,
               to);
}

std::byte* Processor::result_address(const Pass& pass, const Tile& tile, std::uint32_t r,
                                     const Row& row) const {
  switch (layer_.link->way_back(row.source)) {
    case RankLink::Return::kInPlace: return layer_.cell(row.source, row.token, row.k);
    case RankLink::Return::kSummed: return layer_.sum_for(row.source).row(row.token, row.k);
    case RankLink::Return::kSent: break;
  }
  return staged(pass, tile, r);
}

std::byte* Processor::intermediate(const Pass& pass, const Tile& tile) {
  return pass.intermediate +
         static_cast<std::size_t>(tile.intermediate_slot) * pass.intermediate_slot_bytes;
}

void Processor::gemm1(Pass& pass, Tile& tile, std::uint32_t tile_index, std::uint32_t block) {
  layer_.step(Step::kGemm1, layer_.link->rank(), pass.epoch);
  const Ffn& f = ffn(pass, tile);
  const int first = static_cast<int>(block) * f.gemm1_rows;
  const int m = std::min(f.gemm1_rows, f.intermediate - first);
  const int n = static_cast<int>(tile.padded);
  const auto size = static_cast<std::size_t>(m) * static_cast<std::size_t>(n);
  const bool gated = layer_.spec.activation.gated;
  gather(pass, tile, tile_index);
  product_up_.resize(std::max(product_up_.size(), size));
  gemm_.multiply(f.weights->up, {first, m}, n, gathered_.data(), layer_.spec.hidden,
                 product_up_.data());
  if (gated) {
    product_.resize(std::max(product_.size(), size));
    gemm_.multiply(f.weights->gate, {first, m}, n, gathered_.data(), layer_.spec.hidden,
                   product_.data());
  }
  const float* const gate_bias =
      gated ? floats_of(f.weights->gate_bias, first, m, 1, bias_) : nullptr;
  const float* const up_bias = floats_of(f.weights->up_bias, first, m, 1, up_bias_);
  std::byte* const h =
      intermediate(pass, tile) + static_cast<std::size_t>(first) * size_of(layer_.gemm);
  const auto activate = [&](void* out, DType dtype, std::int64_t stride) {
    kernels_.activate(layer_.spec.activation, gated ? product_.data() : nullptr, product_up_.data(),
                      gate_bias, up_bias, m, n, out, dtype, stride);
  };
  if (layer_.quantised()) {
    h_.resize(std::max(h_.size(), size));
    activate(h_.data(), DType::kBF16, m);
    const std::size_t h_row_bytes = gemm_.row_bytes(f.intermediate);
    for (int j = 0; j < n; ++j) {
      gemm_.requantize(h_.data() + std::int64_t{j} * m, m,
                       h + static_cast<std::size_t>(j) * h_row_bytes);
    }
  } else {
    activate(h, layer_.gemm, f.intermediate);
  }
  if (trace_ != nullptr) trace_->complete();
  // Release: the scheduler's acquire of the full count makes the whole tile visible to GEMM2.
  protocol::fetch_add(&tile.gemm1_done, std::uint32_t{1});
}

void Processor::gemm2(Pass& pass, Tile& tile, std::uint32_t tile_index, std::uint32_t block) {
  layer_.step(Step::kGemm2, layer_.link->rank(), pass.epoch);
  const Ffn& f = ffn(pass, tile);
  const bool shared = is_shared(pass, tile);
  const int hidden = layer_.spec.hidden;
  const int first = static_cast<int>(block) * f.gemm2_rows;
  const int m = std::min(f.gemm2_rows, hidden - first);
  const int n = static_cast<int>(tile.padded);
  product_.resize(std::max(product_.size(), static_cast<std::size_t>(m) * n));
  gemm_.multiply(f.weights->down, {first, m}, n, intermediate(pass, tile), f.intermediate,
                 product_.data());
  layer_.files
      .require_whole();  // before another rank can take what was made of a file that was cut

  const std::size_t offset = static_cast<std::size_t>(first) * size_of(layer_.value);
  row_addresses_.resize(tile.rows);
  for (std::uint32_t r = 0; r < tile.rows; ++r) {
    if (shared) {
      row_addresses_[r] = layer_.cell(layer_.link->rank(), tile.first_row + r,
                                      static_cast<std::uint64_t>(layer_.spec.top_k)) +
                          offset;
    } else {
      const Row row = row_of(layer_, pass, tile, r);
      row_addresses_[r] = result_address(pass, tile, r, row) + offset;
    }
  }
  kernels_.scatter(product_.data(), floats_of(f.weights->down_bias, first, m, 1, bias_), m, n,
                   static_cast<int>(tile.rows), row_addresses_.data(), layer_.value);

  if (trace_ != nullptr) trace_->complete();
  // As in dispatch(), the last block signals for all blocks, after having acquired their writes.
  if (protocol::fetch_add(&tile.gemm2_done, std::uint32_t{1}) + 1 != f.gemm2_blocks(hidden)) return;
  if (shared) {
    protocol::store_release(&tile.finished, std::uint32_t{1});
    protocol::store_release(&tile.returned, std::uint32_t{1});
    return;
  }
  const auto of_owner = static_cast<std::uint32_t>(tile.expert - layer_.first_expert());
  for_each_source(layer_, pass, tile, [&](int source, std::uint32_t distance, std::uint32_t rows) {
    if (distance == 0) {
      layer_.step(Step::kFinished, source, pass.epoch);
      protocol::store_release(&tile.finished, std::uint32_t{1});
      return;
    }
    // Rows are sent before they are counted, so that the flag stands behind the rows of all tiles
    // in their lane.
    if (layer_.link->way_back(source) != RankLink::Return::kInPlace) send_back(pass, tile, source);
    // As in dispatch(), the thread that finishes a source's last rows of the expert signals for all
    // tiles.
    std::uint32_t* const unfinished =
        pass.unfinished_rows(of_owner, source, layer_.link->num_ranks());
    if (protocol::fetch_add(unfinished, ~rows + 1) != rows) return;
    layer_.step(Step::kFinished, source, pass.epoch);
    if (trace_ != nullptr) {
      trace_->set_subject(TraceKind::kSignal, source, static_cast<std::int32_t>(tile_index),
                          layer_.expert_of(tile.expert), static_cast<std::int32_t>(tile.rows));
    }
    std::uint32_t* const finished = layer_.heap.finished(static_cast<std::uint32_t>(tile.expert))
                                        .in(layer_.heaps().base[source]);
    layer_.link->signal(Lane::kCombine, pass.epoch, source, finished,
                        protocol::flag_of(pass.epoch));
  });
  protocol::store_release(&tile.returned, std::uint32_t{1});
}

void Processor::send_back(Pass& pass, const Tile& tile, int source) {
  std::optional<HostSum> sum;
  if (layer_.link->way_back(source) == RankLink::Return::kSummed) sum = layer_.sum_for(source);
  // Other sources' rows are not looked at: a source that has all its rows may be a pass further,
  // and its entries are then no longer this pass's.
  const RowRange rows = rows_of_source(pass, tile, source);
  layer_.link->to(source, Lane::kCombine, pass.epoch, [&](auto& to) {
    for (std::uint32_t r = rows.begin; r < rows.end; ++r) {
      const Row row = row_of(layer_, pass, tile, r);
      if (!sum) {
        to.target(source, layer_.cell(source, row.token, row.k));
        to.put(staged(pass, tile, r), layer_.cell_bytes());
        continue;
      }
      const std::uint32_t slots = sum->slots(row.token);
      Summands summands;
      if (!sum->complete(row.token, std::uint32_t{1} << row.k, slots, !layer_.spec.weight_on_input,
                         summands)) {
        continue;
      }
      const auto first_k = static_cast<std::uint32_t>(std::countr_zero(slots));
      to.target(source, layer_.cell(source, row.token, first_k));
      send_sum(to, summands, layer_.value, layer_.spec.hidden);
      std::atomic_ref(pass.sums_sent).fetch_add(1, std::memory_order_relaxed);
    }
  });
}

void Processor::combine(Pass& pass, std::uint32_t chunk) {
  layer_.step(Step::kCombine, layer_.link->rank(), pass.epoch);
  const LayerSpec& spec = layer_.spec;
  const std::int64_t begin = static_cast<std::int64_t>(chunk) * kCombineChunk;
  const std::int64_t end = std::min<std::int64_t>(begin + kCombineChunk, pass.tokens);
  const void* cells[protocol::kMaxTopK + 1];
  float weights[protocol::kMaxTopK + 1];
  for (std::int64_t token = begin; token < end; ++token) {
    int count = 0;
    std::uint64_t gateways_seen = 0;
    const auto add = [&](int k, float weight) {
      cells[count] = layer_.cell(layer_.link->rank(), static_cast<std::uint64_t>(token),
                                 static_cast<std::uint64_t>(k));
      weights[count++] = weight;
    };
    for (int k = 0; k < spec.top_k; ++k) {
      const auto s = static_cast<std::size_t>(token * spec.top_k + k);
      const int owner = pass.slots[s].owner;
      if (owner < 0) continue;
      if (layer_.link->way_back(owner) == RankLink::Return::kSummed) {
        // The host's sum, which has its weights, is in the cell of the first of its slots.
        const std::uint64_t gateway = std::uint64_t{1} << layer_.link->via(owner);
        if ((gateways_seen & gateway) == 0) add(k, 1.0f);
        gateways_seen |= gateway;
        continue;
      }
      add(k, spec.weight_on_input ? 1.0f : pass.weights[s]);
    }
    if (spec.shared_intermediate > 0) {
      float weight = 1;
      if (pass.shared_gate != nullptr) {
        const float logit =
            kernels_.dot(pass.x_row(token), layer_.value, pass.shared_gate, spec.hidden);
        weight = 1.0f / (1.0f + std::exp(-logit));
      }
      add(spec.top_k, weight);
    }
    const std::int64_t stride = pass.output.row_stride == 0 ? spec.hidden : pass.output.row_stride;
    void* out = static_cast<std::byte*>(pass.output.data) +
                static_cast<std::size_t>(token * stride) * size_of(pass.output.dtype);
    kernels_.combine(cells, weights, count, layer_.value, out, pass.output.dtype, spec.hidden,
                     pass.output.scale, pass.output.accumulate);
  }
}

}  // namespace switchyard::cpu
