// Runs one MoE layer of a Hugging Face checkpoint on GPUs, a process to each, from a CUDA graph.
//
//   forward_cuda CHECKPOINT LAYER                             one GPU
//   switchyard launch -n 2 -- forward_cuda CHECKPOINT LAYER   two; or torchrun, mpirun
#include <cuda_runtime_api.h>
#include <switchyard/checkpoint.h>
#include <switchyard/layer.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

using namespace switchyard;

namespace {

constexpr int kTokens = 32;

void require(cudaError_t result) {
  if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
}

// bf16 between -1 and 1.
std::vector<std::uint16_t> activations(std::size_t size, std::uint32_t seed) {
  std::vector<std::uint16_t> x(size);
  for (std::size_t i = 0; i < size; ++i) {
    const float v = static_cast<float>((i * 2654435761u + seed) % 2048) / 1024.0f - 1.0f;
    std::uint32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    x[i] = static_cast<std::uint16_t>(bits >> 16);
  }
  return x;
}

void run(const char* directory, int layer_index) {
  const Checkpoint checkpoint = Checkpoint::open(directory);
  const LayerSpec spec = checkpoint.layer_spec(layer_index);
  MoeWeights weights = checkpoint.load_layer(layer_index);  // mapped, not read

  const World world = World::from_environment();
  // On one host, the launchers' local rank: the GPU that this process is to have.
  const char* const local_rank = std::getenv("LOCAL_RANK");
  const int device = local_rank != nullptr ? std::atoi(local_rank) : world.rank();
  require(cudaSetDevice(device));
  // A rank needs no other experts' weights.
  const ExpertRange own = own_experts(spec.num_experts, world.rank(), world.size());
  for (int e = 0; e < spec.num_experts; ++e) {
    if (e < own.begin || e >= own.end) weights.experts[static_cast<std::size_t>(e)] = {};
  }
  MoeLayer layer(world, spec, weights,
                 {.backend = Backend::kCuda, .max_tokens = kTokens, .cuda = {.device = device}});

  const std::size_t size = static_cast<std::size_t>(kTokens) * spec.hidden;
  void *x = nullptr, *y = nullptr;
  cudaStream_t stream = nullptr;
  require(cudaMalloc(&x, size * 2));
  require(cudaMalloc(&y, size * 2));
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  ForwardInput input;
  input.activations = {x, DType::kBF16, kTokens, spec.hidden, spec.hidden};
  input.stream = stream;
  const ForwardOutput output{.data = y, .dtype = DType::kBF16};

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t passes = nullptr;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  layer.forward(input, output);  // a kernel, and nothing else
  require(cudaStreamEndCapture(stream, &graph));
  require(cudaGraphInstantiate(&passes, graph, 0));

  for (std::uint32_t pass = 0; pass < 3; ++pass) {
    // Other activations in the same memory, and with them other routing.
    const auto host = activations(size, pass * 77 + static_cast<std::uint32_t>(world.rank()));
    require(cudaMemcpyAsync(x, host.data(), size * 2, cudaMemcpyDefault, stream));
    require(cudaGraphLaunch(passes, stream));
    std::vector<std::uint16_t> result(size);
    require(cudaMemcpyAsync(result.data(), y, size * 2, cudaMemcpyDefault, stream));
    require(cudaStreamSynchronize(stream));
    layer.check();  // a rank that stalled, an id out of range: nobody else would say so
    double norm = 0;
    for (const std::uint16_t code : result) {
      const std::uint32_t bits = static_cast<std::uint32_t>(code) << 16;
      float v;
      std::memcpy(&v, &bits, sizeof v);
      norm += static_cast<double>(v) * v;
    }
    std::printf("rank %d on GPU %d, pass %u: |y|^2 = %.6g\n", world.rank(), device, pass, norm);
  }
  require(cudaGraphExecDestroy(passes));
  require(cudaGraphDestroy(graph));
  require(cudaStreamDestroy(stream));
  require(cudaFree(x));
  require(cudaFree(y));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s CHECKPOINT LAYER\n", argv[0]);
    return 2;
  }
  try {
    run(argv[1], std::atoi(argv[2]));
    return 0;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 1;
}
