// Times what crosses hosts: a flag, a stream, and the dispatch and combine of an Exchange, with and
// without sums per host, by programs that are ranks of one world over hosts. On GPUs a whole layer,
// too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/run_note.h"
#include "results/hosts_row.h"
#include "switchyard/layer.h"
#include "switchyard/world.h"

namespace switchyard::bench {

inline constexpr const char* kHostsSuite = "hosts";

struct HostsBenchOptions : RunNote {
  Backend backend = Backend::kCpu;
  int device = -1;                                              // kCuda only: this rank's
  int hidden = 2048, experts = 64, top_k = 8;                   // OLMoE's
  int intermediate = 1024;                                      // of the layer, kCuda only
  std::vector<std::int64_t> tokens = {1, 16, 128, 1024, 4096};  // of each rank
  int repeat = 0;          // timed repetitions; 0: by the number of tokens
  std::uint64_t seed = 0;  // of everything random
  std::string commit, command;
};

// Latency and bandwidth of the network alone.
struct LinkRates {
  double flag_us = 0;       // one way
  double bytes_per_us = 0;  // out of a host, all of whose ranks send
};
// The time that the way between hosts takes at least if both rates are as measured: the bytes of
// the busiest host, and one flag behind them.
double model_us(const LinkRates& rates, double link_bytes);

// Collective: every rank of the world calls it. Returns the rows on rank 0, and none on the others.
// Throws Error{kInvalidArgument} for a world of one host, and for hosts with different numbers of
// ranks.
std::vector<results::HostsRow> measure_hosts(World& world, const HostsBenchOptions& options);

}  // namespace switchyard::bench
