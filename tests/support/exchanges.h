// Batches for exchanges, and what must become of them, by plain loops over all ranks' slots.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "support/layers.h"
#include "support/numbers.h"
#include "support/ranks.h"
#include "switchyard/exchange.h"

namespace switchyard::testing {

// One batch over all ranks: every rank knows everybody's tokens, to judge what it gets.
struct ExchangeBatch {
  ExchangeSpec spec;
  int ranks = 1;
  DType input = DType::kBF16;
  std::vector<Matrix> tokens;                  // [ranks] of [T, H]
  std::vector<std::vector<std::int64_t>> ids;  // [ranks] of [T, K]
  std::vector<std::vector<float>> weights;     // [ranks] of [T, K]
  std::uint64_t seed = 0;

  // Random numbers of tokens, or `counts`. One slot in eight has no expert.
  ExchangeBatch(const ExchangeSpec& its_spec, int num_ranks, DType input_dtype,
                std::uint64_t its_seed, std::vector<int> counts = {});

  std::int64_t count(int rank) const { return tokens[static_cast<std::size_t>(rank)].rows(); }
  bool has_expert(int rank, std::int64_t token, int k) const {
    const std::int64_t id = id_of(rank, token, k);
    return id >= 0 && id < spec.num_experts;
  }
  std::int64_t id_of(int rank, std::int64_t token, int k) const {
    return ids[static_cast<std::size_t>(rank)][static_cast<std::size_t>(token * spec.top_k + k)];
  }
  float weight(int rank, std::int64_t token, int k) const {
    return weights[static_cast<std::size_t>(rank)]
                  [static_cast<std::size_t>(token * spec.top_k + k)];
  }
  int place_of(int rank, std::int64_t token, int k) const;

  // The rows of each place, in their order.
  std::map<int, std::vector<RowOrigin>> rows_of_places() const;
  int num_places() const { return spec.placement.num_places(spec.num_experts); }

  // The experts' result for a row: any number, of the type that travels back.
  float result(const RowOrigin& origin, int column) const;
};

// The arrays that a rank receives into and sends from.
struct ExchangeArrays {
  std::int64_t capacity;
  Matrix rows;
  std::vector<float> scales;
  std::vector<std::int32_t> ends, counts;
  std::int32_t num_rows = -1;
  std::vector<RowOrigin> origins;
  std::vector<float> weights;

  ExchangeArrays(const ExchangeSpec& spec, ExpertRange own, std::int64_t room)
      : capacity(room),
        rows(room, spec.hidden, spec.dispatch),
        scales(static_cast<std::size_t>(
                   spec.dispatch == DType::kF8E4M3 ? room * ((spec.hidden + 127) / 128) : 0),
               -7.0f),
        ends(static_cast<std::size_t>(own.end - own.begin), -7),
        counts(ends.size(), -7),
        origins(static_cast<std::size_t>(room), RowOrigin{-7, -7, -7}),
        weights(static_cast<std::size_t>(room), -7.0f) {}

  DispatchOutput output() {
    return {.rows = rows.row(0),
            .capacity = capacity,
            .scales = scales.empty() ? nullptr : scales.data(),
            .ends = ends.data(),
            .counts = counts.data(),
            .num_rows = &num_rows,
            .origins = origins.data(),
            .weights = weights.data()};
  }
};

inline DispatchInput input_of(const ExchangeBatch& batch, int rank) {
  const auto r = static_cast<std::size_t>(rank);
  return {.tokens = batch.tokens[r].view(), .ids = batch.ids[r], .weights = batch.weights[r]};
}

// Where each place's rows begin in the layout, by its definition.
std::int64_t first_row_of(const RowLayout& layout, const std::vector<std::int64_t>& counts,
                          std::size_t expert);

// Judges what a rank received; returns how many things were wrong, and says the first.
// `other_tokens`: of whom the tokens are if not the batch's own, after a reuse.
int wrong_rows(const ExchangeBatch& batch, int rank, const RowLayout& layout,
               const ExchangeArrays& got, bool has_weights = true,
               const ExchangeBatch* other_tokens = nullptr);

// The experts' results for what a rank received, in the layout.
Matrix results_of(const ExchangeBatch& batch, const ExchangeArrays& got);

inline double unit_of(DType dtype) {
  return dtype == DType::kF32 ? 0x1p-24 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
}

// Judges the sums of a rank's tokens: they must be within what fp32 summation and the roundings
// that the spec tells of can make. Returns how many were not.
int wrong_sums(const ExchangeBatch& batch, int rank, const Matrix& out, float scale = 1,
               const Matrix* before = nullptr, bool has_weights = true);

inline CombineOutput output_of(Matrix& out) { return {.data = out.row(0), .dtype = out.dtype()}; }

// A dispatch and a combine of a rank, each begun and ended, judged.
void check_round(Exchange& exchange, ExchangeHandle& handle, const ExchangeBatch& batch, int rank);

// Exchanges over hosts: an exchange with experts that no number of ranks divides.
ExchangeSpec spec_over_hosts(int hidden, RowLayout layout, DType dispatch = DType::kBF16);

// Layouts of rows, with types on the wire and of the tokens.
inline auto layouts_over_hosts() {
  return ::testing::Values(std::tuple(RowLayout::packed(), DType::kBF16, DType::kBF16),
                           std::tuple(RowLayout::packed(), DType::kF32, DType::kF32),
                           std::tuple(RowLayout::packed(), DType::kF8E4M3, DType::kF32),
                           std::tuple(RowLayout::blocked(16), DType::kBF16, DType::kBF16),
                           std::tuple(RowLayout::padded(0), DType::kBF16, DType::kBF16),
                           std::tuple(RowLayout::padded(72), DType::kF8E4M3, DType::kF8E4M3));
}

// Round trips of a rank, for the players of both backends: of a HostPlayer, and of a Player on a
// GPU.
template <typename Player>
class Rounds {
 public:
  // A dispatch and a combine, judged.
  Matrix round(const ExchangeBatch& batch, DType dtype = DType::kF32, std::size_t i = 0) {
    Player& player = static_cast<Player&>(*this);
    player.load(batch, i);
    player.enqueue_dispatch(i);
    const ExchangeArrays of = player.got(i);
    wrong_rows(batch, player.rank, player.spec().layout, of);
    player.upload_results(batch, of, i);
    player.enqueue_combine(dtype, i);
    Matrix sum = player.sums(batch, dtype, i);
    wrong_sums(batch, player.rank, sum);
    return sum;
  }
};

// One rank's exchange on the CPU, with arrays for some batches.
struct HostPlayer : Rounds<HostPlayer> {
  using Fixture = ::testing::Test;
  static constexpr int kHidden = 136;    // one group of scales, and a shorter one
  static constexpr int kSlotBytes = 12;  // that a row's description takes on its way
  struct Slot {
    const ExchangeBatch* batch = nullptr;
    std::optional<ExchangeArrays> got;
    Matrix results{0, 1, DType::kF32}, sums{0, 1, DType::kF32};
  };

  World world;
  int rank;
  Exchange made;
  ExchangeHandle handle = made.make_handle();
  std::vector<Slot> slots;

  HostPlayer(World its_world, const ExchangeSpec& spec, std::size_t batches = 1,
             const ExchangeOptions& options = {})
      : world(std::move(its_world)),
        rank(world.rank()),
        made(world, spec, options),
        slots(batches) {}

  static std::vector<World> worlds(int ranks) {
    return World::threads(ranks, test::with_deadline(test::kGenerous));
  }
  Exchange& exchange() { return made; }
  const ExchangeSpec& spec() const { return made.spec(); }
  ExchangeArrays room(std::int64_t rows) const { return {spec(), made.own_places(), rows}; }

  void load(const ExchangeBatch& batch, std::size_t i = 0) {
    slots[i].batch = &batch;
    slots[i].got = room(made.rows_needed());
  }
  DispatchInput input(std::size_t i = 0) const { return input_of(*slots[i].batch, rank); }
  DispatchOutput output(std::size_t i = 0) { return slots[i].got->output(); }
  void enqueue_dispatch(std::size_t i = 0) { made.dispatch(input(i), output(i), handle); }
  void enqueue_combine(DType dtype, std::size_t i = 0) {
    Slot& slot = slots[i];
    slot.sums = Matrix(slot.batch->count(rank), spec().hidden, dtype);
    made.combine({slot.results.view()}, output_of(slot.sums), handle);
  }
  // Ends the calls before, and throws what failed in them.
  void finish() {}
  std::int64_t rows_that_came() { return made.rows_needed(handle); }
  const ExchangeArrays& got(std::size_t i = 0) const { return *slots[i].got; }
  void upload_results(const ExchangeBatch& batch, const ExchangeArrays& of, std::size_t i = 0) {
    slots[i].results = results_of(batch, of);
  }
  const Matrix& sums(const ExchangeBatch&, DType, std::size_t i = 0) const { return slots[i].sums; }
};

}  // namespace switchyard::testing
