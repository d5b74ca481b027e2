// Recordings of the routing of a layer's last steps (MoeLayer::recording()), and their files.
//
//   options.recorded_steps = 1000;
//   options.name = "layers.3";
//   ...
//   write_recordings("routing.json", {"NVIDIA H200", {layer.recording()}});
//
// `switchyard report --routing` draws such files, and `switchyard tune --histograms` tunes for
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard {

struct RecordedStep {
  std::uint64_t step = 0;   // of the layer, counted from 0 since it was made
  std::uint64_t epoch = 0;  // ForwardStats::epoch of the pass
  std::int64_t tokens = 0;  // of the rank that recorded
  // [E]: the rows of each expert, of all ranks' tokens, after slots were dropped. So every rank of
  // a world records the same, and a rank's own experts are the part own_experts() tells.
  std::vector<std::int64_t> counts{};

  bool operator==(const RecordedStep&) const = default;
};

struct Recording {
  std::string layer{};  // Diagnostics::name
  int rank = 0, num_ranks = 1;
  int num_experts = 0, top_k = 0;
  int n = 0, k = 0;  // of an expert's first matrix, as tuner::Model has them
  // Steps that the layer recorded once and does not have any more.
  std::uint64_t overwritten = 0;
  std::vector<RecordedStep> steps{};  // the oldest first

  bool operator==(const Recording&) const = default;
};

// Balancedness of each step (see balancedness() in routing.h).
std::vector<double> balancedness_of(const Recording& recording);

struct Recordings {
  std::string machine{};  // in words; may be empty
  std::vector<Recording> layers{};

  bool operator==(const Recordings&) const = default;
};
std::string to_json(const Recordings& recordings);
// Throws Error{kInvalidFile} naming `source` and what is wrong in it.
Recordings parse_recordings(std::string_view text, const std::string& source);
Recordings read_recordings(const std::filesystem::path& file);
void write_recordings(const std::filesystem::path& file, const Recordings& recordings);

}  // namespace switchyard
