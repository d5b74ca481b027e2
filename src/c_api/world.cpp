#include "switchyard/world.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <vector>

#include "c_api/guard.h"
#include "c_api/handles.h"
#include "c_api/structs.h"
#include "switchyard/error.h"

using switchyard::World;
using switchyard::WorldOptions;
using namespace switchyard::c_api;

namespace {

WorldOptions options_of(const sy_world_options* given) {
  const auto read =
      read_struct_or("sy_world_options", given, sy_world_options SY_WORLD_OPTIONS_INIT);
  WorldOptions options;
  options.deadline = milliseconds_of("deadline", read.deadline_seconds);
  if (read.rendezvous != nullptr) options.rendezvous = read.rendezvous;
  if (read.network_chunk_bytes != 0) options.network.chunk_bytes = read.network_chunk_bytes;
  if (read.network_window != 0) options.network.window = read.network_window;
  if (read.secret != nullptr) options.secret = read.secret;
  return options;
}

}  // namespace

std::chrono::milliseconds switchyard::c_api::milliseconds_of(const char* name, double seconds) {
  constexpr double kMost = 1e12;  // the library itself takes no more than a year
  if (!(seconds >= 0) || seconds > kMost) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is {} s; pass a number of seconds from 0 on", name, seconds));
  }
  return std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
}

sy_status sy_world_single(const sy_world_options* options, sy_world** out) {
  return guarded([&] {
    require("out", out);
    *out = new sy_world{World::single(options_of(options))};
  });
}

sy_status sy_world_threads(int32_t size, const sy_world_options* options, sy_world** out) {
  return guarded([&] {
    require("out", out);
    std::vector<std::unique_ptr<sy_world>> worlds;
    for (World& world : World::threads(size, options_of(options))) {
      worlds.emplace_back(new sy_world{std::move(world)});
    }
    for (std::size_t i = 0; i < worlds.size(); ++i) out[i] = worlds[i].release();
  });
}

sy_status sy_world_processes(int32_t rank, int32_t size, const sy_world_options* options,
                             sy_world** out) {
  return guarded([&] {
    require("out", out);
    *out = new sy_world{World::processes(rank, size, options_of(options))};
  });
}

sy_status sy_world_from_environment(const sy_world_options* options, sy_world** out) {
  return guarded([&] {
    require("out", out);
    *out = new sy_world{World::from_environment(options_of(options))};
  });
}

sy_status sy_world_get_info(const sy_world* world, sy_world_info* out) {
  return guarded([&] {
    require("world", world);
    sy_world_info info = SY_WORLD_INFO_INIT;
    info.rank = world->world.rank();
    info.size = world->world.size();
    info.deadline_seconds = std::chrono::duration<double>(world->world.deadline()).count();
    info.fabric = world->world.fabric_name();
    write_struct("sy_world_info", info, out);
  });
}

sy_status sy_world_barrier(sy_world* world) {
  return guarded([&] {
    require("world", world);
    const Call in_call(world->calls, world->world);
    world->world.barrier();
  });
}

sy_status sy_world_abort(sy_world* world) {
  return guarded([&] {
    require("world", world);
    world->world.abort();
  });
}

sy_status sy_world_destroy(sy_world** world) {
  return guarded([&] {
    require("world", world);
    destroy(*world);
  });
}
