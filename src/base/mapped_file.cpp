#include "base/mapped_file.h"

#include <fmt/core.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "base/file_error.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "switchyard/error.h"

namespace switchyard {

// A mapping as the signal handler sees it. 0 at `begin` makes a slot free: it is written last
// when a slot is taken, and first when it is given back, so that the handler sees a pair that
// belongs together.
struct MappingSlot {
  std::atomic<std::uintptr_t> begin{0}, end{0};
  std::atomic<bool> is_cut{false};
};

namespace {

static_assert(std::atomic<std::uintptr_t>::is_always_lock_free, "the signal handler reads it");

// Slots are never freed, so that the handler may walk them at any time.
struct SlotBlock {
  std::array<MappingSlot, 256> slots;
  std::atomic<SlotBlock*> next{nullptr};
};
SlotBlock first_block;

std::atomic<std::uintptr_t> page_bytes{0};
struct sigaction previous;  // is written before the handler can run

MappingSlot* find_slot(std::uintptr_t address) {
  for (SlotBlock* block = &first_block; block != nullptr;
       block = block->next.load(std::memory_order_acquire)) {
    for (MappingSlot& slot : block->slots) {
      const std::uintptr_t begin = slot.begin.load(std::memory_order_acquire);
      if (begin == 0 || address < begin) continue;
      const std::uintptr_t end = slot.end.load(std::memory_order_acquire);
      if (address < end && slot.begin.load(std::memory_order_acquire) == begin) return &slot;
    }
  }
  return nullptr;
}

// Runs in the signal handler. Several threads may run it for one mapping at a time: each does the
// same once more.
bool fill_with_zeros(std::uintptr_t address) {
  MappingSlot* const slot = find_slot(address);
  if (slot == nullptr) return false;
  const std::uintptr_t from = address / page_bytes.load() * page_bytes.load();
  const std::uintptr_t end = slot->end.load();
  // The mark comes before the zeros: a thread that reads a zero without a fault finds it.
  slot->is_cut.store(true);
  // This is the bare system call: sanitizers wrap mmap() in code that a handler may not run.
  const long mapped = ::syscall(SYS_mmap, from, end - from, PROT_READ,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return mapped == static_cast<long>(from);
}

// Does what the process would do without this file's handler. Runs in the handler.
void pass_on(int signal, siginfo_t* info, void* context) {
  const bool takes_info = (previous.sa_flags & SA_SIGINFO) != 0;
  if (!takes_info && previous.sa_handler == SIG_IGN && info->si_code <= 0) return;  // it was sent
  if (!takes_info && (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN)) {
    ::signal(signal, SIG_DFL);
    // A fault occurs again when the handler returns. A signal that was sent does not.
    if (info->si_code <= 0) ::raise(signal);
    return;
  }
  sigset_t before;
  ::pthread_sigmask(SIG_BLOCK, &previous.sa_mask, &before);
  if (takes_info) {
    previous.sa_sigaction(signal, info, context);
  } else {
    previous.sa_handler(signal);
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void handle(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const bool is_fault = info->si_code > 0;
  if (!is_fault || !fill_with_zeros(reinterpret_cast<std::uintptr_t>(info->si_addr)))
    pass_on(signal, info, context);
  errno = error;
}

void install_handler() {
  page_bytes = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  struct sigaction action {};
  action.sa_sigaction = handle;
  // The handler uses the thread's other stack where it has one: its owner may have made the usual
  // one small.
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  ::sigaction(SIGBUS, nullptr, &previous);
  ::sigaction(SIGBUS, &action, &previous);
}

// Guards taking and returning slots, and knows mappings by their addresses.
struct Registry {
  std::mutex mutex;
  std::map<std::uintptr_t, std::weak_ptr<const MappedFile>> by_begin;
};

Registry& registry() {
  // The registry is never destroyed: mappings in other static objects may outlive it.
  static Registry* const made = new Registry;
  return *made;
}

// Called with the registry's mutex held.
MappingSlot* take_slot(std::uintptr_t begin, std::uintptr_t end) {
  for (SlotBlock* block = &first_block;;) {
    for (MappingSlot& slot : block->slots) {
      if (slot.begin.load() != 0) continue;
      slot.is_cut.store(false);
      slot.end.store(end);
      slot.begin.store(begin);
      return &slot;
    }
    if (block->next.load() == nullptr) block->next.store(new SlotBlock);
    block = block->next.load();
  }
}

std::uintptr_t address_of(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::map(const std::filesystem::path& path) {
  static std::once_flag installed;
  std::call_once(installed, install_handler);
  const InputFile input = open_input(path);
  const std::shared_ptr<MappedFile> file(new MappedFile);
  file->path_ = path;
  file->device_ = input.device;
  file->inode_ = input.inode;
  if (input.bytes == 0) return file;
  const auto size = static_cast<std::size_t>(input.bytes);
  // The mapping is shared, so that ranks in several processes use one copy of the page cache.
  void* const mapping = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, input.fd.get(), 0);
  if (mapping == MAP_FAILED) throw_file_error(path, "mmap");
  file->data_ = static_cast<const std::byte*>(mapping);
  file->size_ = size;
  const std::uintptr_t page = page_bytes.load();
  const std::lock_guard lock(registry().mutex);
  registry().by_begin[address_of(mapping)] = file;
  file->slot_ =
      take_slot(address_of(mapping), address_of(mapping) + (size + page - 1) / page * page);
  return file;
}

std::shared_ptr<const MappedFile> MappedFile::at(const void* address) {
  const std::lock_guard lock(registry().mutex);
  auto after = registry().by_begin.upper_bound(address_of(address));
  if (after == registry().by_begin.begin()) return nullptr;
  std::shared_ptr<const MappedFile> file = std::prev(after)->second.lock();
  const bool is_inside =
      file != nullptr && address_of(address) - address_of(file->data_) < file->size_;
  return is_inside ? file : nullptr;
}

void MappedFile::require_all_whole() {
  std::vector<std::shared_ptr<const MappedFile>> files;
  {
    const std::lock_guard lock(registry().mutex);
    for (const auto& [begin, file] : registry().by_begin)
      if (std::shared_ptr<const MappedFile> held = file.lock()) files.push_back(std::move(held));
  }
  for (const std::shared_ptr<const MappedFile>& file : files) file->require_whole();
}

MappedFile::~MappedFile() {
  if (data_ == nullptr) return;
  {
    const std::lock_guard lock(registry().mutex);
    registry().by_begin.erase(address_of(data_));
    // The slot is freed before the memory: another mapping may get the addresses at once.
    if (slot_ != nullptr) slot_->begin.store(0);
  }
  ::munmap(const_cast<std::byte*>(data_), size_);
}

bool MappedFile::is_whole() const {
  const volatile std::byte* const probe = probe_.load(std::memory_order_acquire);
  // The byte comes first: looking at it may be what faults.
  if (probe != nullptr && *probe != probe_value_) return false;
  return slot_ == nullptr || !slot_->is_cut.load(std::memory_order_acquire);
}

void MappedFile::require_size() const {
  struct stat now = {};
  // If another file has taken the name, or none has it, the mapped file lives on untouched.
  if (::stat(path_.c_str(), &now) == 0 && now.st_dev == device_ && now.st_ino == inode_ &&
      static_cast<std::size_t>(now.st_size) < size_)
    throw_cut();
  if (data_ != nullptr) std::call_once(probe_once_, [this] { set_probe(); });
  require_whole();
}

void MappedFile::set_probe() const {
  // Zeros that are cut off still read as zeros. So the probe lies before the file's last zeros,
  // unless there are too many of them.
  constexpr std::size_t kMostZeros = std::size_t{1} << 20;
  const std::size_t most = std::min(size_, kMostZeros);
  std::size_t zeros = 0;
  while (zeros < most && data_[size_ - 1 - zeros] == std::byte{0}) ++zeros;
  const std::byte* const probe = data_ + size_ - 1 - (zeros == most ? 0 : zeros);
  probe_value_ = *probe;
  probe_.store(probe, std::memory_order_release);
}

void MappedFile::throw_cut() const {
  struct stat now = {};
  const bool is_there =
      ::stat(path_.c_str(), &now) == 0 && now.st_dev == device_ && now.st_ino == inode_;
  const auto bytes = static_cast<std::size_t>(now.st_size);
  if (is_there && bytes < size_)
    throw Error(ErrorCode::kInvalidFile,
                fmt::format("{}: became shorter while it was in use: it had {} bytes when it was "
                            "opened and has {} now; wait until whatever writes to it is done, or "
                            "download it again, and load it anew",
                            printable(path_), size_, bytes));
  throw Error(
      ErrorCode::kInvalidFile,
      fmt::format("{}: became shorter while it was in use, was written to, or can no longer "
                  "be read; check what writes to it, the disk and the network file system, "
                  "and load it anew",
                  printable(path_)));
}

}  // namespace switchyard
