// Problems for GroupedGemm: the same numbers in any layout, order and type, with poison wherever
// nothing may be read; and what a plain program makes of them.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/convert.h"
#include "layer/compute.h"
#include "reference/decode.h"
#include "reference/reference.h"
#include "support/layers.h"
#include "switchyard/grouped_gemm.h"

namespace switchyard::testing {

enum class Scales { kWhole, kRows, kBlocks };  // of FP8 weights

struct Case {
  int n = 64, k = 96;
  std::vector<int> rows{5, 0, 40};  // [E]
  std::optional<Activation> epilogue;
  GateOrder order = GateOrder::kGateUp;
  DType weight = DType::kBF16, x = DType::kBF16, out = DType::kBF16;
  Scales scales = Scales::kWhole;
  int group = 32;  // columns that share a scale in four-bit weights
  std::optional<DType> compute;
  Backend backend = Backend::kCpu;
  RowLayout in, to;
  bool biased = false;
  bool weighted = false;   // row weights
  bool gathered = true;    // else through an index
  bool scattered = false;  // output through an index
  bool products = false;
  bool wide_ends = false;   // i64
  bool transposed = false;  // weights are stored as [K, N]
  int col_step = 1;         // further strides of weights
  int pad = 0;              // elements between rows of weights, of x and of the output
  int threads = 2;
  std::uint64_t seed = 1;

  int num_experts() const { return static_cast<int>(rows.size()); }
  int total() const { return std::accumulate(rows.begin(), rows.end(), 0); }
  bool gated() const { return epilogue && epilogue->gated; }
};

inline Activation activation_of(ActivationKind kind, bool gated) {
  return {.kind = kind, .gated = gated};
}

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  const auto layout = [](const RowLayout& l) {
    return std::string(l.kind == RowLayout::Kind::kPacked    ? "packed"
                       : l.kind == RowLayout::Kind::kBlocked ? "blocked "
                                                             : "padded ") +
           (l.size > 0 ? std::to_string(l.size) : "");
  };
  return out << c.num_experts() << " experts, " << c.total() << " rows, n " << c.n << ", k " << c.k
             << ", " << (c.epilogue ? name_of(*c.epilogue) : "product") << ", order "
             << static_cast<int>(c.order) << ", weights " << to_string(c.weight) << " scales "
             << static_cast<int>(c.scales) << ", x " << to_string(c.x) << ", out "
             << to_string(c.out) << ", compute "
             << (c.compute ? to_string(*c.compute) : "by itself") << ", " << layout(c.in) << " to "
             << layout(c.to) << (c.biased ? ", biased" : "") << (c.weighted ? ", weighted" : "")
             << (c.gathered ? "" : ", index") << (c.scattered ? ", scattered" : "")
             << (c.products ? ", products" : "") << (c.wide_ends ? ", i64" : "")
             << (c.transposed ? ", transposed" : "") << ", col step " << c.col_step << ", pad "
             << c.pad << ", seed " << c.seed;
}

// The byte of memory that nobody may read or change: NaN in every type, -1 in indexes.
inline constexpr std::byte kPoison{0xff};

inline void encode(float value, DType dtype, std::byte* to) {
  if (dtype == DType::kF32) {
    std::memcpy(to, &value, 4);
  } else if (dtype == DType::kF8E4M3) {
    *to = std::byte{f32_to_f8e4m3(value)};
  } else {
    const std::uint16_t code = dtype == DType::kBF16 ? f32_to_bf16(value) : f32_to_f16(value);
    std::memcpy(to, &code, 2);
  }
}
inline float decode(const std::byte* from, DType dtype) {
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, from, 4);
    return value;
  }
  std::uint16_t code;
  std::memcpy(&code, from, 2);
  return dtype == DType::kBF16 ? bf16_to_f32(code) : f16_to_f32(code);
}
inline float rounded(float value, DType dtype) {
  std::byte code[4];
  encode(value, dtype, code);
  return decode(code, dtype);
}

// The rows that a call stored, in packed order, whatever the layout. Rows that are not stored are
// empty.
struct Rows {
  std::vector<std::vector<float>> output;    // [rows][output columns]
  std::vector<std::vector<float>> products;  // [rows][n], gate first; or empty

  bool operator==(const Rows& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() &&
             std::equal(a.begin(), a.end(), b.begin(), [](auto& x, auto& y) {
               return x.size() == y.size() &&
                      (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0);
             });
    };
    return same(output, other.output) && same(products, other.products);
  }
};

class Problem {
 public:
  explicit Problem(const Case& c) : case_(c), random_(c.seed) {
    make_weights();
    make_rows();
  }

  const Case& get() const { return case_; }
  GroupedGemmSpec spec() const {
    return {case_.num_experts(), case_.n, case_.k, case_.epilogue, case_.order};
  }
  const GroupedGemmWeights& weights() const { return weights_; }
  GroupedGemmOptions options() const {
    GroupedGemmOptions options{.backend = case_.backend};
    if (case_.backend == Backend::kCpu) options.num_threads = case_.threads;
    options.compute = case_.compute;
    return options;
  }
  DType compute() const { return resolve_compute(weights_.matrices, case_.compute, case_.backend); }
  int columns() const { return spec().output_columns(); }
  // Makes a value of the token of a row, the same for all rows of the token.
  void set_token(int row, int column, float value) {
    encode(value, case_.x,
           token(tokens_of_rows_[static_cast<std::size_t>(row)]) +
               static_cast<std::size_t>(column) * size_of(case_.x));
  }
  int token_of(int row) const { return tokens_of_rows_[static_cast<std::size_t>(row)]; }

  // Takes all rows from the other experts.
  void keep_only(std::size_t expert) {
    const auto begin = std::accumulate(case_.rows.begin(),
                                       case_.rows.begin() + static_cast<std::ptrdiff_t>(expert), 0);
    const auto keep = [&](auto& values) {
      values = {values.begin() + begin, values.begin() + begin + case_.rows[expert]};
    };
    keep(tokens_of_rows_);
    keep(row_weights_);
    keep(places_);
    for (std::size_t e = 0; e < case_.rows.size(); ++e) {
      if (e != expert) case_.rows[e] = 0;
    }
    count_rows();
  }

  // Runs the operator, and expects that nothing but its rows has changed.
  Rows run() const {
    GroupedGemm gemm(spec(), weights_, options());
    return run(gemm);
  }
  // `call` makes the call, with the bytes of x, the output and the products as they are in host
  // memory.
  using Call = std::function<void(GroupedGemm& gemm, GroupedInput input, GroupedOutput output,
                                  std::span<const std::byte> x, std::span<std::byte> out,
                                  std::span<std::byte> products)>;
  Rows run(GroupedGemm& gemm, const Call& call = {}) const;

  // The output that fp64, and a plain program that rounds where types say so, come to.
  Rows exact() const { return solve<double>(); }
  Rows straightforward() const { return solve<float>(); }

 private:
  float normal() { return std::normal_distribution<float>()(random_); }

  // The weight's row that has row i of gate or of up.
  int physical_row(bool gate, int i) const {
    const int half = case_.n / 2;
    if (!case_.gated()) return i;
    switch (case_.order) {
      case GateOrder::kGateUp: return gate ? i : half + i;
      case GateOrder::kUpGate: return gate ? half + i : i;
      case GateOrder::kInterleaved: return 2 * i + (gate ? 0 : 1);
    }
    return 0;
  }
  // The n products, gate's first, as they stand in the weight.
  int physical(int logical) const {
    const int half = case_.n / 2;
    return case_.gated() ? physical_row(logical < half, logical % half) : logical;
  }

  // Weights of four bits, whose rows are `pad` elements apart, with poison in between.
  void make_four_bit_weights() {
    const std::int64_t n = case_.n, k = case_.k, stride = k + case_.pad, groups = k / case_.group;
    const bool is_float = case_.weight == DType::kF4E2M1;
    const auto pair_of = [&] { return static_cast<std::byte>(random_()); };
    memory_.assign(static_cast<std::size_t>(stride * n * case_.num_experts() / 2), kPoison);
    // So that products are about as large as with other types.
    const double deviation = (is_float ? 0.4 : 0.22) / std::sqrt(static_cast<double>(k));
    for (int e = 0; e < case_.num_experts(); ++e) {
      MatrixView view{memory_.data() + e * stride * n / 2, case_.weight, n, k, stride};
      view.scale_rows = 1;
      view.scale_cols = case_.group;
      view.scale_stride = groups;
      view.scale_dtype = is_float ? DType::kF8E8M0 : DType::kBF16;
      const std::size_t size = size_of(view.scale_dtype);
      std::vector<std::byte>& scales =
          biases_.emplace_back(static_cast<std::size_t>(n * groups) * size);
      for (int i = 0; i < n; ++i) {
        std::byte* const row = memory_.data() + (e * n + physical(i)) * stride / 2;
        for (std::int64_t c = 0; c < k / 2; ++c) row[c] = pair_of();
        for (std::int64_t g = 0; g < groups; ++g) {
          const double scale = deviation * std::exp2(normal());
          std::byte* const to = &scales[static_cast<std::size_t>(physical(i) * groups + g) * size];
          if (is_float) {
            *to = static_cast<std::byte>(127 + std::lround(std::log2(scale)));
          } else {
            encode(static_cast<float>(scale), DType::kBF16, to);
          }
        }
      }
      view.scale = scales.data();
      weights_.matrices.push_back(view);
      make_bias(DType::kBF16);
    }
  }

  void make_bias(DType dtype) {
    if (!case_.biased) return;
    const std::int64_t stride = 1 + case_.pad % 3;
    std::vector<std::byte>& bias =
        biases_.emplace_back(static_cast<std::size_t>(case_.n * stride) * size_of(dtype), kPoison);
    for (int i = 0; i < case_.n; ++i) {
      encode(normal(), dtype,
             bias.data() + static_cast<std::size_t>(physical(i) * stride) * size_of(dtype));
    }
    weights_.biases.push_back({bias.data(), dtype, case_.n, stride});
  }

  void make_weights() {
    if (is_four_bit(case_.weight)) return make_four_bit_weights();
    const std::int64_t n = case_.n, k = case_.k, step = case_.col_step, pad = case_.pad;
    const std::int64_t row_stride = case_.transposed ? step : k * step + pad;
    const std::int64_t col_stride = case_.transposed ? n * step + pad : step;
    const std::int64_t matrix = (case_.transposed ? k * col_stride : n * row_stride) + pad;
    const bool fp8 = case_.weight == DType::kF8E4M3;
    const float deviation = 1 / std::sqrt(static_cast<float>(k));
    const std::size_t size = size_of(case_.weight);
    memory_.assign(static_cast<std::size_t>(matrix * case_.num_experts()) * size, kPoison);
    for (int e = 0; e < case_.num_experts(); ++e) {
      std::byte* const data = memory_.data() + static_cast<std::size_t>(e * matrix) * size;
      MatrixView view{data, case_.weight, n, k, row_stride, col_stride};
      for (int i = 0; i < n; ++i) {
        for (std::int64_t c = 0; c < k; ++c) {
          encode(normal() * (fp8 ? 64 : deviation), case_.weight,
                 data + static_cast<std::size_t>(physical(i) * row_stride + c * col_stride) * size);
        }
      }
      if (fp8) {
        view.scale_rows = case_.scales == Scales::kBlocks ? 128
                          : case_.scales == Scales::kRows ? 1
                                                          : n;
        view.scale_cols = case_.scales == Scales::kBlocks ? 128 : k;
        view.scale_stride = (k + view.scale_cols - 1) / view.scale_cols;
        std::vector<float>& scales = scales_.emplace_back(static_cast<std::size_t>(
            (n + view.scale_rows - 1) / view.scale_rows * view.scale_stride));
        for (std::size_t s = 0; s < scales.size(); ++s) {
          // Scales of rows: those of gate first, so that orders have the same numbers.
          const std::size_t at = case_.scales == Scales::kRows
                                     ? static_cast<std::size_t>(physical(static_cast<int>(s)))
                                     : s;
          scales[at] = deviation / 64 * std::exp2(normal());
        }
        view.scale = scales.data();
      }
      weights_.matrices.push_back(view);
      make_bias(fp8 ? DType::kF32 : case_.weight);
    }
  }

  std::size_t groups() const { return static_cast<std::size_t>((case_.k + 127) / 128); }
  std::byte* token(int t) { return tokens_.data() + static_cast<std::size_t>(t) * token_bytes(); }
  std::size_t token_bytes() const { return static_cast<std::size_t>(case_.k) * size_of(case_.x); }
  MatrixView token_view() const {
    MatrixView view{tokens_.data(), case_.x, num_tokens_, case_.k, case_.k};
    if (case_.x == DType::kF8E4M3) {
      view.scale = token_scales_.data();
      view.scale_rows = 1;
      view.scale_cols = 128;
      view.scale_stride = static_cast<std::int64_t>(groups());
    }
    return view;
  }

  void make_rows() {
    num_tokens_ = case_.total() / 2 + 2;
    tokens_.resize(static_cast<std::size_t>(num_tokens_) * token_bytes());
    const bool fp8 = case_.x == DType::kF8E4M3;
    for (int t = 0; t < num_tokens_; ++t) {
      for (int c = 0; c < case_.k; ++c) {
        encode(normal() * (fp8 ? 64 : 1), case_.x,
               token(t) + static_cast<std::size_t>(c) * size_of(case_.x));
      }
      for (std::size_t g = 0; fp8 && g < groups(); ++g) {
        token_scales_.push_back(std::exp2(normal()) / 64);
      }
    }
    count_rows();
    std::uniform_int_distribution<int> any(0, num_tokens_ - 1);
    for (int r = 0; r < case_.total(); ++r) {
      tokens_of_rows_.push_back(any(random_));
      row_weights_.push_back(normal());
      places_.push_back(r);
    }
    // Some rows are not stored, and some places are nobody's.
    for (int i = 0; i < 3; ++i) places_.push_back(case_.total() + i);
    std::shuffle(places_.begin(), places_.end(), random_);
    places_.resize(static_cast<std::size_t>(case_.total()));
    for (std::size_t r = 3; r < places_.size(); r += 7) places_[r] = -1;
  }

  void count_rows() {
    ends_.resize(case_.rows.size());
    std::partial_sum(case_.rows.begin(), case_.rows.end(), ends_.begin());
    narrow_ends_.assign(ends_.begin(), ends_.end());
  }

  // The rows of a layout in packed order: each one's place.
  std::vector<std::int64_t> places_in(const RowLayout& layout) const {
    const std::vector<std::int64_t> first = first_rows(layout, ends_);
    std::vector<std::int64_t> places;
    for (std::size_t e = 0; e < case_.rows.size(); ++e) {
      for (int r = 0; r < case_.rows[e]; ++r) places.push_back(first[e] + r);
    }
    return places;
  }

  template <typename Real>
  Rows solve() const;

  Case case_;
  std::mt19937_64 random_;
  std::vector<std::byte> memory_;
  std::deque<std::vector<float>> scales_;
  std::deque<std::vector<std::byte>> biases_;  // and scales of four-bit weights
  GroupedGemmWeights weights_;
  int num_tokens_ = 0;
  std::vector<std::byte> tokens_;  // [tokens][K]
  std::vector<float> token_scales_;
  std::vector<int> tokens_of_rows_;  // [rows]
  std::vector<float> row_weights_;
  std::vector<std::int32_t> places_, narrow_ends_;
  std::vector<std::int64_t> ends_;
};

inline Rows Problem::run(GroupedGemm& gemm, const Call& call) const {
  GroupedInput input{.layout = case_.in};
  if (case_.wide_ends) {
    input.ends = ends_;
  } else {
    input.ends = narrow_ends_;
  }
  // The rows, copied to where the layout has them; or an index of them.
  const std::vector<std::int64_t> in = places_in(case_.in);
  const std::int64_t in_rows = first_rows(case_.in, ends_).back() + 2;
  const auto num_rows = static_cast<std::size_t>(in_rows);
  const std::size_t stride = static_cast<std::size_t>(case_.k + case_.pad);
  std::vector<std::byte> copied;
  std::vector<float> copied_scales;
  std::vector<std::int32_t> index;
  if (case_.gathered) {
    copied.assign(num_rows * stride * size_of(case_.x), kPoison);
    copied_scales.assign(num_rows * (groups() + 1), NAN);
    for (std::size_t r = 0; r < in.size(); ++r) {
      const auto t = static_cast<std::size_t>(tokens_of_rows_[r]);
      const auto to = static_cast<std::size_t>(in[r]);
      std::memcpy(&copied[to * stride * size_of(case_.x)], &tokens_[t * token_bytes()],
                  token_bytes());
      if (case_.x == DType::kF8E4M3) {
        std::copy_n(&token_scales_[t * groups()], groups(), &copied_scales[to * (groups() + 1)]);
      }
    }
    input.x = {copied.data(), case_.x, in_rows, case_.k, static_cast<std::int64_t>(stride)};
    if (case_.x == DType::kF8E4M3) {
      input.x.scale = copied_scales.data();
      input.x.scale_rows = 1;
      input.x.scale_cols = 128;
      input.x.scale_stride = static_cast<std::int64_t>(groups()) + 1;
    }
  } else {
    index.assign(num_rows, std::numeric_limits<std::int32_t>::max());
    for (std::size_t r = 0; r < in.size(); ++r) {
      index[static_cast<std::size_t>(in[r])] = tokens_of_rows_[r];
    }
    input.x = token_view();
    input.index = index;
  }

  GroupedOutput output;
  std::vector<std::int64_t> to = places_in(case_.to);
  std::int64_t out_rows = first_rows(case_.to, ends_).back() + 2;
  if (case_.scattered) {
    to.assign(places_.begin(), places_.end());
    out_rows = case_.total() + 3;
    output.index = places_;
  } else {
    output.layout = case_.to;
  }
  const std::int64_t out_stride = columns() + case_.pad, products_stride = case_.n + 2 * case_.pad;
  std::vector<std::byte> out(static_cast<std::size_t>(out_rows * out_stride) * size_of(case_.out),
                             kPoison);
  std::vector<std::byte> products(
      static_cast<std::size_t>(case_.products ? out_rows * products_stride : 0) *
          size_of(case_.out),
      kPoison);
  output.data = out.data();
  output.dtype = case_.out;
  output.row_stride = case_.pad == 0 ? 0 : out_stride;
  output.rows = out_rows;
  if (case_.weighted) output.weights = row_weights_;
  if (case_.products) output.products = products.data();
  output.products_stride = case_.pad == 0 ? 0 : products_stride;
  if (call) {
    call(gemm, input, output, case_.gathered ? copied : tokens_, out, products);
  } else {
    gemm.run(input, output);
  }

  // Takes rows out, and leaves poison where they were.
  const auto take = [&](std::vector<std::byte>& from, std::int64_t row_stride, int cols,
                        auto&& column_of) {
    std::vector<std::vector<float>> taken;
    for (std::size_t r = 0; r < to.size(); ++r) {
      std::vector<float>& row = taken.emplace_back();
      for (int c = 0; to[r] >= 0 && c < cols; ++c) {
        std::byte* const at =
            from.data() +
            static_cast<std::size_t>(to[r] * row_stride + column_of(c)) * size_of(case_.out);
        row.push_back(decode(at, case_.out));
        std::memset(at, static_cast<int>(kPoison), size_of(case_.out));
      }
    }
    EXPECT_TRUE(std::all_of(from.begin(), from.end(), [](std::byte b) { return b == kPoison; }))
        << "memory of no row was written";
    return taken;
  };
  Rows rows;
  rows.output = take(out, out_stride, columns(), [](int c) { return c; });
  if (case_.products) {
    rows.products = take(products, products_stride, case_.n, [&](int c) { return physical(c); });
  }
  return rows;
}

template <typename Real>
Real apply_plainly(const Activation& a, Real v) {
  switch (a.kind) {
    case ActivationKind::kSilu: return v / (1 + std::exp(-static_cast<Real>(a.alpha) * v));
    case ActivationKind::kGelu: return v / 2 * (1 + std::erf(v / std::sqrt(Real{2})));
    case ActivationKind::kGeluTanh:
      return v / 2 *
             (1 + std::tanh(std::sqrt(2 / std::acos(Real{-1})) *
                            (v + static_cast<Real>(0.044715) * v * v * v)));
    case ActivationKind::kRelu: return v > 0 ? v : 0;
    case ActivationKind::kRelu2: return v > 0 ? v * v : 0;
    case ActivationKind::kSitu: {
      const auto alpha = static_cast<Real>(a.alpha);
      return alpha * std::tanh(v / alpha) / (1 + std::exp(-v));
    }
    case ActivationKind::kIdentity: break;
  }
  return v;
}

// double: exactly. float: as a plain program of the compute type does it.
template <typename Real>
Rows Problem::solve() const {
  constexpr bool kExact = std::is_same_v<Real, double>;
  const DType type = compute();
  const auto operand = [&](double value) -> Real {
    if (kExact) return static_cast<Real>(value);
    const auto single = static_cast<float>(value);
    return type == DType::kBF16 || type == DType::kF16 ? rounded(single, type) : single;
  };
  const auto k = static_cast<std::size_t>(case_.k), n = static_cast<std::size_t>(case_.n);
  std::vector<double> row(k);
  // In FP8 the problem is the quantised one, for fp64, too.
  std::vector<std::vector<Real>> x;
  Matrix wide(num_tokens_, case_.k, DType::kBF16);
  MatrixView tokens = token_view();
  std::optional<Matrix> quantised;
  if (type == DType::kF8E4M3 && case_.x != DType::kF8E4M3) {
    for (int t = 0; t < num_tokens_; ++t) {
      reference::decode_row(tokens, t, row.data());
      for (std::size_t c = 0; c < k; ++c) {
        wide.set(t * std::int64_t{case_.k} + static_cast<std::int64_t>(c),
                 static_cast<float>(row[c]));
      }
    }
    const bool by_row = case_.backend == Backend::kCuda && is_four_bit(case_.weight);
    tokens = quantised.emplace(Matrix::quantised(wide, by_row)).view();
  }
  for (int t = 0; t < num_tokens_; ++t) {
    reference::decode_row(tokens, t, row.data());
    std::vector<Real>& values = x.emplace_back();
    for (const double value : row) values.push_back(operand(value));
  }

  Rows rows;
  std::size_t r = 0;
  for (std::size_t e = 0; e < case_.rows.size(); ++e) {
    if (case_.rows[e] == 0) continue;
    std::vector<std::vector<Real>> w(n, std::vector<Real>(k));
    for (std::size_t i = 0; i < n; ++i) {
      reference::decode_row(weights_.matrices[e], physical(static_cast<int>(i)), row.data());
      for (std::size_t c = 0; c < k; ++c) w[i][c] = operand(row[c]);
    }
    std::vector<double> bias(n, 0.0);
    if (case_.biased) reference::decode_vector(weights_.biases[e], bias.data());
    for (int i = 0; i < case_.rows[e]; ++i, ++r) {
      const std::vector<Real>& token = x[static_cast<std::size_t>(tokens_of_rows_[r])];
      std::vector<Real> products(n);
      for (std::size_t j = 0; j < n; ++j) {
        Real sum = 0;
        for (std::size_t c = 0; c < k; ++c) sum += token[c] * w[j][c];
        products[j] =
            sum + static_cast<Real>(bias[static_cast<std::size_t>(physical(static_cast<int>(j)))]);
      }
      std::vector<float> out;
      for (std::size_t j = 0; j < static_cast<std::size_t>(columns()); ++j) {
        Real value = products[j];
        if (case_.gated()) {
          const auto limit = static_cast<Real>(case_.epilogue->limit);
          const bool bends = case_.epilogue->kind == ActivationKind::kSitu;
          const Real up = products[n / 2 + j];
          const Real bounded = !bends              ? std::clamp(up, -limit, limit)
                               : std::isinf(limit) ? up
                                                   : limit * std::tanh(up / limit);
          value = apply_plainly(*case_.epilogue, bends ? value : std::min(value, limit)) *
                  (bounded + static_cast<Real>(case_.epilogue->up_bias));
        } else if (case_.epilogue) {
          value = apply_plainly(*case_.epilogue, value);
        }
        if (case_.weighted) value *= static_cast<Real>(row_weights_[r]);
        out.push_back(kExact ? static_cast<float>(value)
                             : rounded(static_cast<float>(value), case_.out));
      }
      if (case_.scattered && places_[r] < 0) out.clear();
      rows.output.push_back(out);
      if (!case_.products) continue;
      std::vector<float>& kept = rows.products.emplace_back();
      for (const Real value : products) {
        kept.push_back(kExact ? static_cast<float>(value)
                              : rounded(static_cast<float>(value), case_.out));
      }
    }
  }
  return rows;
}

inline double distance(const std::vector<std::vector<float>>& actual,
                       const std::vector<std::vector<float>>& expected) {
  std::vector<double> a, b;
  for (const auto& row : actual) a.insert(a.end(), row.begin(), row.end());
  for (const auto& row : expected) b.insert(b.end(), row.begin(), row.end());
  return reference::relative_error(std::span<const double>(a), b);
}

// Below twice the error of a plain program. `exact()` and the activations of src/cpu/vector.h are
// good to a few units of fp32's last place, which alone separate the two where both are in fp32.
inline void expect_as_good(const Problem& problem, const Rows& rows, double further = 0) {
  const double fp32 = 4 * 0x1p-23 + further;
  const Rows exact = problem.exact(), plain = problem.straightforward();
  EXPECT_LE(distance(rows.output, exact.output), 2 * distance(plain.output, exact.output) + fp32);
  if (rows.products.empty()) return;
  EXPECT_LE(distance(rows.products, exact.products),
            2 * distance(plain.products, exact.products) + fp32);
}

}  // namespace switchyard::testing
