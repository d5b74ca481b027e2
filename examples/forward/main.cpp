// Runs one MoE layer of a Hugging Face checkpoint over four ranks of this process.
//
//   forward CHECKPOINT LAYER
#include <switchyard/layer.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using namespace switchyard;

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s CHECKPOINT LAYER\n", argv[0]);
    return 2;
  }
  try {
    const Checkpoint checkpoint = Checkpoint::open(argv[1]);
    const int layer_index = std::atoi(argv[2]);
    const LayerSpec spec = checkpoint.layer_spec(layer_index);
    const MoeWeights weights = checkpoint.load_layer(layer_index);  // mapped, not read
    std::printf("%s: %s\n", checkpoint.model_type().c_str(), describe(spec).c_str());

    constexpr int kRanks = 4;
    constexpr int kTokensPerRank = 32;
    std::vector<std::thread> ranks;
    std::vector<int> failures(kRanks);
    for (const World& world : World::threads(kRanks)) {
      ranks.emplace_back([&, world] {
        try {
          MoeLayer layer(world, spec, weights, {.max_tokens = kTokensPerRank});
          const std::size_t size = static_cast<std::size_t>(kTokensPerRank) * spec.hidden;
          std::vector<float> x(size), y(size);
          for (std::size_t i = 0; i < size; ++i) {
            x[i] = static_cast<float>((i * 2654435761u + world.rank()) % 2048) / 1024.0f - 1.0f;
          }
          ForwardInput input;
          input.activations = {x.data(), DType::kF32, kTokensPerRank, spec.hidden, spec.hidden};
          ForwardOutput output;
          output.data = y.data();
          output.dtype = DType::kF32;
          layer.forward(input, output);
          double norm = 0;
          for (const float v : y) norm += static_cast<double>(v) * v;
          std::printf(
              "rank %d: |y|^2 = %.6g, %.2f ms, sent %.1f KiB\n", world.rank(), norm,
              layer.stats().total_seconds * 1e3,
              static_cast<double>(layer.stats().dispatch_bytes + layer.stats().combine_bytes) /
                  1024);
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
