// A relay of IP packets between hosts that are network namespaces, with what wide networks do to
// packets: delay, jitter, loss, a narrow link, a partition. Kernels without netem have none of it
// but the narrow link.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <queue>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/posix.h"
#include "base/unique_fd.h"
#include "support/namespaces.h"
#include "support/numbers.h"
#include "support/ranks.h"
#include "switchyard/error.h"

namespace switchyard::test {

struct RelayOptions {
  std::chrono::microseconds delay{0};   // of every packet
  std::chrono::microseconds jitter{0};  // up to so much more, for each packet anew: they overtake
  int lost_of_1000 = 0;                 // packets that are dropped
};

// Every host has a TUN device beside its cable, and the address ip(host) on it. What is sent there
// reaches others only while a process runs play(); make that one beside the ranks, which need only
// the addresses. Needs root and /dev/net/tun.
class Relay {
 public:
  // Throws Error{kUnsupported}, saying why there may be no TUN devices.
  Relay(const NetworkNamespaces& hosts, const RelayOptions& options) : options_(options) {
    if (hosts.size() > kMostHosts) throw Error(ErrorCode::kInvalidArgument, "too many hosts");
    const UniqueFd home(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
    if (!home) throw_errno("cannot open this thread's network namespace");
    for (int host = 0; host < hosts.size(); ++host) {
      switchyard::testing::enter(hosts, host);
      std::string failed;
      try {
        devices_.push_back(open_device(host));
      } catch (const Error& error) {
        failed = error.what();
      }
      if (::setns(home.get(), CLONE_NEWNET) != 0) throw_errno("cannot return from a host");
      if (!failed.empty()) {
        throw Error(ErrorCode::kUnsupported, "TUN devices cannot be made here: " + failed);
      }
    }
    void* const memory =
        ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw_errno("cannot map a page for a relay");
    board_ = new (memory) Board{};
  }
  ~Relay() { ::munmap(board_, sizeof(Board)); }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  std::string ip(int host) const { return "10.78.0." + std::to_string(host + 1); }

  // A process that no longer needs the relay destroys one of these, after its World.
  class Leaves {
   public:
    explicit Leaves(Relay& relay) : relay_(relay) {}
    ~Leaves() { ++relay_.board_->left; }
    Leaves(const Leaves&) = delete;
    Leaves& operator=(const Leaves&) = delete;

   private:
    Relay& relay_;
  };

  // Carries packets until so many have left, or for `limit`.
  void play(int users, milliseconds limit) {
    const Clock::time_point until = Clock::now() + limit;
    while (board_->left < users && Clock::now() < until) {
      deliver(Clock::now());
      std::vector<pollfd> fds;
      for (const UniqueFd& device : devices_) fds.push_back({device.get(), POLLIN, 0});
      // Now and then it looks if all have left.
      auto sleep = std::chrono::nanoseconds(milliseconds(20));
      if (!flights_.empty()) {
        sleep = std::min(sleep, std::chrono::nanoseconds(flights_.top().due - Clock::now()));
      }
      if (sleep < sleep.zero()) continue;
      const timespec timeout{0, sleep.count()};
      if (::ppoll(fds.data(), fds.size(), &timeout, nullptr) <= 0) continue;
      for (std::size_t host = 0; host < devices_.size(); ++host) {
        if (fds[host].revents != 0) take(static_cast<int>(host));
      }
    }
  }

  // From now on drops whatever comes from or goes to the host, or does so no longer.
  void set_connected(int host, bool connected) { board_->is_cut[host] = !connected; }
  // From now on what leaves a host leaves at this rate at most; 0: as fast as it goes.
  void set_rate(int megabits_per_s) { board_->megabits_per_s = megabits_per_s; }

  std::uint64_t packets() const { return board_->packets; }  // that were carried
  std::uint64_t bytes() const { return board_->bytes; }
  std::uint64_t lost() const { return board_->lost; }  // packets, by lot

 private:
  static constexpr int kMostHosts = 16;
  // Longest queue before a narrow link, in time. Switches drop what does not fit.
  static constexpr milliseconds kLongestQueue{50};
  // Packets of a device in a turn, so that all devices have their turn.
  static constexpr int kPacketsPerTurn = 64;

  struct Board {
    std::atomic<bool> is_cut[kMostHosts];
    std::atomic<int> left, megabits_per_s;
    std::atomic<std::uint64_t> packets, bytes, lost;
  };
  struct Flight {
    Clock::time_point due;
    int to;
    std::vector<std::byte> packet;
    bool operator<(const Flight& other) const { return due > other.due; }  // the first due on top
  };

  UniqueFd open_device(int host) const {
    const auto require = [](bool holds, const char* what) {
      if (!holds) throw_errno(what);
    };
    UniqueFd device(::open("/dev/net/tun", O_RDWR | O_CLOEXEC | O_NONBLOCK));
    require(static_cast<bool>(device), "cannot open /dev/net/tun");
    ifreq request{};
    std::strcpy(request.ifr_name, "relay0");
    request.ifr_flags = IFF_TUN | IFF_NO_PI;
    require(::ioctl(device.get(), TUNSETIFF, &request) == 0, "cannot make a TUN device");
    const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    require(static_cast<bool>(socket), "cannot open a socket");
    const auto set_address = [&](unsigned long call, const std::string& text) {
      sockaddr_in address{};
      address.sin_family = AF_INET;
      ::inet_pton(AF_INET, text.c_str(), &address.sin_addr);
      std::memcpy(&request.ifr_addr, &address, sizeof address);
      require(::ioctl(socket.get(), call, &request) == 0, "cannot set a TUN device's address");
    };
    set_address(SIOCSIFADDR, ip(host));
    set_address(SIOCSIFNETMASK, "255.255.255.0");
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    require(::ioctl(socket.get(), SIOCSIFFLAGS, &request) == 0, "cannot start a TUN device");
    return device;
  }

  // The host that an IPv4 packet of this relay's network is for, or -1.
  int target_of(std::span<const std::byte> packet) const {
    constexpr std::size_t kHeader = 20, kTarget = 16;  // bytes of the header, offset of the target
    if (packet.size() < kHeader || std::to_integer<int>(packet[0]) >> 4 != 4) return -1;
    const std::array<std::byte, 3> network{std::byte{10}, std::byte{78}, std::byte{0}};
    if (std::memcmp(packet.data() + kTarget, network.data(), network.size()) != 0) return -1;
    const int host = std::to_integer<int>(packet[kTarget + 3]) - 1;
    return host >= 0 && host < static_cast<int>(devices_.size()) ? host : -1;
  }

  void take(int from) {
    std::array<std::byte, 2048> packet;
    for (int i = 0; i < kPacketsPerTurn; ++i) {
      const ssize_t got =
          ::read(devices_[static_cast<std::size_t>(from)].get(), packet.data(), packet.size());
      if (got <= 0) return;
      const std::span<const std::byte> bytes(packet.data(), static_cast<std::size_t>(got));
      const int to = target_of(bytes);
      if (to < 0 || board_->is_cut[from] || board_->is_cut[to]) continue;
      if (numbers_.between(1, 1000) <= options_.lost_of_1000) {
        ++board_->lost;
        continue;
      }
      Clock::time_point due = Clock::now();
      if (const int rate = board_->megabits_per_s; rate > 0) {
        Clock::time_point& free = link_free_[static_cast<std::size_t>(from)];
        free = std::max(free, due);
        if (free - due > kLongestQueue) continue;
        free += std::chrono::nanoseconds(8'000 * got / rate);
        due = free;
      }
      due += options_.delay + std::chrono::microseconds(
                                  numbers_.between(0, static_cast<int>(options_.jitter.count())));
      flights_.push({due, to, {bytes.begin(), bytes.end()}});
    }
  }

  void deliver(Clock::time_point now) {
    for (; !flights_.empty() && flights_.top().due <= now; flights_.pop()) {
      const Flight& flight = flights_.top();
      if (board_->is_cut[flight.to]) continue;
      // A device that is full drops the packet, as others do.
      const ssize_t written = ::write(devices_[static_cast<std::size_t>(flight.to)].get(),
                                      flight.packet.data(), flight.packet.size());
      if (written <= 0) continue;
      ++board_->packets;
      board_->bytes += flight.packet.size();
    }
  }

  const RelayOptions options_;
  std::vector<UniqueFd> devices_;  // by host
  Board* board_ = nullptr;
  Numbers numbers_{1};
  std::array<Clock::time_point, kMostHosts> link_free_{};  // by host: when what it sent has left
  std::priority_queue<Flight> flights_;
};

}  // namespace switchyard::test
