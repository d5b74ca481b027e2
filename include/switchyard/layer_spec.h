// The mathematical definition of an MoE layer, independent of where its weights are and of how it
// is executed.
//
//   logits      = x Wr^T (+ router bias), in fp32
//   ids, w      = route(logits)                                  [T, K], see RoutingSpec
//   y_e(x)      = down_e( act(gate_e x, up_e x) ) + biases       the expert FFN
//   out[t]      = sum_k w[t,k] y_{ids[t,k]}(x[t])  +  s(x[t]) shared(x[t])
//
// with s(x) = sigmoid(x . shared_gate) for sigmoid-gated shared experts and 1 otherwise.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace switchyard {

enum class ActivationKind : std::uint8_t {
  kSilu,      // v * sigmoid(alpha v)
  kGelu,      // 0.5 v (1 + erf(v / sqrt 2))
  kGeluTanh,  // 0.5 v (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3)))
  kRelu,      // max(v, 0)
  kRelu2,     // max(v, 0)^2
  kIdentity,
  kSitu,  // alpha tanh(v / alpha) sigmoid(v), gated only: Kimi-K3, Inkling 2
};

// Gated FFN:  h = f(min(g, limit)) * (clamp(u, -limit, limit) + up_bias)   (SwiGLU, GeGLU, ...;
//             GPT-OSS: alpha 1.702, limit 7, up_bias 1; DeepSeek-V4: limit 10).
//             kSitu approaches the limit instead: h = f(g) * (limit tanh(u / limit) + up_bias);
//             Kimi-K3: alpha 4, limit 25.
// Plain FFN:  h = f(u).
struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  bool gated = true;
  float alpha = 1.0f;  // kSilu and kSitu only
  float limit = std::numeric_limits<float>::infinity();
  float up_bias = 0.0f;

  friend bool operator==(const Activation&, const Activation&) = default;
};

enum class RoutingMethod : std::uint8_t {
  kTopK,         // score, choose, weight as below
  kSparseMixer,  // Phi-3.5-MoE: two rounds of masked softmax with threshold 2 * jitter_eps; top-2
  kHash,         // DeepSeek-V4: experts come from a table indexed by token id, weights from scores
};
enum class ScoreFunction : std::uint8_t {
  kSoftmax,
  kSigmoid,
  kSqrtSoftplus,  // sqrt(log(1 + exp(logit)))
};
enum class GroupScore : std::uint8_t {
  kMax,        // DeepSeek-V2 "group_limited_greedy": a group's score is its best expert's
  kSumTopTwo,  // DeepSeek-V3 "noaux_tc": the sum of its two best (with correction bias)
};

// How logits become expert ids and weights. Ties break towards the lower index, everywhere.
struct RoutingSpec {
  RoutingMethod method = RoutingMethod::kTopK;
  ScoreFunction score = ScoreFunction::kSoftmax;
  // true: choose by raw logit, then score only the chosen (GPT-OSS's softmax over the top-k,
  // Llama-4's sigmoid). false: score all experts, then choose.
  bool top_k_before_score = false;
  // Divide the chosen weights by their sum + renormalize_epsilon.
  bool renormalize = false;
  float renormalize_epsilon = 0.0f;
  // A per-expert bias added to the score for choosing, not for weighting (e_score_correction_bias).
  bool has_correction_bias = false;
  // Group-limited choice: experts form num_groups equal groups; only the best top_k_groups compete.
  int num_groups = 1;
  int top_k_groups = 1;
  GroupScore group_score = GroupScore::kSumTopTwo;
  float scale = 1.0f;        // multiplies the weights, after renormalisation
  float jitter_eps = 0.01f;  // kSparseMixer

  friend bool operator==(const RoutingSpec&, const RoutingSpec&) = default;
};

// How many slots an expert keeps of a rank's T tokens, with a factor F.
enum class CapacityRule : std::uint8_t {
  kSlots,   // ceil(F * K * T / E): F = 1 is an even share of all slots (GShard)
  kTokens,  // ceil(F * T / E): F = 1 is an even share of one slot for each token (FlashDMoE)
};

struct LayerSpec {
  int hidden = 0;        // H, columns of an activation row
  int intermediate = 0;  // I, rows of gate_proj / up_proj of one routed expert
  int num_experts = 0;   // E, routed experts over all ranks
  int top_k = 0;         // K, experts per token
  Activation activation{};
  RoutingSpec routing{};
  bool router_bias = false;  // logits += bias
  bool expert_bias = false;  // gate/up/down projections of routed experts have biases
  // Intermediate size of the shared expert (several are one FFN of the summed width); 0: none.
  int shared_intermediate = 0;
  bool shared_sigmoid_gate = false;
  // Llama-4: the routing weight multiplies the expert's input instead of its output.
  bool weight_on_input = false;
  // 0: nothing is ever dropped. Otherwise each expert keeps at most expert_capacity() slots of each
  // rank's tokens, in token order; a dropped slot contributes nothing and is counted.
  float capacity_factor = 0.0f;
  CapacityRule capacity_rule = CapacityRule::kSlots;

  friend bool operator==(const LayerSpec&, const LayerSpec&) = default;
};

// The most slots of one rank with `tokens` tokens that an expert keeps; kNoCapacity where nothing
// is dropped.
inline constexpr std::uint32_t kNoCapacity = 0xffffffff;
std::uint32_t expert_capacity(const LayerSpec& spec, std::int64_t tokens);

// Throws Error{kInvalidArgument} naming the first field that makes no sense and its value.
void validate(const LayerSpec& spec);

// The activation's usual name: "swiglu", "gelu (tanh)", "relu2".
const char* name_of(const Activation& activation);
// The score function's name: "softmax", "sigmoid", "sqrt-softplus".
const char* name_of(ScoreFunction score);

// The layer in one line, e.g. "H 2048, I 1024, 64 experts, top-8, softmax, swiglu".
std::string describe(const LayerSpec& spec);

}  // namespace switchyard
