#include "cli/bus_error.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/printable.h"

// All functions of this file may run in the signal handler. So they call only what POSIX declares
// safe there, and they allocate nothing.
namespace switchyard::cli {
namespace {

std::atomic<int> exit_code_of_guard{0};
std::atomic_flag is_told = ATOMIC_FLAG_INIT;

struct Mapped {
  std::string_view name;     // as the kernel writes it; empty: no file
  std::uint64_t offset = 0;  // the address's offset in the file
  std::uint64_t inode = 0;
};

std::optional<std::uint64_t> take_number(std::string_view& text, int base) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return value;
}

void skip_to(std::string_view& text, std::string_view characters) {
  text.remove_prefix(std::min(text.find_first_of(characters), text.size()));
}
void skip_blanks(std::string_view& text) {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
}

// Parses a line of /proc/self/maps, "begin-end permissions offset device inode   name". Returns
// nothing if the address is not in its range.
std::optional<Mapped> parse_if_at(std::string_view line, std::uint64_t address) {
  const auto begin = take_number(line, 16);
  if (!begin || !line.starts_with('-')) return std::nullopt;
  line.remove_prefix(1);
  const auto end = take_number(line, 16);
  if (!end || address < *begin || address >= *end) return std::nullopt;
  skip_blanks(line);
  skip_to(line, " ");  // permissions
  skip_blanks(line);
  const auto offset = take_number(line, 16);
  skip_blanks(line);
  skip_to(line, " ");  // device
  skip_blanks(line);
  const auto inode = take_number(line, 10);
  skip_blanks(line);
  return Mapped{line, offset.value_or(0) + address - *begin, inode.value_or(0)};
}

// Finds what is mapped at the address. The name in the result points into `buffer`.
std::optional<Mapped> find_mapped(std::uint64_t address, std::array<char, 8192>& buffer) {
  const int fd = ::open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return std::nullopt;
  std::optional<Mapped> found;
  std::size_t filled = 0;
  while (!found) {
    const ssize_t got = ::read(fd, buffer.data() + filled, buffer.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    filled += static_cast<std::size_t>(got);
    std::string_view text(buffer.data(), filled);
    for (std::size_t end; !found && (end = text.find('\n')) != text.npos;) {
      found = parse_if_at(text.substr(0, end), address);
      if (!found) text.remove_prefix(end + 1);
    }
    if (found) break;
    if (text.size() == buffer.size()) text = {};  // not reached: no line is so long
    std::copy(text.begin(), text.end(), buffer.begin());
    filled = text.size();
  }
  ::close(fd);
  return found;
}

class Line {
 public:
  void add(std::string_view text) {
    const std::size_t size = std::min(text.size(), bytes_.size() - size_);
    std::copy_n(text.begin(), size, bytes_.begin() + static_cast<std::ptrdiff_t>(size_));
    size_ += size;
  }
  void add_number(std::uint64_t value) {
    std::array<char, 20> digits;
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    add({digits.data(), static_cast<std::size_t>(end - digits.data())});
  }
  void add_shown(std::string_view text) {
    while (!text.empty()) {
      const ShownCharacter next = show_character(text);
      add(next.view());
      text.remove_prefix(next.consumed);
    }
  }
  void write() const {
    // One call writes the whole line, so that lines of several ranks do not mix. A failure is
    // ignored: there is no other place to report to.
    [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, bytes_.data(), size_);
  }

 private:
  std::array<char, 6144> bytes_;
  std::size_t size_ = 0;
};

// Returns the file's size if the name still belongs to that file.
std::optional<std::uint64_t> size_now(const Mapped& mapped) {
  constexpr std::string_view kLineBreak = "\\012";  // as the kernel writes it
  std::array<char, 4097> path{};
  std::size_t size = 0;
  for (std::string_view rest = mapped.name; !rest.empty(); ++size) {
    if (size + 1 == path.size()) return std::nullopt;
    const bool is_break = rest.starts_with(kLineBreak);
    path[size] = is_break ? '\n' : rest.front();
    rest.remove_prefix(is_break ? kLineBreak.size() : 1);
  }
  struct stat status = {};
  if (::stat(path.data(), &status) != 0 || status.st_ino != mapped.inode) return std::nullopt;
  return static_cast<std::uint64_t>(status.st_size);
}

void tell(std::uint64_t address) {
  static std::array<char, 8192> buffer;
  static Line line;
  const std::optional<Mapped> mapped = find_mapped(address, buffer);
  const bool is_file = mapped && mapped->name.starts_with('/') &&
                       !mapped->name.starts_with("/memfd:") && !mapped->name.starts_with("/dev/");
  if (!is_file) {
    line.add(
        "switchyard: error (capacity_exceeded): memory that was reserved cannot be had; free some, "
        "or raise the container's limit\n");
    line.write();
    return;
  }
  const std::optional<std::uint64_t> size = size_now(*mapped);
  if (size && *size <= mapped->offset) {
    line.add("switchyard: error (invalid_file): ");
    line.add_shown(mapped->name);
    line.add(": became shorter while it was in use: it has ");
    line.add_number(*size);
    line.add(" bytes now; wait until whatever writes to it is done, and try again\n");
  } else {
    line.add("switchyard: error (system): ");
    line.add_shown(mapped->name);
    line.add(": cannot be read at byte ");
    line.add_number(mapped->offset);
    line.add("; check the disk or the network file system\n");
  }
  line.write();
}

void handle(int, siginfo_t* info, void*) {
  // This signal came from kill() or a machine check. It ends the process as if there were no guard.
  if (info->si_code != BUS_ADRERR) {
    ::signal(SIGBUS, SIG_DFL);
    ::raise(SIGBUS);
    return;
  }
  if (is_told.test_and_set()) {
    // Another thread is already reporting, and will end the process.
    for (;;) ::pause();
  }
  tell(reinterpret_cast<std::uint64_t>(info->si_addr));
  ::_exit(exit_code_of_guard.load());
}

}  // namespace

BusErrorGuard::BusErrorGuard(int exit_code) {
  exit_code_of_guard = exit_code;
  struct sigaction action {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGBUS, &action, &before_);
}

BusErrorGuard::~BusErrorGuard() { ::sigaction(SIGBUS, &before_, nullptr); }

}  // namespace switchyard::cli
