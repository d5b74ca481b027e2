#include "gpu/host/shown_word.h"

#include <unistd.h>

#include <map>
#include <mutex>

namespace switchyard::gpu {
namespace {

// Pages of records that the device writes to, with how many use each: a page cannot be registered
// twice.
struct Pages {
  std::mutex mutex;
  std::map<void*, int> users;
};
Pages& pages() {
  static auto* const pages = new Pages;  // used while the process ends, too
  return *pages;
}

void* page_of(std::uint64_t* word) {
  const auto size = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(word) / size * size);
}

bool take(void* page) {
  const std::lock_guard lock(pages().mutex);
  int& users = pages().users[page];
  if (users == 0) {
    const auto size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    if (cudaHostRegister(page, size, cudaHostRegisterPortable | cudaHostRegisterMapped) !=
        cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
  }
  ++users;
  return true;
}

void give_back(void* page) {
  const std::lock_guard lock(pages().mutex);
  if (--pages().users[page] == 0) (void)cudaHostUnregister(page);
}

}  // namespace

ShownWord::ShownWord(const protocol::WorldView& view, protocol::Heaps& heaps, const AbortLink& link)
    : view_(view) {
  if (!view_.record || !view_.names.empty()) return;
  std::uint64_t* const word = view_.record->own_word();
  if (!take(page_of(word))) return;
  page_ = page_of(word);
  void* on_device = nullptr;
  if (cudaHostGetDevicePointer(&on_device, word, 0) != cudaSuccess) {
    (void)cudaGetLastError();
    return;
  }
  heaps.shown = static_cast<std::uint64_t*>(on_device);
  hook_.emplace(*view_.record, [&heaps, &link](const protocol::WaitsFor& wait) {
    link.raise(heaps,
               {heaps.rank, wait.peer, protocol::Phase::kLink, wait.epoch, 0, 0, 0, 1, heaps.rank});
  });
}

ShownWord::~ShownWord() {
  hook_.reset();
  if (page_ != nullptr) give_back(page_);
}

}  // namespace switchyard::gpu
