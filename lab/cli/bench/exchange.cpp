// `switchyard bench exchange`: dispatch and combine alone.
#include "bench/exchange.h"

#include <algorithm>
#include <memory>

#include "base/names.h"
#include "base/plural.h"
#include "cli/bench/common.h"
#include "cli/lists.h"
#include "protocol/control.h"

namespace switchyard::cli {
namespace {

using results::ExchangeRow;

struct ExchangeCommand : CommonOptions {
  using CommonOptions::CommonOptions;
  int ranks = 2, hidden = 0, experts = 0, top_k = 0;
  std::vector<std::int64_t> tokens;
  std::optional<DType> dtype;
  bool pre_sum = false;
};

constexpr const char* kHelp = R"(Examples:
  switchyard bench exchange --ranks 4 --tokens 128,512 --dtype fp8

Ranks are threads, with DeepSeek-V3's routing or that of --hidden, --experts and --top-k. All
results are checked. Ranks are on the cpu, or, with --backend cuda, on GPUs, which they share if
there are fewer; there a time is that of a call among ten in a graph. Where more than two ranks
share a GPU, set CUDA_DEVICE_MAX_CONNECTIONS=32.)";

// The suite's points, of which the options choose, or those of the options' sizes.
std::vector<bench::ExchangePoint> points_of(const ExchangeCommand& o) {
  std::vector<bench::ExchangePoint> points = bench::exchange_suite();
  std::vector<std::int64_t> tokens = o.tokens;
  if (tokens.empty() && o.quick) tokens = {8, 512};
  if (o.dtype) {
    std::erase_if(points, [](const auto& point) { return point.dtype != DType::kBF16; });
    for (bench::ExchangePoint& point : points) point.dtype = *o.dtype;
    if (*o.dtype != DType::kBF16 && *o.dtype != DType::kF8E4M3) {
      refuse(fmt::format("--dtype is {}; an exchange is measured in bf16 and fp8",
                         short_name(*o.dtype)));
    }
  }
  if (!tokens.empty()) {
    std::vector<bench::ExchangePoint> chosen;
    for (const bench::ExchangePoint& point : points) {
      if (point.tokens != points.front().tokens) continue;
      for (const std::int64_t count : tokens) {
        chosen.push_back(point);
        chosen.back().tokens = count;
      }
    }
    points = chosen;
  }
  for (bench::ExchangePoint& point : points) {
    if (o.hidden > 0) point.hidden = o.hidden;
    if (o.experts > 0) point.experts = o.experts;
    if (o.top_k > 0) point.top_k = o.top_k;
    require_top_k(point.top_k, point.experts);
  }
  return points;
}

std::string heading() {
  return fmt::format("{:>8} {:>6} {:>5} {:>4} {:>5} {:>7} {:>10} {:>21} {:>9} {:>6}", "stage",
                     "hidden", "exp.", "topk", "dtype", "tokens", "time us", "p10 .. p90 us",
                     "MB sent", "GB/s");
}

void print(const ExchangeRow& row) {
  fmt::print(
      "{:>8} {:>6} {:>5} {:>4} {:>5} {:>7} {:>10.1f} {:>9.1f} .. {:>8.1f} {:>9.2f} "
      "{:>6.2f}\n",
      row.stage, row.hidden, row.experts, row.top_k, row.dtype, row.tokens_per_rank, row.median_us,
      row.p10_us, row.p90_us, row.nvlink_bytes * 1e-6, row.nvlink_bytes * 1e-3 / row.median_us);
}

int run(const ExchangeCommand& o) {
  bench::ExchangeBenchOptions options;
  options.backend = o.backend_of_ranks("exchange");
  const std::vector<bench::ExchangePoint> points = points_of(o);
  const std::filesystem::path json = o.rows_file<ExchangeRow>();
  options.ranks = o.ranks;
  options.repeat = o.repeat_or(10);
  options.pre_sum = o.pre_sum;
  static_cast<bench::RunNote&>(options) = o;
  RowsPrinter<bench::ExchangeObserver, ExchangeRow> printer(json, print);
  bench::ExchangeSession session(options, printer);
  print_head(
      fmt::format("{}; Exchange alone over {}{}", session.machine(), plural(options.ranks, "rank"),
                  o.pre_sum ? ", a token's results of one rank summed before they travel" : ""),
      "", heading());
  session.run(points);
  return printer.exit_code();
}

}  // namespace

void add_exchange(Command& bench, const std::string& typed) {
  Command& command = bench.add_command("exchange", "Dispatch and combine alone, over ranks");
  const auto o = std::make_shared<ExchangeCommand>(typed);
  command.heading("Points");
  command.add_whole("--ranks", o->ranks, 1, protocol::kMaxRanks, "Ranks (default 2)");
  add_wholes(command, "--tokens", o->tokens, 1 << 20, "Tokens of each rank (default the suite's)");
  add_routing_options(command, o->hidden, o->experts, o->top_k);
  command.add_dtype("--dtype", o->dtype, TypeOf::kOperands, "Tokens in bf16 or fp8 (default both)");
  command.add_flag("--pre-sum", o->pre_sum,
                   "A token's results of one rank are summed before they travel");
  add_common_options(command, *o, "Only 8 and 512 tokens, 10 calls each");
  command.footer(kHelp);
  command.runs([o] { return run(*o); });
}

}  // namespace switchyard::cli
