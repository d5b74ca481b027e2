#include "fabric/environment.h"

#include <fmt/core.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>

#include "fabric/hash.h"
#include "fabric/place.h"
#include "fabric/port.h"
#include "protocol/control.h"
#include "switchyard/error.h"
#include "switchyard/world.h"

namespace switchyard {
namespace {

struct LauncherVariables {
  const char* rank;
  const char* size;
  const char* local_rank;  // null where the launcher has none
  const char* local_size;
  const char* num_hosts;
  bool size_may_stand_alone;
};

constexpr LauncherVariables kLaunchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", nullptr, false},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", nullptr, false},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", nullptr, false},
    {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr, "SLURM_STEP_NUM_NODES", true},
};

constexpr const char* kJobVariables[] = {
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_PORT",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
};

std::optional<int> parse_number(const EnvironmentLookup& lookup, const char* name, int minimum) {
  if (name == nullptr) return std::nullopt;
  const char* const text = lookup(name);
  if (text == nullptr) return std::nullopt;
  int value = 0;
  const char* const end = text + std::strlen(text);
  const auto [parsed_to, error] = std::from_chars(text, end, value);
  if (error == std::errc::result_out_of_range && parsed_to == end && *text != '-') {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}='{}' in the environment is too large; a world can have {} ranks",
                            name, text, protocol::kMaxRanks));
  }
  if (error != std::errc() || parsed_to != end || value < minimum) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}='{}' in the environment; it must be a decimal number of at least {}", name,
                    text, minimum));
  }
  return value;
}

void require_below(const char* name, int value, const char* size_name, int size) {
  if (value < size) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}={} in the environment is not below {}={}", name, value, size_name, size));
}

[[noreturn]] void throw_half_set(const char* set_name, int value, const char* unset_name) {
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}={} is set in the environment, but {} is not; set both or neither",
                          set_name, value, unset_name));
}

// The first host of a list as Slurm writes it: "node[003-010,12],other" begins with node003.
std::string first_of_node_list(std::string_view list) {
  const std::size_t end = list.find_first_of(",[");
  std::string host(list.substr(0, end));
  if (end == std::string_view::npos || list[end] == ',') return host;
  const std::string_view numbers = list.substr(end + 1);
  host += numbers.substr(0, numbers.find_first_of("-,]"));
  const std::size_t closed = list.find(']', end);
  // The text behind the numbers belongs to every name.
  if (closed != std::string_view::npos) {
    const std::string_view rest = list.substr(closed + 1);
    host += rest.substr(0, rest.find(','));
  }
  return host;
}

std::string rendezvous_of_hosts(const EnvironmentLookup& lookup, const char* name, int value,
                                const char* size_name, int size) {
  const auto text_of = [&](const char* variable) {
    const char* const text = lookup(variable);
    return std::string(text == nullptr ? "" : text);
  };
  std::string given = text_of("SWITCHYARD_RENDEZVOUS");
  if (given.starts_with(kTcpScheme)) return given;
  std::string host = text_of("MASTER_ADDR");
  if (host.empty()) host = first_of_node_list(text_of("SLURM_STEP_NODELIST"));
  if (host.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}={} with {}={} in the environment: the ranks are spread over several "
                    "hosts, but where rank 0 runs is not said; set MASTER_ADDR to its host, "
                    "or SWITCHYARD_RENDEZVOUS to tcp://HOST:PORT, on all ranks",
                    name, value, size_name, size));
  }
  const std::uint64_t port = kFirstPort + fnv1a(kFnvBasis, launched_job(lookup)) % kNumPorts;
  const bool v6 = host.find(':') != std::string::npos;
  return fmt::format("{}{}{}{}:{}", kTcpScheme, v6 ? "[" : "", host, v6 ? "]" : "", port);
}

}  // namespace

std::optional<LaunchedRank> parse_launched_rank(const EnvironmentLookup& lookup) {
  for (const LauncherVariables& names : kLaunchers) {
    const std::optional<int> rank = parse_number(lookup, names.rank, 0);
    if (!rank && names.size_may_stand_alone) continue;
    const std::optional<int> size = parse_number(lookup, names.size, 1);
    if (!rank && !size) continue;
    if (!rank) throw_half_set(names.size, *size, names.rank);
    if (!size) throw_half_set(names.rank, *rank, names.size);
    require_below(names.rank, *rank, names.size, *size);

    const std::optional<int> local_rank = parse_number(lookup, names.local_rank, 0);
    const std::optional<int> local_size = parse_number(lookup, names.local_size, 1);
    const std::optional<int> num_hosts = parse_number(lookup, names.num_hosts, 1);
    if (local_rank) {
      require_below(names.local_rank, *local_rank, local_size ? names.local_size : names.size,
                    local_size.value_or(*size));
    }
    if (local_size && *local_size > *size) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}={} in the environment is more than {}={}", names.local_size,
                              *local_size, names.size, *size));
    }
    // Every rank reports this by itself, without first waiting for so many other ranks.
    if (*size > protocol::kMaxRanks) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}={} in the environment is more than the {} ranks that a world can "
                              "have; start fewer",
                              names.size, *size, protocol::kMaxRanks));
    }
    LaunchedRank launched{*rank, *size, names.rank, names.size, std::nullopt};
    if (local_size && *local_size < *size) {
      launched.rendezvous =
          rendezvous_of_hosts(lookup, names.local_size, *local_size, names.size, *size);
    } else if (num_hosts && *num_hosts > 1) {
      launched.rendezvous =
          rendezvous_of_hosts(lookup, names.num_hosts, *num_hosts, names.size, *size);
    }
    return launched;
  }
  return std::nullopt;
}

std::string launched_job(const EnvironmentLookup& lookup) {
  if (const char* const given = lookup("SWITCHYARD_RENDEZVOUS"); given != nullptr && *given != 0) {
    return given;
  }
  std::string identity;
  for (const char* const name : kJobVariables) {
    if (const char* const value = lookup(name)) {
      identity += fmt::format("{}{}={}", identity.empty() ? "" : ",", name, value);
    }
  }
  return identity;
}

std::string job_identity(const EnvironmentLookup& lookup) {
  std::string identity = launched_job(lookup);
  return identity.empty() ? fmt::format("parent={}", ::getppid()) : identity;
}

std::string next_rendezvous() {
  // Worlds that are made one after the other at a port need no numbers: rank 0 closes the port
  // before it lets any rank go on.
  if (const char* const given = std::getenv("SWITCHYARD_RENDEZVOUS");
      given != nullptr && std::string_view(given).starts_with(kTcpScheme)) {
    return given;
  }
  static std::atomic<std::uint64_t> num_taken{0};
  // Relaxed: the count orders nothing but itself.
  return fmt::format("{}#{}", job_identity([](const char* name) { return std::getenv(name); }),
                     num_taken.fetch_add(1, std::memory_order_relaxed));
}

World World::from_environment(WorldOptions options) {
  const std::optional<LaunchedRank> launched =
      parse_launched_rank([](const char* name) { return std::getenv(name); });
  if (!launched) return single(options);
  if (launched->rendezvous && options.rendezvous.empty())
    options.rendezvous = *launched->rendezvous;
  try {
    return processes(launched->rank, launched->size, std::move(options));
  } catch (const TimeoutError& error) {
    if (error.code() != ErrorCode::kTimeout) throw;
    // The variables may be left over from another job. Then no other rank will ever come.
    throw TimeoutError(
        error.code(),
        fmt::format("{}; {}={} and {}={} in the environment make this process rank {} of {}: start "
                    "the other ranks, or unset both variables to run alone",
                    error.what(), launched->rank_variable, launched->rank, launched->size_variable,
                    launched->size, launched->rank, launched->size),
        error.failure());
  }
}

}  // namespace switchyard
