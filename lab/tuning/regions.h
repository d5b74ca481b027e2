// RaMP's regions (arXiv 2604.26039, section IV-B): which features of a kernel a layer's shape and
// routing predict to help, beside what a profile has measured.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "switchyard/tuner.h"

namespace switchyard::tuner {

// The constants of a device from which the thresholds of the regions follow.
struct DeviceConstants {
  double block_start_us = 24;  // start of a lone block: launch, barriers, the first loads
  double tile_us = 0.130;      // one product of kReferenceRows x kTileColumns with a tile of tokens
  double split_us = 4.68;      // what splitting K costs a call: a second launch, or the sums
  std::uint64_t l2_bytes = std::uint64_t{60} << 20;
  double l2_share = 0.75;  // of the L2 cache that weights can have
  int num_sms = 132;
};
// These constants, fitted to a profile's own times. A call of at most one wave, without splits, in
// the configuration of the fewest token rows whose tasks are nearest to kReferenceRows wide, takes
// block_start_us + kappa * tile_us: least squares of errors over times, over models of different K.
// A product of another width counts in proportion. split_us is the mean of what the best
// configuration with splits loses of the kappa * tile_us * (1 - 1 / splits) that it would save;
// without such configurations it stays that of `others`, as do the L2 cache, if the profile does
// not know it, and its share. None if the models have one K, or times do not grow with it.
std::optional<DeviceConstants> measured_constants(const Profile& profile,
                                                  const DeviceConstants& others = {});
inline constexpr int kTileColumns = 128;  // tile_k
inline constexpr int kReferenceSplits = 4;

struct Thresholds {
  double rho = 0;           // block_start_us / tile_us
  double lambda_kappa = 0;  // l2_share * l2_bytes / bytes of a tile of weights
  // Splitting K by s saves kappa * tile_us * (1 - 1 / s) of a lone task, which must exceed
  // split_us.
  double kappa = 0;
  // The grid must have room for the s-fold tasks and once more for their sums: 1 / (s + 1).
  double split_omega = 0;
  double wide_omega = 1;
};
Thresholds thresholds_of(const DeviceConstants& device, int element_bytes = 1,
                         int splits = kReferenceSplits);

struct RegionVariables {
  double rho = 0;    // n * k / (weight_rows * kTileColumns): products of a block
  int lambda = 0;    // ceil(n / weight_rows): blocks of weight rows
  double kappa = 0;  // k / kTileColumns: depth
  double omega = 0;  // grid / SMs: waves
};
// `configuration` gives the height and width of a task. Its splits are left out of omega.
RegionVariables region_variables(const Model& model, const Configuration& configuration,
                                 std::span<const std::int64_t> counts, int num_sms);

// {rho below its threshold, not below} x {omega < 1, 1 to 8, > 8}.
enum class Region : std::uint8_t { kA1, kA2, kA3, kB1, kB2, kB3 };
const char* to_string(Region region);  // "A1" ... "B3"
Region region_of(const RegionVariables& variables, const Thresholds& thresholds);

// True if the feature is predicted to make the kernel faster.
bool split_k_helps(const RegionVariables& variables, const Thresholds& thresholds);
bool group_m_helps(const RegionVariables& variables, const Thresholds& thresholds);
bool wide_tiles_help(const RegionVariables& variables, const Thresholds& thresholds);

enum class Prediction : std::uint8_t { kSplitK, kGroupM, kWideTiles };
inline constexpr std::array<Prediction, 3> kPredictions{Prediction::kSplitK, Prediction::kGroupM,
                                                        Prediction::kWideTiles};
const char* to_string(Prediction prediction);  // "split_k", "group_m", "wide_tiles"

// A prediction beside what a profile has measured, for the points of a model where it says yes, or
// where it says no.
struct Finding {
  std::size_t model = 0;
  Prediction prediction{};
  bool predicted = false;  // to help
  std::size_t points = 0;
  // The geometric mean over these points: the best time of configurations without it, over the best
  // with it. Above 1: it helps.
  double measured_ratio = 1;

  bool confirmed() const { return predicted == (measured_ratio > 1); }
};
// A reference configuration of `token_rows` tokens and kReferenceRows rows of weights decides what
// is predicted. A prediction is left out if the kernel has no configurations with and without its
// feature.
std::vector<Finding> findings(const Profile& profile, const DeviceConstants& device,
                              int element_bytes = 1, int token_rows = 16);

}  // namespace switchyard::tuner
