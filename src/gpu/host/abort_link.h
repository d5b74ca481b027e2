// How the host ends passes while their kernels run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gpu/device.h"
#include "gpu/host/cuda_error.h"
#include "gpu/host/mapped_memory.h"
#include "protocol/control.h"

namespace switchyard::gpu {

// Must be made beforehand, with the device current: while ranks wait for each other nothing may be
// allocated.
class AbortLink {
 public:
  explicit AbortLink(int device) : device_(device) {}
  AbortLink(const AbortLink&) = delete;
  AbortLink& operator=(const AbortLink&) = delete;

  // Raises the abort words of all ranks, for kernels that run and for all later ones. The copies
  // have a stream of their own, which kernels do not hold up. Any thread may call it, one at a
  // time.
  void raise(const protocol::Heaps& heaps, std::uint64_t word) const noexcept {
    raise(word, heaps.size(), [&heaps](int rank) { return &heaps.control(rank)->abort; });
  }
  // Does so for a rank that gives up what it destroys.
  void raise(const protocol::Heaps& heaps) const noexcept {
    raise(heaps, protocol::kCalledOff | static_cast<std::uint64_t>(heaps.rank + 1));
  }
  // Does the same for other words: word_of(rank) is the address of a rank's.
  template <typename WordOf>
  void raise(std::uint64_t value, int ranks, const WordOf& word_of) const noexcept {
    int before = 0;
    const bool known = cudaGetDevice(&before) == cudaSuccess;
    if (cudaSetDevice(device_) != cudaSuccess) return;
    auto* const word = const_cast<std::uint64_t*>(&*word_);
    *word = value;
    const auto stream = static_cast<cudaStream_t>(stream_.handle());
    for (int r = 0; r < ranks; ++r) {
      // A rank that is gone needs no word.
      (void)cudaMemcpyAsync(word_of(r), word, sizeof *word, cudaMemcpyDefault, stream);
    }
    (void)cudaStreamSynchronize(stream);
    if (known) (void)cudaSetDevice(before);
  }
  // Writes why this rank gives up, and then raises the abort words of all ranks for that reason.
  void raise(const protocol::Heaps& heaps, const protocol::FailureRecord& record) const noexcept {
    int before = 0;
    const bool known = cudaGetDevice(&before) == cudaSuccess;
    if (cudaSetDevice(device_) != cudaSuccess) return;
    (void)cudaMemcpyAsync(&heaps.control(heaps.rank)->failure, &record, sizeof record,
                          cudaMemcpyDefault, static_cast<cudaStream_t>(stream_.handle()));
    (void)cudaStreamSynchronize(static_cast<cudaStream_t>(stream_.handle()));
    if (known) (void)cudaSetDevice(before);
    raise(static_cast<std::uint64_t>(heaps.rank) + 1, heaps.size(),
          [&heaps](int rank) { return &heaps.control(rank)->abort; });
  }
  // Reads a rank's Control by a copy that kernels do not hold up either: another stream of the
  // device may stand still until this has been read. Requires that the device is current; one call
  // at a time.
  protocol::Control read(const protocol::Heaps& heaps, int rank) const {
    auto* const control = const_cast<protocol::Control*>(&*control_);
    const auto stream = static_cast<cudaStream_t>(reading_.handle());
    SWITCHYARD_CUDA(
        cudaMemcpyAsync(control, heaps.control(rank), sizeof *control, cudaMemcpyDefault, stream));
    SWITCHYARD_CUDA(cudaStreamSynchronize(stream));
    return *control;
  }

 private:
  int device_;
  Stream stream_, reading_;
  MappedMemory<std::uint64_t> word_;
  MappedMemory<protocol::Control> control_;
};

}  // namespace switchyard::gpu
