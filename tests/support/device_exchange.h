// Exchanges of ranks on the GPUs that there are, which several ranks share if they must.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gpu/device.h"
#include "support/exchanges.h"
#include "support/on_gpu.h"
#include "support/ranks.h"
#include "switchyard/error.h"
#include "switchyard/exchange.h"
#include "switchyard/world.h"

namespace switchyard::testing {

// Memory that a batch needs on a rank's device.
struct DeviceArrays {
  std::int64_t capacity;
  gpu::DeviceBuffer tokens, token_scales, ids, weights;
  gpu::DeviceBuffer rows, scales, ends, counts, num_rows, origins, row_weights;
  gpu::DeviceBuffer results, out;
  MatrixView view;  // of the tokens
  std::size_t slots = 0;

  DeviceArrays(const ExchangeSpec& spec, ExpertRange own, std::int64_t room)
      : capacity(room),
        tokens(elements(spec, spec.max_tokens) * 4),
        token_scales(static_cast<std::size_t>(spec.max_tokens) * groups(spec) * 4),
        ids(all_slots(spec) * 8),
        weights(all_slots(spec) * 4),
        rows(elements(spec, room) * size_of(spec.dispatch)),
        scales(static_cast<std::size_t>(room) * groups(spec) * 4),
        ends(static_cast<std::size_t>(own.end - own.begin) * 4),
        counts(ends.bytes()),
        num_rows(4),
        origins(static_cast<std::size_t>(room) * sizeof(RowOrigin)),
        row_weights(static_cast<std::size_t>(room) * 4),
        results(elements(spec, room) * size_of(spec.combine)),
        out(elements(spec, spec.max_tokens) * 4) {}

  static std::size_t groups(const ExchangeSpec& spec) {
    return static_cast<std::size_t>((spec.hidden + 127) / 128);
  }
  static std::size_t elements(const ExchangeSpec& spec, std::int64_t of_rows) {
    return static_cast<std::size_t>(of_rows * spec.hidden);
  }
  static std::size_t all_slots(const ExchangeSpec& spec) {
    return static_cast<std::size_t>(spec.max_tokens) * static_cast<std::size_t>(spec.top_k);
  }

  void load(const ExchangeBatch& batch, int rank) {
    const auto r = static_cast<std::size_t>(rank);
    const MatrixView host = batch.tokens[r].view();
    view = host;
    view.data = tokens.data();
    tokens.upload(host.data, elements(batch.spec, host.rows) * size_of(host.dtype));
    if (host.scale != nullptr) {
      token_scales.upload(host.scale, static_cast<std::size_t>(host.rows) * groups(batch.spec) * 4);
      view.scale = reinterpret_cast<const float*>(token_scales.data());
    }
    slots = batch.ids[r].size();
    ids.upload(batch.ids[r].data(), slots * 8);
    weights.upload(batch.weights[r].data(), slots * 4);
  }
  // In what the rows go to.
  void poison(const ExchangeSpec& spec, ExpertRange own) {
    const ExchangeArrays none(spec, own, capacity);
    rows.upload(none.rows.view().data, rows.bytes());
    if (!none.scales.empty()) scales.upload(none.scales.data(), none.scales.size() * 4);
    origins.upload(none.origins.data(), origins.bytes());
    row_weights.upload(none.weights.data(), row_weights.bytes());
  }
  DispatchInput input(const gpu::Stream& stream) const {
    DispatchInput input{.tokens = view};
    input.ids = {reinterpret_cast<const std::int64_t*>(ids.data()), DType::kI64, slots};
    input.weights = {reinterpret_cast<const float*>(weights.data()), DType::kF32, slots};
    input.stream = stream.handle();
    return input;
  }
  DispatchOutput output(const ExchangeSpec& spec, const gpu::Stream& stream) const {
    DispatchOutput to{.rows = rows.data(), .capacity = capacity};
    if (spec.dispatch == DType::kF8E4M3) to.scales = reinterpret_cast<float*>(scales.data());
    to.ends = reinterpret_cast<std::int32_t*>(ends.data());
    to.counts = reinterpret_cast<std::int32_t*>(counts.data());
    to.num_rows = reinterpret_cast<std::int32_t*>(num_rows.data());
    to.origins = reinterpret_cast<RowOrigin*>(origins.data());
    to.weights = reinterpret_cast<float*>(row_weights.data());
    to.stream = stream.handle();
    return to;
  }
  ExchangeArrays fetch(const ExchangeSpec& spec, ExpertRange own) const {
    ExchangeArrays got(spec, own, capacity);
    rows.download(got.rows.row(0), rows.bytes());
    if (!got.scales.empty()) scales.download(got.scales.data(), got.scales.size() * 4);
    ends.download(got.ends.data(), ends.bytes());
    counts.download(got.counts.data(), counts.bytes());
    num_rows.download(&got.num_rows, 4);
    origins.download(got.origins.data(), origins.bytes());
    row_weights.download(got.weights.data(), row_weights.bytes());
    return got;
  }
  CombineInput rows_back(const ExchangeSpec& spec, const gpu::Stream& stream) const {
    CombineInput input;
    input.rows = {results.data(), spec.combine, capacity, spec.hidden, spec.hidden};
    input.stream = stream.handle();
    return input;
  }
  CombineOutput sums(DType dtype, const gpu::Stream& stream) const {
    return {.data = out.data(), .dtype = dtype, .stream = stream.handle()};
  }
  Matrix fetch_sums(const ExchangeBatch& batch, int rank, DType dtype) const {
    Matrix sum(batch.count(rank), batch.spec.hidden, dtype);
    out.download(sum.row(0), elements(batch.spec, sum.rows()) * size_of(dtype));
    return sum;
  }
};

inline ExchangeOptions options_of(int rank, ExchangeOptions options = {}) {
  options.backend = Backend::kCuda;
  options.device = rank % gpu::device_count();
  return options;
}

// One rank's exchange. Nothing may be allocated while ranks that share a GPU wait for each other,
// so all memory is there before the first call.
struct Player : Rounds<Player> {
  using Fixture = OnGpu<::testing::Test>;
  static constexpr int kHidden = 144;    // one group of scales, and a shorter one
  static constexpr int kSlotBytes = 16;  // that a row's description takes on its way

  World world;
  int rank;
  std::optional<gpu::Stream> stream;
  std::optional<Exchange> made;
  ExchangeHandle handle;
  std::vector<std::unique_ptr<DeviceArrays>> memory;

  Player(World its_world, const ExchangeSpec& spec, std::size_t batches = 1,
         const ExchangeOptions& given = {}, std::int64_t room = -1)
      : world(std::move(its_world)), rank(world.rank()) {
    const ExchangeOptions options = options_of(rank, given);
    gpu::set_device(options.device);
    stream.emplace();
    made.emplace(world, spec, options);
    handle = exchange().make_handle();
    for (std::size_t i = 0; i < batches; ++i) {
      memory.push_back(std::make_unique<DeviceArrays>(
          exchange().spec(), exchange().own_places(),
          room < 0 ? std::max<std::int64_t>(1, exchange().rows_needed()) : room));
    }
    world.barrier();
  }
  // Freed when nobody waits any more.
  ~Player() {
    try {
      stream->synchronize();
      world.barrier();
    } catch (const Error&) {
      // A dead world has nobody to wait for.
    }
  }
  Exchange& exchange() { return *made; }
  const ExchangeSpec& spec() { return exchange().spec(); }
  ExpertRange own() { return exchange().own_places(); }
  DeviceArrays& arrays(std::size_t i = 0) { return *memory[i]; }

  static std::vector<World> worlds(int ranks,
                                   std::chrono::milliseconds deadline = std::chrono::seconds(30)) {
    return World::threads(ranks, test::with_deadline(deadline));
  }
  // Waits for no other rank. What the rows go to is poisoned.
  void load(const ExchangeBatch& batch, std::size_t i = 0) {
    arrays(i).load(batch, rank);
    arrays(i).poison(spec(), own());
  }
  DispatchInput input(std::size_t i = 0) { return arrays(i).input(*stream); }
  DispatchOutput output(std::size_t i = 0) { return arrays(i).output(spec(), *stream); }
  void enqueue_dispatch(std::size_t i = 0) { exchange().dispatch(input(i), output(i), handle); }
  void enqueue_combine(DType dtype, std::size_t i = 0) {
    exchange().combine(arrays(i).rows_back(spec(), *stream), arrays(i).sums(dtype, *stream),
                       handle);
  }
  // Ends the calls before, and throws what failed in them.
  void finish() {
    stream->synchronize();
    exchange().check();
  }
  std::int64_t rows_that_came() { return exchange().rows_needed(handle, stream->handle()); }
  ExchangeArrays got(std::size_t i = 0) {
    finish();
    return arrays(i).fetch(spec(), own());
  }
  void upload_results(const ExchangeBatch& batch, const ExchangeArrays& of, std::size_t i = 0) {
    const Matrix y = results_of(batch, of);
    arrays(i).results.upload(y.view().data, arrays(i).results.bytes());
  }
  Matrix sums(const ExchangeBatch& batch, DType dtype, std::size_t i = 0) {
    finish();
    return arrays(i).fetch_sums(batch, rank, dtype);
  }
};

// Dispatches and combines in graphs, which send what the memory holds at each replay.
inline void check_graphs(Player& player, const std::vector<ExchangeBatch>& batches) {
  player.load(batches[0]);
  player.world.barrier();
  gpu::Graph dispatch = gpu::Graph::capture(*player.stream, [&] { player.enqueue_dispatch(); });
  gpu::Graph both = gpu::Graph::capture(*player.stream, [&] {
    player.enqueue_dispatch();
    player.enqueue_combine(DType::kF32);
  });
  // Once each, so that nothing is loaded or allocated later.
  dispatch.launch(*player.stream);
  both.launch(*player.stream);
  player.stream->synchronize();
  player.world.barrier();
  for (const ExchangeBatch& batch : batches) {
    player.load(batch);
    dispatch.launch(*player.stream);
    const ExchangeArrays got = player.got();
    wrong_rows(batch, player.rank, player.spec().layout, got);
    player.upload_results(batch, got);
    for (int i = 0; i < 7; ++i) both.launch(*player.stream);
    wrong_sums(batch, player.rank, player.sums(batch, DType::kF32));
    wrong_rows(batch, player.rank, player.spec().layout, player.got());
  }
}

}  // namespace switchyard::testing
