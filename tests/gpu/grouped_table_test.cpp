// Selection inside the launch: a table in device memory, of which the kernel chooses by the rows of
// each expert.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gpu/device.h"
#include "operators/problem.h"
#include "support/on_gpu.h"
#include "switchyard/tuner.h"

namespace switchyard::testing {
namespace {

using GpuGroupedTable = OnGpu<::testing::Test>;
using Bytes = std::vector<std::byte>;

gpu::DeviceBuffer upload(const void* data, std::size_t bytes) {
  gpu::DeviceBuffer buffer(std::max<std::size_t>(bytes, 16));
  if (bytes != 0) buffer.upload(data, bytes);
  return buffer;
}

tuner::Table::Entry entry(const GroupedSchedule& schedule, int weight_rows, float a, float b,
                          float c) {
  tuner::Configuration configuration;
  configuration.name = "an entry";
  configuration.token_rows = *schedule.tile_rows;
  configuration.weight_rows = weight_rows;
  configuration.splits = schedule.splits.value_or(1);
  configuration.values = {{"tile_rows", *schedule.tile_rows},
                          {"paired", schedule.paired.value_or(false) ? 1 : 0},
                          {"splits", schedule.splits.value_or(1)}};
  if (schedule.stages) configuration.values.emplace_back("stages", *schedule.stages);
  if (schedule.band) configuration.values.emplace_back("band", *schedule.band);
  return {configuration, a, b, c, 0};
}

tuner::Table table_of(const Problem& problem, std::vector<tuner::Table::Entry> entries) {
  const GroupedGemmSpec spec = problem.spec();
  tuner::Table table;
  table.kernel = grouped_kernel_name(problem.compute());
  table.version = kGroupedKernelVersion;
  table.device = {"this machine", gpu::device_info(gpu::current_device()).num_sms, 0};
  table.model = {"a model", spec.num_experts, 1, spec.n, spec.k};
  table.form = tuner::Form::kRoundedFull;
  table.entries = std::move(entries);
  return table;
}

// A problem's arrays on the device, whose ends can be changed.
class Calls {
 public:
  explicit Calls(const Problem& problem)
      : problem_(problem),
        ends_(static_cast<std::size_t>(problem.spec().num_experts) * 8),
        chosen_(sizeof(std::int32_t)) {}

  std::unique_ptr<GroupedGemm> make(const GroupedSchedule& schedule) const {
    GroupedGemmOptions options;
    options.backend = Backend::kCuda;
    options.compute = problem_.get().compute;
    options.schedule = schedule;
    return std::make_unique<GroupedGemm>(problem_.spec(), problem_.weights(), options);
  }
  std::unique_ptr<GroupedGemm> make(const tuner::Table& table) const {
    GroupedGemmOptions options;
    options.backend = Backend::kCuda;
    options.compute = problem_.get().compute;
    options.table = std::make_shared<tuner::Table>(table);
    return std::make_unique<GroupedGemm>(problem_.spec(), problem_.weights(), options);
  }

  // Calls `body` with arrays on the device; counts() sets the rows that each expert has of them.
  void with_arrays(GroupedGemm& gemm, const std::function<void()>& body) {
    problem_.run(
        gemm, [&](GroupedGemm&, GroupedInput input, GroupedOutput output,
                  std::span<const std::byte> x, std::span<std::byte> out, std::span<std::byte>) {
          ASSERT_TRUE(input.index.empty());
          x_ = upload(x.data(), x.size());
          if (input.x.scale != nullptr) {
            const auto scales = static_cast<std::size_t>((input.x.rows - 1) * input.x.scale_stride +
                                                         (input.x.cols + 127) / 128);
            scales_ = upload(input.x.scale, scales * sizeof(float));
            input.x.scale = reinterpret_cast<const float*>(scales_.data());
          }
          out_ = upload(out.data(), out.size());
          input.x.data = x_.data();
          input.ends = {ends_.data(), input.ends.dtype(), input.ends.size()};
          input.stream = stream_.handle();
          output.data = out_.data();
          output.chosen = reinterpret_cast<std::int32_t*>(chosen_.data());
          input_ = input;
          output_ = output;
          body();
        });
  }

  void counts(const std::vector<int>& rows) {
    stream_.synchronize();
    std::vector<std::int32_t> narrow;
    std::vector<std::int64_t> wide;
    int end = 0;
    for (const int count : rows) {
      narrow.push_back(end += count);
      wide.push_back(end);
    }
    if (input_.ends.dtype() == DType::kI64) {
      ends_.upload(wide.data(), wide.size() * 8);
    } else {
      ends_.upload(narrow.data(), narrow.size() * 4);
    }
  }
  void run(GroupedGemm& gemm) { gemm.run(input_, output_); }
  Bytes output() {
    stream_.synchronize();
    Bytes bytes(out_.bytes());
    out_.download(bytes.data(), bytes.size());
    return bytes;
  }
  int chosen() {
    stream_.synchronize();
    std::int32_t entry = -2;
    chosen_.download(&entry, sizeof entry);
    return entry;
  }
  const gpu::Stream& stream() const { return stream_; }

 private:
  const Problem& problem_;
  gpu::Stream stream_;
  gpu::DeviceBuffer ends_, chosen_, x_, scales_, out_;
  GroupedInput input_;
  GroupedOutput output_;
};

Case case_of(bool fp8, const std::vector<int>& rows) {
  Case c;
  c.rows = rows;
  c.epilogue = Activation();
  if (fp8) {
    c.n = 512;
    c.k = 272;
    c.weight = DType::kF8E4M3;
    c.scales = Scales::kBlocks;
    c.x = DType::kF8E4M3;
  } else {
    c.n = 208;
    c.k = 328;
    c.compute = DType::kBF16;
  }
  return c;
}

// Replays of one graph choose by the ends that they find: an entry with splits while there are few
// tasks, and one without when there are more. The bits are those of the schedules themselves.
TEST_F(GpuGroupedTable, ReplaysOfOneGraphChooseByTheirEnds) {
  for (const bool fp8 : {false, true}) {
    SCOPED_TRACE(fp8 ? "fp8" : "bf16");
    const std::vector<int> spread{30, 0, 70, 9}, together{109, 0, 0, 0};
    const Problem problem(case_of(fp8, spread));
    GroupedSchedule whole, split;
    whole.tile_rows = fp8 ? 128 : 192;
    whole.band = 1;
    split.tile_rows = fp8 ? 64 : 16;
    split.splits = fp8 ? 2 : 4;
    whole.paired = split.paired = false;
    const int weight_rows = fp8 ? 256 : 128;
    // Tasks of `split`: bf16 (2 + 5 + 1) tiles * 2 * 4 = 64 or 7 * 8 = 56; fp8 4 * 4 or 2 * 4.
    const tuner::Table table = table_of(problem, {entry(whole, weight_rows, fp8 ? 12 : 60, 0, 0),
                                                  entry(split, weight_rows, 0, 0, 1)});
    Calls calls(problem);
    const auto choosing = calls.make(table), as_whole = calls.make(whole),
               as_split = calls.make(split);
    calls.with_arrays(*choosing, [&] {
      const auto expected = [&](GroupedGemm& gemm, const std::vector<int>& rows) {
        calls.counts(rows);
        calls.run(gemm);
        EXPECT_EQ(calls.chosen(), -1) << "there is no table";
        return calls.output();
      };
      const Bytes spread_whole = expected(*as_whole, spread),
                  together_split = expected(*as_split, together);
      calls.run(*choosing);  // makes room for the parts of K, which a captured call may not
      calls.stream().synchronize();
      gpu::Graph graph = gpu::Graph::capture(calls.stream(), [&] { calls.run(*choosing); });
      EXPECT_EQ(graph.num_nodes(), 1);
      for (int round = 0; round < 3; ++round) {
        calls.counts(spread);
        graph.launch(calls.stream());
        EXPECT_EQ(calls.chosen(), 0);
        EXPECT_TRUE(calls.output() == spread_whole) << round;
        calls.counts(together);
        graph.launch(calls.stream());
        EXPECT_EQ(calls.chosen(), 1);
        EXPECT_TRUE(calls.output() == together_split) << round;
      }
    });
  }
}

// Random tables of as many heights as there may be, and more entries than a warp has lanes: the
// device chooses what tuner::select() chooses, and the results are those without a table.
TEST_F(GpuGroupedTable, ChoosesAsTheTuner) {
  std::mt19937 random(11);
  std::uniform_real_distribution<float> real(0, 1);
  std::set<int> seen;
  for (const int experts : {1, 31, 33, 257, 1024}) {
    Case c = case_of(false, std::vector<int>(static_cast<std::size_t>(experts), 1));
    c.k = 72;
    c.rows.back() = 500;
    c.wide_ends = experts == 33;
    const Problem problem(c);
    Calls calls(problem);
    for (int round = 0; round < 3; ++round) {
      std::vector<tuner::Table::Entry> entries;
      for (int i = 0; i < 45; ++i) {
        GroupedSchedule schedule;
        schedule.tile_rows = 16 * (1 + i % 16);
        schedule.stages = 2 + i % 5;
        if (i % 3 != 0) schedule.band = 1 + i % 4;
        entries.push_back(
            entry(schedule, 128, 20 * real(random), 5 * real(random), 0.05f * real(random)));
      }
      tuner::Table table = table_of(problem, entries);
      if (round == 1) {
        table.form = tuner::Form::kExperts;
        for (tuner::Table::Entry& its : table.entries) its.d = 0.5f * real(random);
      }
      const auto gemm = calls.make(table), plain = calls.make(GroupedSchedule{});
      calls.with_arrays(*gemm, [&] {
        for (int i = 0; i < 6; ++i) {
          const int total = static_cast<int>(std::min(problem.get().total(), 1 << (2 * i)));
          const std::vector<std::int64_t> drawn =
              tuner::draw_counts(tuner::Generator::kRepeated, total, experts, 1, real(random),
                                 static_cast<std::uint64_t>(i));
          calls.counts({drawn.begin(), drawn.end()});
          calls.run(*plain);
          const Bytes expected = calls.output();
          calls.run(*gemm);
          EXPECT_TRUE(calls.output() == expected) << experts << " experts, " << total << " rows";
          const int wanted = static_cast<int>(tuner::select(table, drawn));
          EXPECT_EQ(calls.chosen(), wanted) << experts << " experts, " << total << " rows";
          seen.insert(wanted);
        }
      });
    }
  }
  EXPECT_GT(seen.size(), 5u) << "the tables leave no choice";
}

// The number of rows chooses what a launch fixes.
TEST_F(GpuGroupedTable, PairsAreChosenByTheNumberOfRows) {
  for (const bool fp8 : {false, true}) {
    for (const bool many : {false, true}) {
      const Problem problem(
          case_of(fp8, many ? std::vector<int>{900, 100, 300, 700} : std::vector<int>{3, 0, 7, 9}));
      GroupedSchedule single, paired;
      single.tile_rows = 64;
      paired.tile_rows = 128;
      single.paired = false;
      paired.paired = true;
      const int weight_rows = fp8 ? 256 : 128;
      const tuner::Table table = table_of(
          problem, {entry(single, weight_rows, 0, 0, 1), entry(paired, weight_rows, 30, 0, 0.1f)});
      Calls calls(problem);
      const auto gemm = calls.make(table), plain = calls.make(GroupedSchedule{});
      calls.with_arrays(*gemm, [&] {
        calls.counts(problem.get().rows);
        calls.run(*plain);
        const Bytes expected = calls.output();
        calls.run(*gemm);
        EXPECT_TRUE(calls.output() == expected);
        EXPECT_EQ(calls.chosen(), many ? 1 : 0);
      });
    }
  }
}

TEST_F(GpuGroupedTable, OtherTablesAreRefused) {
  const Problem problem(case_of(false, {3, 0, 7, 9}));
  GroupedSchedule single;
  single.tile_rows = 64;
  single.paired = false;
  tuner::Table table = table_of(problem, {entry(single, 128, 0, 0, 1)});
  Calls calls(problem);
  EXPECT_NO_THROW(calls.make(table));
  ++table.device.num_sms;
  EXPECT_THROW(calls.make(table), tuner::MismatchError);
  --table.device.num_sms;
  table.kernel = "grouped_fp8";
  EXPECT_THROW(calls.make(table), tuner::MismatchError);
  table.kernel = "grouped_bf16";
  GroupedGemmOptions options;
  options.backend = Backend::kCuda;
  options.table = std::make_shared<tuner::Table>(table);
  options.schedule.paired = true;
  EXPECT_THROW(GroupedGemm(problem.spec(), problem.weights(), options), Error);
}

}  // namespace
}  // namespace switchyard::testing
