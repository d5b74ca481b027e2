#include "support/exchanges.h"

namespace switchyard::testing {

ExchangeBatch::ExchangeBatch(const ExchangeSpec& its_spec, int num_ranks, DType input_dtype,
                             std::uint64_t its_seed, std::vector<int> counts)
    : spec(its_spec), ranks(num_ranks), input(input_dtype), seed(its_seed) {
  test::Numbers numbers(seed);
  for (int r = 0; r < ranks; ++r) {
    const int roll = numbers.between(0, 5);
    const int count = !counts.empty() ? counts[static_cast<std::size_t>(r)]
                      : roll == 0     ? 0
                      : roll == 1     ? spec.max_tokens
                                      : numbers.between(0, spec.max_tokens);
    const Matrix x =
        Matrix::random(count, spec.hidden, input == DType::kF8E4M3 ? DType::kBF16 : input,
                       seed * 64 + static_cast<std::uint64_t>(r));
    tokens.push_back(input == DType::kF8E4M3 ? Matrix::quantised(x) : x);
    ids.emplace_back();
    weights.emplace_back();
    // Skewed in some batches.
    const int last = numbers.between(0, 3) == 0 ? std::min(spec.top_k + 1, spec.num_experts) - 1
                                                : spec.num_experts - 1;
    for (int t = 0; t < count; ++t) {
      std::vector<std::int64_t> chosen;
      while (static_cast<int>(chosen.size()) < spec.top_k) {
        const std::int64_t id = numbers.between(0, last);
        const bool there = std::count(chosen.begin(), chosen.end(), id) != 0;
        if (there || numbers.between(0, 7) == 0) {
          chosen.push_back(spec.large_ids_are_none && numbers.between(0, 1) == 0
                               ? spec.num_experts + numbers.between(0, 5)
                               : -1);
        } else {
          chosen.push_back(id);
        }
      }
      ids.back().insert(ids.back().end(), chosen.begin(), chosen.end());
      for (int k = 0; k < spec.top_k; ++k) {
        weights.back().push_back(static_cast<float>(numbers.between(-1000, 1000)) / 512.0f);
      }
    }
  }
}

std::map<int, std::vector<RowOrigin>> ExchangeBatch::rows_of_places() const {
  std::map<int, std::vector<RowOrigin>> rows;
  for (int r = 0; r < ranks; ++r) {
    for (std::int64_t t = 0; t < count(r); ++t) {
      for (int k = 0; k < spec.top_k; ++k) {
        if (!has_expert(r, t, k)) continue;
        rows[place_of(r, t, k)].push_back({r, static_cast<std::int32_t>(t), k});
      }
    }
  }
  return rows;
}

float ExchangeBatch::result(const RowOrigin& origin, int column) const {
  std::uint64_t x = seed + static_cast<std::uint64_t>(origin.rank) * 0x9e3779b97f4a7c15u +
                    static_cast<std::uint64_t>(origin.token) * 0xbf58476d1ce4e5b9u +
                    static_cast<std::uint64_t>(origin.k) * 0x94d049bb133111ebu +
                    static_cast<std::uint64_t>(column) * 0xd6e8feb86659fd93u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  // Eight significant bits, which all types hold.
  return static_cast<float>(static_cast<int>(x >> 56) - 128) / 32.0f;
}

int ExchangeBatch::place_of(int rank, std::int64_t token, int k) const {
  const std::int64_t id = id_of(rank, token, k);
  if (spec.placement.expert_at.empty()) return static_cast<int>(id);
  return places_for(spec.placement, spec.num_experts, rank, ranks)[static_cast<std::size_t>(id)];
}

std::int64_t first_row_of(const RowLayout& layout, const std::vector<std::int64_t>& counts,
                          std::size_t expert) {
  if (layout.kind == RowLayout::Kind::kPadded) {
    return static_cast<std::int64_t>(expert) * layout.size;
  }
  std::int64_t row = 0;
  for (std::size_t e = 0; e < expert; ++e) {
    const std::int64_t block = layout.kind == RowLayout::Kind::kBlocked ? layout.size : 1;
    row += (counts[e] + block - 1) / block * block;
  }
  return row;
}

int wrong_rows(const ExchangeBatch& batch, int rank, const RowLayout& layout,
               const ExchangeArrays& got, bool has_weights, const ExchangeBatch* other_tokens) {
  const ExchangeBatch& sent = other_tokens == nullptr ? batch : *other_tokens;
  int wrong = 0;
  const auto expect = [&](bool right, const std::string& what) {
    if (!right && wrong++ == 0) ADD_FAILURE() << "rank " << rank << ": " << what;
  };
  const ExpertRange own = own_experts(batch.num_places(), rank, batch.ranks);
  const auto rows = batch.rows_of_places();
  std::vector<std::int64_t> counts;
  for (int p = own.begin; p < own.end; ++p) {
    const auto of_place = rows.find(p);
    counts.push_back(of_place == rows.end() ? 0
                                            : static_cast<std::int64_t>(of_place->second.size()));
  }
  std::vector<Matrix> quantised;
  for (const Matrix& tokens : sent.tokens) {
    if (batch.spec.dispatch != DType::kF8E4M3 || tokens.dtype() == DType::kF8E4M3) {
      quantised.push_back(tokens);
      continue;
    }
    Matrix rounded(tokens.rows(), batch.spec.hidden, DType::kBF16);
    for (std::int64_t i = 0; i < tokens.rows() * batch.spec.hidden; ++i) {
      rounded.set(i, tokens.get(i));
    }
    quantised.push_back(Matrix::quantised(rounded));
  }
  std::vector<bool> used(static_cast<std::size_t>(got.capacity));
  std::int64_t packed = 0;
  const auto groups = static_cast<std::size_t>((batch.spec.hidden + 127) / 128);
  for (std::size_t e = 0; e < counts.size(); ++e) {
    expect(got.counts[e] == counts[e], "count of expert " + std::to_string(e));
    for (std::int64_t i = 0; i < counts[e]; ++i, ++packed) {
      const RowOrigin whose = rows.at(own.begin + static_cast<int>(e))[static_cast<std::size_t>(i)];
      const std::int64_t row = first_row_of(layout, counts, e) + i;
      if (row >= got.capacity) {
        expect(false, "row beyond the capacity");
        continue;
      }
      const auto at = static_cast<std::size_t>(row);
      used[at] = true;
      const std::string name = "row " + std::to_string(row) + " of expert " + std::to_string(e);
      expect(got.origins[at].rank == whose.rank && got.origins[at].token == whose.token &&
                 got.origins[at].k == whose.k,
             name + " has another origin");
      const float weight = has_weights ? batch.weight(whose.rank, whose.token, whose.k) : 1.0f;
      expect(got.weights[static_cast<std::size_t>(packed)] == weight, name + " has another weight");
      const MatrixView token = quantised[static_cast<std::size_t>(whose.rank)].view();
      expect(std::memcmp(
                 got.rows.view().row(row), token.row(whose.token),
                 static_cast<std::size_t>(batch.spec.hidden) * size_of(batch.spec.dispatch)) == 0,
             name + " is another token");
      if (token.scale == nullptr) continue;
      expect(std::memcmp(&got.scales[at * groups],
                         token.f32_scale() + whose.token * token.scale_stride, 4 * groups) == 0,
             name + " has other scales");
    }
    expect(got.ends[e] == packed, "end of expert " + std::to_string(e));
  }
  expect(got.num_rows == packed, "number of rows");
  // Nothing else was written.
  for (std::size_t row = 0; row < used.size(); ++row) {
    if (used[row]) continue;
    expect(got.origins[row].rank == -7, "row " + std::to_string(row) + " is nobody's, but written");
    const auto* bytes =
        static_cast<const std::uint8_t*>(got.rows.view().row(static_cast<std::int64_t>(row)));
    const std::size_t size =
        static_cast<std::size_t>(batch.spec.hidden) * size_of(batch.spec.dispatch);
    expect(std::count(bytes, bytes + size, 0xff) == static_cast<std::ptrdiff_t>(size),
           "row " + std::to_string(row) + " is nobody's, but written");
  }
  return wrong;
}

Matrix results_of(const ExchangeBatch& batch, const ExchangeArrays& got) {
  Matrix rows(got.capacity, batch.spec.hidden, batch.spec.combine);
  for (std::int64_t r = 0; r < got.capacity; ++r) {
    const RowOrigin& whose = got.origins[static_cast<std::size_t>(r)];
    if (whose.rank < 0) continue;
    for (int c = 0; c < batch.spec.hidden; ++c) {
      rows.set(r * batch.spec.hidden + c, batch.result(whose, c));
    }
  }
  return rows;
}

int wrong_sums(const ExchangeBatch& batch, int rank, const Matrix& out, float scale,
               const Matrix* before, bool has_weights) {
  const ExchangeSpec& spec = batch.spec;
  int wrong = 0;
  for (std::int64_t t = 0; t < batch.count(rank); ++t) {
    for (int c = 0; c < spec.hidden; ++c) {
      double exact = 0, sum = 0;  // and of magnitudes
      for (int k = 0; k < spec.top_k; ++k) {
        if (!batch.has_expert(rank, t, k)) continue;
        double value = batch.result({rank, static_cast<std::int32_t>(t), k}, c);
        if (spec.weights != CombineWeights::kNone && has_weights) {
          value *= static_cast<double>(batch.weight(rank, t, k));
        }
        exact += value;
        sum += std::abs(value);
      }
      // A product and a sum for each k, and the scale.
      double bound = (2.0 * spec.top_k + 1) * 0x1p-24 * sum;
      const bool rounded_on_the_way =
          spec.weights == CombineWeights::kBySender || spec.pre_sum || spec.pre_sum_per_host;
      if (rounded_on_the_way) bound += 1.01 * unit_of(spec.combine) * sum;
      exact *= static_cast<double>(scale);
      bound *= std::abs(static_cast<double>(scale));
      const std::int64_t i = t * spec.hidden + c;
      if (before != nullptr) {
        exact += static_cast<double>(before->get(i));
        bound += 0x1p-23 * (std::abs(exact) + bound);
      }
      bound += 1.01 * unit_of(out.dtype()) * (std::abs(exact) + bound) + 0x1p-24;
      if (std::abs(static_cast<double>(out.get(i)) - exact) <= bound) continue;
      if (wrong++ == 0) {
        ADD_FAILURE() << "rank " << rank << ", token " << t << ", column " << c << ": "
                      << out.get(i) << " instead of " << exact << " +- " << bound;
      }
    }
  }
  return wrong;
}

void check_round(Exchange& exchange, ExchangeHandle& handle, const ExchangeBatch& batch, int rank) {
  ExchangeArrays got{exchange.spec(), exchange.own_places(), exchange.rows_needed()};
  exchange.dispatch_send(input_of(batch, rank), handle);
  exchange.dispatch_recv(got.output(), handle);
  EXPECT_EQ(wrong_rows(batch, rank, exchange.spec().layout, got), 0);
  const Matrix results = results_of(batch, got);
  exchange.combine_send({results.view()}, handle);
  Matrix out(batch.count(rank), exchange.spec().hidden, DType::kF32);
  exchange.combine_recv(output_of(out), handle);
  EXPECT_EQ(wrong_sums(batch, rank, out), 0);
}

ExchangeSpec spec_over_hosts(int hidden, RowLayout layout, DType dispatch) {
  ExchangeSpec spec;
  spec.hidden = hidden;
  spec.num_experts = 11;
  spec.top_k = 3;
  spec.max_tokens = 24;
  spec.dispatch = dispatch;
  spec.layout = layout;
  return spec;
}

}  // namespace switchyard::testing
