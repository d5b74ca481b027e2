// Chooses the configuration of a kernel by the routing that it meets: profile, fit, select.
//
// The tuner knows nothing of a kernel but its configurations, how each of them cuts the work into
// tasks, and a callback that times one. So it serves the kernels of this library and others' alike.
//
//   tuner::Profile profile = tuner::new_profile(kernel, device, plan);
//   tuner::measure(profile, kernel, {.file = "olmoe.profile.json"});
//   tuner::Fit fit = tuner::fit(profile);
//   std::size_t best = tuner::select(fit, 0, tokens_per_expert);
//
// The cost model and the protocol are those of RaMP (arXiv 2604.26039), sections IV-A and V-A.
// Times are microseconds throughout, and counts are tokens of each expert, [E].
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "switchyard/error.h"
#include "switchyard/recording.h"

namespace switchyard::tuner {

// ---------------------------------------------------------------------------------- histograms

// How the histogram of a routing is drawn.
enum class Generator : std::uint8_t {
  kDistinct,  // a router's: each token draws top_k distinct experts; beta is ln K / ln E or more
  kRepeated,  // RaMP's: tokens * top_k draws, each independent; any beta, also of no router
};
const char* to_string(Generator generator);  // "distinct", "repeated"
// Throws Error{kInvalidArgument} naming the two.
Generator generator_named(std::string_view name);

// Draws tokens_per_expert [E], which sums up to tokens * top_k, with a balancedness near `beta`
// (see balancedness() in routing.h). Few draws cannot be balanced over many experts: then it is as
// balanced as they can be. Deterministic in its arguments, on every platform. Throws
// Error{kInvalidArgument} for a beta outside [0, 1], or top_k outside [1, E].
std::vector<std::int64_t> draw_counts(Generator generator, int tokens, int num_experts, int top_k,
                                      double beta, std::uint64_t seed);

// ------------------------------------------------------------------------------------- kernels

// A layer's shape, as the cost model sees it.
struct Model {
  std::string name{};
  int num_experts = 0, top_k = 0;
  int n = 0, k = 0;     // of an expert's first matrix: N rows (gate and up together), K columns
  bool unseen = false;  // nothing was developed on this model; results tell it apart

  bool operator==(const Model&) const = default;
};

// A way to run a kernel.
struct Configuration {
  std::string name{};  // no two of a kernel are equal
  // A task is the product of up to `token_rows` tokens of an expert with `weight_rows` rows of its
  // matrix, over 1 / `splits` of its columns.
  int token_rows = 1;   // RaMP's bm
  int weight_rows = 1;  // RaMP's ttn
  int splits = 1;
  int blocks = 1;   // thread blocks that do a task together
  int group_m = 1;  // tiles of an expert that share a block of weight rows in turn; 1: none do
  // The configuration stands for the kernel's own rule. It is timed as a baseline and never chosen.
  bool is_rule = false;
  // The kernel's own parameters, by name. The tuner only keeps them.
  std::vector<std::pair<std::string, std::int64_t>> values{};

  bool operator==(const Configuration&) const = default;
};

// The thread blocks' tasks of a call: g = sum over experts of ceil(c / token_rows)
// * ceil(n / weight_rows) * splits * blocks.
std::int64_t grid_of(const Configuration& configuration, int n,
                     std::span<const std::int64_t> counts);

struct Timing {
  double median_us = 0;
  double variation = 0;  // the standard deviation of the repetitions over their mean
};
// Times one configuration. Throws Error{kUnsupported} if the configuration cannot run this model;
// it is then left out there. Every other exception ends measure().
using Timer = std::function<Timing(const Model& model, std::size_t configuration,
                                   std::span<const std::int64_t> counts)>;

struct Kernel {
  std::string name{};
  std::int64_t version = 1;  // to be increased with every change that changes times
  std::vector<Configuration> configurations{};
  Timer time{};
};

// Where a kernel runs.
struct Device {
  std::string machine{};  // in words, with what times depend on: "NVIDIA H200, 132 SMs, CUDA 13.0"
  int num_sms = 0;        // blocks that run at the same time
  std::uint64_t l2_bytes = 0;  // 0: unknown

  bool operator==(const Device&) const = default;
};

// A file is of another kernel or machine, or older than the kernel. Its code is kInvalidArgument,
// and its message names both, and the file.
class MismatchError : public Error {
 public:
  MismatchError(const std::string& message, std::string field, std::string found,
                std::string wanted)
      : Error(ErrorCode::kInvalidArgument, message),
        field_(std::move(field)),
        found_(std::move(found)),
        wanted_(std::move(wanted)) {}
  const std::string& field() const { return field_; }  // "kernel", "version", "machine", ...
  const std::string& found() const { return found_; }
  const std::string& wanted() const { return wanted_; }

 private:
  std::string field_, found_, wanted_;
};

// ------------------------------------------------------------------------------------ profiles

// The points to time: a grid to fit on, and a grid to judge the fit by. Points of the second grid
// that are not in the first are held out.
struct Plan {
  std::vector<Model> models{};
  std::vector<int> tokens{8, 32, 128, 256, 512};
  std::vector<double> betas{0.35, 0.5, 0.65, 0.9, 1};
  std::vector<int> test_tokens{16, 32, 64, 128, 256, 1024};
  std::vector<double> test_betas{0.2, 0.5, 0.8, 1};
  Generator generator = Generator::kDistinct;
  std::uint64_t seed = 0;
  // Recorded histograms, beside the grids. All of them judge the fit; it is made on three of four
  // of each model. Each has its own beta.
  struct Recorded {
    std::size_t model = 0;  // index in `models`
    std::vector<std::int64_t> counts{};
  };
  std::vector<Recorded> recorded{};
};
// Adds to every model of the plan the histograms of recorded layers with its experts and top_k: at
// most `most` for a model, evenly over all different ones. Throws Error{kInvalidArgument} for a
// model that no recorded layer matches.
void add_recorded(Plan& plan, const Recordings& recordings, std::size_t most = 24);

inline constexpr int kReferenceRows = 256;  // weight rows of RaMP's reference configuration

inline constexpr double kNotTimed = -1;    // yet
inline constexpr double kUnsupported = 0;  // the configuration cannot run this model
inline constexpr double kPruned = -2;      // not to be timed: see MeasureOptions::prune

struct Point {
  std::size_t model = 0;  // index in Profile::models
  int tokens = 0;
  double beta = 0;          // asked for
  double beta_reached = 0;  // of `counts`
  bool fit = false;         // in the grid to fit on
  bool test = false;        // in the grid to judge by; held out unless it is in both
  std::vector<std::int64_t> counts{};
  std::vector<double> times_us{};    // [configurations]; kNotTimed, kUnsupported, kPruned, above 0
  std::vector<double> variations{};  // [configurations]; 0 without a time

  bool held_out() const { return !fit; }
  bool operator==(const Point&) const = default;
};

struct Profile {
  std::string kernel{};
  std::int64_t version = 0;
  Device device{};
  Generator generator = Generator::kDistinct;
  std::uint64_t seed = 0;
  std::vector<Configuration> configurations{};
  std::vector<Model> models{};
  std::vector<Point> points{};  // a model's stand together: first those to fit on

  bool operator==(const Profile&) const = default;
};

// A profile with all points of the plan and no times. Throws Error{kInvalidArgument} for a kernel
// or a plan that makes no sense, naming the value.
Profile new_profile(const Kernel& kernel, const Device& device, const Plan& plan);
// The profile in `file`, for measure() to continue: its times, and the plan's points that it lacks.
// Throws MismatchError if the file is of another kernel, version, machine, generator, seed or
// configurations, or has other shapes for these models; and what read_profile() throws.
Profile resumed_profile(const std::filesystem::path& file, const Kernel& kernel,
                        const Device& device, const Plan& plan);

struct Progress {
  std::uint64_t done = 0, total = 0;  // timings; those of earlier runs count as done
  double seconds = 0;                 // of this run
  double seconds_left = 0;            // if the rest goes at the rate of this run
  const Model* model = nullptr;       // of the timing that comes next; null at the end
};

struct MeasureOptions {
  // Where the profile is kept, whole at any time: after each point, and at the end. Empty: nowhere.
  std::filesystem::path file{};
  // No timing begins after this time.
  double budget_seconds = std::numeric_limits<double>::infinity();
  // Leaves out configurations that are slower than the best by more than this share (0.25 is 25 %)
  // at every pilot of a model: its points to fit on with the fewest, the middle and the most
  // tokens, at the lowest and highest beta, which are timed first. They are neither fitted nor
  // chosen, and what is called exhaustive is the best of the others. It always keeps the kernel's
  // rule and, at each pilot, the best with and without splits, with and without group_m, and with
  // and without more weight rows than kReferenceRows. fit() leaves out kept ones that are slower
  // than the best by more than 25 % at every point to fit on.
  std::optional<double> prune{};
  std::function<void(const Progress&)> progress{};  // before each timing, and at the end
  std::function<double()> clock{};                  // seconds; empty: the steady clock
};
// How many configurations of a model are pruned.
std::size_t num_pruned(const Profile& profile, std::size_t model);
// Times everything that the profile lacks. Returns true if it lacks nothing now, false if the
// budget ended first. Throws what the kernel's callback throws, and Error{kSystem} if the file
// cannot be written.
bool measure(Profile& profile, const Kernel& kernel, const MeasureOptions& options = {});

// The models whose points to fit on are all timed, with all of their points. They can be fitted
// after a budget has ended.
Profile complete_models(const Profile& profile);

std::string to_json(const Profile& profile);
// Throws Error{kInvalidFile} naming `source` and what is wrong in it.
Profile parse_profile(std::string_view text, const std::string& source);
Profile read_profile(const std::filesystem::path& file);
void write_profile(const std::filesystem::path& file, const Profile& profile);

// ---------------------------------------------------------------------------------- cost model

// RaMP's model is T = a + b * waves + c * g + d * log(g + 1), with waves = g / SMs as it prints it,
// or rounded up. As printed, b's and c's regressors are multiples of each other: the fit is that
// with b = 0. d is 0 unless the median grid of the points fitted on is below the SMs.
//
// kExperts has two other regressors. e is what g would be if the rows of every expert were one
// tile: the tasks that have to read weights, whatever the rows. h is the rows of the highest tile,
// because the longest task ends last.
enum class Form : std::uint8_t {
  kTasks,         // a + c g
  kWaves,         // a + b g / SMs + c g
  kRoundedWaves,  // a + b ceil(g / SMs) + c g
  kFull,          // a + b g / SMs + c g + d log(g + 1)
  kRoundedFull,   // a + b ceil(g / SMs) + c g + d log(g + 1)
  kExperts,       // a + b ceil(g / SMs) + c e + d h
};
inline constexpr std::array<Form, 6> kForms{Form::kTasks, Form::kWaves,       Form::kRoundedWaves,
                                            Form::kFull,  Form::kRoundedFull, Form::kExperts};
// "tasks", "waves", "rounded_waves", "full", "rounded_full", "experts"
const char* to_string(Form form);
constexpr bool rounds_waves(Form form) {
  return form == Form::kRoundedWaves || form == Form::kRoundedFull || form == Form::kExperts;
}
Form form_named(std::string_view name);

struct FitOptions {
  Form form = Form::kExperts;
  // True: least squares minimise the error over the time. False: the error, as in RaMP.
  bool relative = true;
  // A model's coefficients come from the other models' points; those of tasks are fitted for each
  // column of K. This shows how well a fit carries over to models that were never timed.
  bool from_other_models = false;
};

struct Coefficients {
  float a = 0, b = 0, c = 0, d = 0;
  // The points fitted on. 0: the configuration cannot run this model or is pruned, and is never
  // chosen.
  int points = 0;
  double r2 = 0;  // 1 - residual / total sum of squares of the times

  bool operator==(const Coefficients&) const = default;
};

struct Fit {
  std::string kernel{};
  std::int64_t version = 0;
  Device device{};
  FitOptions options{};
  std::vector<Configuration> configurations{};
  std::vector<Model> models{};
  std::vector<std::vector<Coefficients>> coefficients{};  // [models][configurations]
};

// The number of points of a model that a fit of this form wants at least: it has as many
// coefficients.
int fewest_points(Form form);

// Fits every configuration of every model of the profile on its points that are to fit on and have
// times. Throws Error{kInvalidArgument} if a model has no configuration with as many of them as the
// form has coefficients.
Fit fit(const Profile& profile, const FitOptions& options = {});

double predict_us(const Fit& fit, std::size_t model, std::size_t configuration,
                  std::span<const std::int64_t> counts);
// The configuration with the least predicted time. Throws Error{kInvalidArgument} for a model that
// the fit does not have, or counts of another number of experts.
std::size_t select(const Fit& fit, std::size_t model, std::span<const std::int64_t> counts);
// The index of a model by name. Throws Error{kInvalidArgument} naming those that there are.
std::size_t model_index(const Fit& fit, std::string_view name);

std::string to_json(const Fit& fit);
Fit parse_fit(std::string_view text, const std::string& source);
// Reads a fit for use with this kernel on this device. Throws MismatchError if it is of another
// kernel or machine, older or newer than the kernel, or of other configurations.
Fit read_fit(const std::filesystem::path& file, const Kernel& kernel, const Device& device);
void write_fit(const std::filesystem::path& file, const Fit& fit);

// All that a kernel needs to choose for one model: four floats for each configuration.
struct Table {
  std::string kernel{};
  std::int64_t version = 0;
  Device device{};
  Model model{};
  Form form = Form::kExperts;
  struct Entry {
    Configuration configuration{};
    float a = 0, b = 0, c = 0, d = 0;
  };
  std::vector<Entry> entries{};
};
// The configurations that the fit chooses for at least one of the routings: every beta of 0, 0.05,
// ... 1 from both generators, and every power of two of tokens up to `most_tokens`.
Table make_table(const Fit& fit, std::size_t model, int most_tokens = 1024);
// Evaluates in float, in the order of Form, as a device would. Ties go to the earlier entry. Throws
// Error{kInvalidArgument} for a table without entries.
std::size_t select(const Table& table, std::span<const std::int64_t> counts);
std::string to_json(const Table& table);
Table parse_table(std::string_view text, const std::string& source);
// Reads a table and does not check it against a kernel, which GroupedGemm does by itself.
Table read_table(const std::filesystem::path& file);
void write_table(const std::filesystem::path& file, const Table& table);

// ----------------------------------------------------------------------------------- judgement

// The measured times of each way to choose, at a point of the grid to judge by.
struct Outcome {
  std::size_t point = 0;  // index in Profile::points
  std::size_t best = 0, chosen = 0;
  double exhaustive_us = 0;  // the best configuration
  double chosen_us = 0;      // the cost model's choice
  double predicted_us = 0;   // its time as predicted
  // The best configuration at beta 1 and the nearest number of tokens with times: what tuners that
  // look at the tokens alone produce. With coarse buckets only every second number of tokens is
  // known.
  std::optional<double> static_us{}, coarse_static_us{};  // none if no point has beta 1
  std::optional<double> rule_us{};  // the kernel's own rule, if a configuration stands for it

  double regret() const { return chosen_us / exhaustive_us - 1; }
};
// At each point the cost model chooses among the configurations that can run it. Points without
// times of all their configurations are left out.
std::vector<Outcome> evaluate(const Profile& profile, const Fit& fit);

}  // namespace switchyard::tuner
