/* Experts of a layer over routing that the caller has, from C: two ranks would each do the same on
 * a world of two.
 *
 *   cc -std=c11 main.c -lswitchyard_c && ./a.out
 */
#include <stdio.h>
#include <stdlib.h>
#include <switchyard/c.h>

enum { kTokens = 5, kHidden = 64, kIntermediate = 32, kExperts = 4, kTopK = 2 };

static float w_gate_up[kExperts][2 * kIntermediate][kHidden];
static float w_down[kExperts][kHidden][kIntermediate];
static float x[kTokens][kHidden], y[kTokens][kHidden];

static void fill(float* to, size_t count, float scale) {
  static uint32_t state = 1;
  for (size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    to[i] = scale * ((float)(state >> 8) / (float)(1 << 23) - 1.0f);
  }
}

static sy_tensor tensor(void* data, sy_dtype dtype, int32_t ndim, int64_t a, int64_t b, int64_t c) {
  sy_tensor t = {
      .data = data, .dtype = dtype, .ndim = ndim, .device_type = SY_CPU, .shape = {a, b, c}};
  t.strides[ndim - 1] = 1;
  for (int32_t d = ndim - 2; d >= 0; --d) t.strides[d] = t.strides[d + 1] * t.shape[d + 1];
  return t;
}

static void check(sy_status status, const char* what) {
  if (status == SY_OK) return;
  sy_error error = SY_ERROR_INIT;
  sy_last_error(&error);
  fprintf(stderr, "%s: %s: %s\n", what, sy_status_name(status), error.message);
  if (error.wait_failed) fprintf(stderr, "rank %d did not come\n", error.peer_rank);
  exit(1);
}

int main(void) {
  if (sy_abi_version() != SY_ABI_VERSION) {
    fprintf(stderr, "libswitchyard_c has ABI %u, this program needs %u\n", sy_abi_version(),
            SY_ABI_VERSION);
    return 1;
  }
  fill(&w_gate_up[0][0][0], sizeof w_gate_up / sizeof(float), 0.2f);
  fill(&w_down[0][0][0], sizeof w_down / sizeof(float), 0.2f);
  fill(&x[0][0], sizeof x / sizeof(float), 1.0f);

  sy_world* world = NULL;
  check(sy_world_single(NULL, &world), "world");

  sy_layer_spec spec = SY_LAYER_SPEC_INIT; /* SwiGLU */
  spec.hidden = kHidden;
  spec.intermediate = kIntermediate;
  spec.num_experts = kExperts;
  spec.top_k = kTopK;
  /* Gate and up are views of one tensor: [E, 2, I, H]. The layer copies neither. */
  sy_layer_weights weights = SY_LAYER_WEIGHTS_INIT;
  weights.gate.weight = tensor(w_gate_up, SY_F32, 3, kExperts, kIntermediate, kHidden);
  weights.gate.weight.strides[0] = 2 * kIntermediate * kHidden;
  weights.up.weight = weights.gate.weight;
  weights.up.weight.data = &w_gate_up[0][kIntermediate][0];
  weights.down.weight = tensor(w_down, SY_F32, 3, kExperts, kHidden, kIntermediate);
  sy_layer_options options = SY_LAYER_OPTIONS_INIT;
  options.max_tokens = 64;
  sy_layer* layer = NULL;
  check(sy_layer_create(world, &spec, &weights, &options, &layer), "layer");
  check(sy_world_destroy(&world), "world"); /* the layer keeps it */

  int64_t ids[kTokens][kTopK];
  float topk_weights[kTokens][kTopK];
  for (int t = 0; t < kTokens; ++t) {
    for (int k = 0; k < kTopK; ++k) {
      ids[t][k] = (t + k) % kExperts;
      topk_weights[t][k] = 1.0f / kTopK;
    }
  }
  sy_forward call = SY_FORWARD_INIT;
  call.x = tensor(x, SY_F32, 2, kTokens, kHidden, 0);
  call.topk_ids = tensor(ids, SY_I64, 2, kTokens, kTopK, 0);
  call.topk_weights = tensor(topk_weights, SY_F32, 2, kTokens, kTopK, 0);
  call.out = tensor(y, SY_F32, 2, kTokens, kHidden, 0);
  check(sy_layer_forward(layer, &call), "forward");

  double norm = 0;
  for (int t = 0; t < kTokens; ++t) {
    for (int h = 0; h < kHidden; ++h) norm += (double)y[t][h] * y[t][h];
  }
  sy_stats stats = SY_STATS_INIT;
  check(sy_layer_get_stats(layer, &stats), "stats");
  printf("Switchyard %s: pass %llu of %lld tokens, |y|^2 = %.6g\n", sy_version(),
         (unsigned long long)stats.epoch, (long long)stats.tokens, norm);

  /* What is wrong is said, with the value and the remedy. */
  ids[0][0] = ids[0][1];
  if (sy_layer_forward(layer, &call) != SY_INVALID_ARGUMENT) return 1;
  sy_error error = SY_ERROR_INIT;
  check(sy_last_error(&error), "error");
  printf("refused: %s\n", error.message);

  check(sy_layer_destroy(&layer), "layer");
  check(sy_layer_destroy(&layer), "layer again");
  return norm > 0 ? 0 : 1;
}
