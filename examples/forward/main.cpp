// Runs one MoE layer of a Hugging Face checkpoint over four ranks of this process.
//
//   forward CHECKPOINT LAYER
#include <cstdio>
#include <cstdlib>
#include <thread>

// README: begin
#include <switchyard/checkpoint.h>
#include <switchyard/layer.h>

#include <vector>

using namespace switchyard;

// Runs one rank. Every rank of the world calls this, on a thread or in a process of its own.
std::vector<float> run_layer(const World& world, const Checkpoint& checkpoint, int layer_index,
                             const std::vector<float>& x) {
  const LayerSpec spec = checkpoint.layer_spec(layer_index);
  const MoeWeights weights = checkpoint.load_layer(layer_index);  // mapped, not read
  const int tokens = static_cast<int>(x.size()) / spec.hidden;    // ranks may differ; 0 is fine

  MoeLayer layer(world, spec, weights, {.max_tokens = 4096});  // collective
  std::vector<float> y(x.size());
  ForwardInput input;
  input.activations = {x.data(), DType::kF32, tokens, spec.hidden, spec.hidden};
  ForwardOutput output;
  output.data = y.data();
  output.dtype = DType::kF32;
  layer.forward(input, output);  // throws TimeoutError, naming the rank, if one stalls or dies
  return y;
}
// README: end

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s CHECKPOINT LAYER\n", argv[0]);
    return 2;
  }
  try {
    const Checkpoint checkpoint = Checkpoint::open(argv[1]);
    const int layer_index = std::atoi(argv[2]);
    const LayerSpec spec = checkpoint.layer_spec(layer_index);
    std::printf("%s: %s\n", checkpoint.model_type().c_str(), describe(spec).c_str());

    constexpr int kRanks = 4;
    constexpr int kTokensPerRank = 32;
    std::vector<std::thread> ranks;
    std::vector<int> failures(kRanks);
    for (const World& world : World::threads(kRanks)) {
      ranks.emplace_back([&, world] {
        try {
          std::vector<float> x(static_cast<std::size_t>(kTokensPerRank) * spec.hidden);
          for (std::size_t i = 0; i < x.size(); ++i) {
            x[i] = static_cast<float>((i * 2654435761u + world.rank()) % 2048) / 1024.0f - 1.0f;
          }
          double norm = 0;
          for (const float v : run_layer(world, checkpoint, layer_index, x)) {
            norm += static_cast<double>(v) * v;
          }
          std::printf("rank %d: |y|^2 = %.6g\n", world.rank(), norm);
        } catch (const Error& error) {
          std::fprintf(stderr, "rank %d: %s: %s\n", world.rank(), to_string(error.code()),
                       error.what());
          failures[static_cast<std::size_t>(world.rank())] = 1;
        }
      });
    }
    for (std::thread& rank : ranks) rank.join();
    for (const int failed : failures) {
      if (failed) return 1;
    }
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
    return 1;
  }
}
