// Ranks for both examples: those of a launcher, or threads of this process.
#pragma once

#include <switchyard/error.h>
#include <switchyard/world.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

// Runs run_rank(world) on every rank and prints how it went. Returns the exit code.
template <typename RunRank>
int run_on_ranks(int argc, char** argv, int num_threads, const std::string& where, int rounds,
                 const RunRank& run_rank) {
  using switchyard::World;
  // False, with a message, if it failed.
  const auto run = [&](const World& world) {
    try {
      run_rank(world);
      return true;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", world.rank(), error.what());
      return false;
    }
  };
  try {
    const World launched = World::from_environment();
    bool ok = true;
    int ranks = launched.size();
    if (ranks > 1) {
      ok = run(launched);
      if (launched.rank() != 0) return ok ? 0 : 1;
    } else {
      ranks = argc > 1 ? std::atoi(argv[1]) : num_threads;
      std::vector<World> worlds = World::threads(ranks);
      std::vector<char> done(worlds.size());
      std::vector<std::thread> threads;
      for (std::size_t r = 0; r < worlds.size(); ++r) {
        threads.emplace_back([&, r] { done[r] = run(worlds[r]); });
      }
      for (std::thread& thread : threads) thread.join();
      for (const char one : done) ok = ok && one != 0;
    }
    std::printf("all-gather of %d ranks%s, %d rounds: %s\n", ranks, where.c_str(), rounds,
                ok ? "ok" : "FAILED");
    return ok ? 0 : 1;
  } catch (const switchyard::Error& error) {
    std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
    return 1;
  }
}
