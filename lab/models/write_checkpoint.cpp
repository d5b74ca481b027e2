#include <fmt/core.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <span>
#include <utility>

#include "base/printable.h"
#include "base/whole_file.h"
#include "model/safetensors.h"
#include "model/tensor_names.h"
#include "models/four_bit_layout.h"
#include "models/generate.h"
#include "models/random_tensor.h"
#include "models/safetensors_writer.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

using Bytes = std::vector<std::byte>;

// One tensor of the checkpoint: its header entry, and how to produce its data piece by piece.
struct Planned {
  TensorInfo info;
  std::uint64_t bytes = 0;
  std::function<void(SafetensorsWriter&)> write;
};

Bytes generate(const RandomTensor& tensor) {
  Bytes data(static_cast<std::size_t>(tensor.data_bytes()));
  fill(tensor, data.data());
  return data;
}

Bytes generate_scales(const RandomTensor& tensor) {
  Bytes scales(static_cast<std::size_t>(tensor.scale_bytes()));
  fill_scales(tensor, scales.data());
  return scales;
}

// The rows of two matrices in turn, `row_bytes` each.
Bytes interleaved(const Bytes& first, const Bytes& second, std::size_t row_bytes) {
  Bytes both;
  both.reserve(first.size() + second.size());
  for (std::size_t at = 0; at < first.size(); at += row_bytes) {
    for (const Bytes* const rows : {&first, &second}) {
      const auto row = rows->begin() + static_cast<std::ptrdiff_t>(at);
      both.insert(both.end(), row, row + static_cast<std::ptrdiff_t>(row_bytes));
    }
  }
  return both;
}

// Copies [rows, cols] to out[c * out_cols + offset + r * step]. It takes square blocks, because one
// of the two sides is always strided and a row of either exceeds the L1 cache.
void scatter_transposed(const Bytes& in, std::int64_t rows, std::int64_t cols, std::size_t element,
                        Bytes& out, std::int64_t out_cols, std::int64_t offset, std::int64_t step) {
  constexpr std::int64_t kBlock = 64;
  for (std::int64_t r0 = 0; r0 < rows; r0 += kBlock)
    for (std::int64_t c0 = 0; c0 < cols; c0 += kBlock)
      for (std::int64_t c = c0; c < std::min(c0 + kBlock, cols); ++c)
        for (std::int64_t r = r0; r < std::min(r0 + kBlock, rows); ++r)
          std::memcpy(
              out.data() + static_cast<std::size_t>(c * out_cols + offset + r * step) * element,
              in.data() + static_cast<std::size_t>(r * cols + c) * element, element);
}

// Plans the tensors of one layer under one family's names.
class LayerWriter {
 public:
  LayerWriter(const TensorNames& names, int layer, bool packed, FourBitLayout layout,
              const LayerSpec& spec, const std::vector<RandomTensor>& tensors)
      : names_(names),
        base_(fmt::format("{}{}{}", names.stack, layer, names.block)),
        packed_(packed),
        layout_(layout),
        spec_(spec) {
    for (const RandomTensor& tensor : tensors) by_role_[{tensor.role, tensor.expert}] = tensor;
  }

  std::vector<Planned> plan() {
    for (const auto& [key, tensor] : by_role_) plan_one(tensor);
    if (layout_ == FourBitLayout::kBlocks) {
      plan_blocks();
    } else if (packed_) {
      plan_packed();
    }
    return std::move(planned_);
  }

 private:
  void plan_one(const RandomTensor& tensor) {
    const int e = tensor.expert;
    switch (tensor.role) {
      case TensorRole::kRouter: return add_matrix(base_ + names_.router, tensor);
      case TensorRole::kRouterBias: return add_vector(base_ + names_.router_bias, tensor);
      case TensorRole::kCorrectionBias: return add_vector(base_ + names_.correction_bias, tensor);
      case TensorRole::kHashTable: return add_matrix(base_ + names_.hash_table, tensor);
      case TensorRole::kSharedGate: return add_module(names_.shared_gate, tensor);
      case TensorRole::kSharedUp: return add_module(names_.shared_up, tensor);
      case TensorRole::kSharedDown: return add_module(names_.shared_down, tensor);
      case TensorRole::kSharedSigmoidGate:
        return add_matrix(base_ + names_.shared_sigmoid_gate, tensor);
      case TensorRole::kGate:
      case TensorRole::kUp:
      case TensorRole::kDown:
        if (!packed_) add_module(expert_name(pattern(tensor.role), e), tensor);
        return;
      case TensorRole::kGateBias:
      case TensorRole::kUpBias:
      case TensorRole::kDownBias:
        if (!packed_) add_vector(base_ + expert_name(pattern(tensor.role), e) + ".bias", tensor);
        return;
    }
  }

  const char* pattern(TensorRole role) const {
    if (role == TensorRole::kGate || role == TensorRole::kGateBias) return names_.gate;
    if (role == TensorRole::kUp || role == TensorRole::kUpBias) return names_.up;
    return names_.down;
  }

  void add(const std::string& name, const char* dtype, std::vector<std::int64_t> shape,
           std::uint64_t bytes, std::function<void(SafetensorsWriter&)> write) {
    Planned planned;
    planned.info.name = name;
    planned.info.dtype = dtype;
    planned.info.shape = std::move(shape);
    planned.bytes = bytes;
    planned.write = std::move(write);
    planned_.push_back(std::move(planned));
  }

  void add_matrix(const std::string& name, const RandomTensor& tensor) {
    add(name, safetensors_name(tensor.dtype), {tensor.rows, tensor.cols}, tensor.data_bytes(),
        [tensor](SafetensorsWriter& writer) { writer.append(generate(tensor)); });
  }

  void add_vector(const std::string& name, const RandomTensor& tensor) {
    add(name, safetensors_name(tensor.dtype), {tensor.cols}, tensor.data_bytes(),
        [tensor](SafetensorsWriter& writer) { writer.append(generate(tensor)); });
  }

  // The tensors of a matrix that has four bits, or "<module>.weight" and, if it is FP8, its scales.
  void add_module(const std::string& module, const RandomTensor& tensor) {
    if (is_four_bit(tensor.dtype)) return add_four_bit_module(module, tensor);
    add_matrix(base_ + module + ".weight", tensor);
    if (tensor.num_scales() == 0) return;
    add(fmt::format("{}{}.{}", base_, module, names_.scale_suffix), "F32",
        {tensor.scale_rows(), tensor.scale_cols()}, tensor.scale_bytes(),
        [tensor](SafetensorsWriter& writer) { writer.append(generate_scales(tensor)); });
  }

  void add_four_bit_module(const std::string& module, const RandomTensor& tensor) {
    for (const StoredTensor& stored : stored_tensors(layout_, tensor)) {
      const std::string name = fmt::format("{}{}.{}", base_, module, stored.suffix);
      switch (stored.part) {
        case StoredTensor::Part::kCodes:
          add(name, stored.dtype, stored.shape, tensor.data_bytes(),
              [tensor](SafetensorsWriter& writer) { writer.append(generate(tensor)); });
          break;
        case StoredTensor::Part::kScales:
          add(name, stored.dtype, stored.shape, tensor.scale_bytes(),
              [tensor](SafetensorsWriter& writer) { writer.append(generate_scales(tensor)); });
          break;
        case StoredTensor::Part::kShape: {
          const std::array<std::int64_t, 2> shape = {tensor.rows, tensor.cols};
          add(name, stored.dtype, stored.shape, sizeof shape, [shape](SafetensorsWriter& writer) {
            writer.append(std::as_bytes(std::span(shape)));
          });
          break;
        }
      }
    }
  }

  std::vector<RandomTensor> all_experts(TensorRole role) const {
    std::vector<RandomTensor> result;
    for (int e = 0; e < spec_.num_experts; ++e) result.push_back(by_role_.at({role, e}));
    return result;
  }

  // Plans FourBitLayout::kBlocks.
  void plan_blocks() {
    const std::vector<RandomTensor> gates = all_experts(TensorRole::kGate);
    const std::vector<RandomTensor> ups = all_experts(TensorRole::kUp);
    const std::vector<RandomTensor> downs = all_experts(TensorRole::kDown);
    add_blocks({"_blocks", generate, bytes_of(ups.front().dtype, kMxGroup)}, gates, ups, downs);
    add_blocks({"_scales", generate_scales, 1}, gates, ups, downs);
    plan_packed_biases();
  }

  // One of the two tensors of a matrix.
  struct Part {
    const char* suffix;
    Bytes (*make)(const RandomTensor&);
    std::int64_t group_bytes;  // of a group of columns
  };

  void add_blocks(const Part& part, const std::vector<RandomTensor>& gates,
                  const std::vector<RandomTensor>& ups, const std::vector<RandomTensor>& downs) {
    const auto add_part = [&](const char* name, std::int64_t rows, std::int64_t groups,
                              std::function<void(SafetensorsWriter&)> write) {
      std::vector<std::int64_t> shape = {spec_.num_experts, rows, groups};
      if (part.group_bytes > 1) shape.push_back(part.group_bytes);
      const std::int64_t bytes = spec_.num_experts * rows * groups * part.group_bytes;
      add(base_ + name + part.suffix, "U8", std::move(shape), static_cast<std::uint64_t>(bytes),
          std::move(write));
    };
    const RandomTensor &up = ups.front(), &down = downs.front();
    const auto row_bytes = static_cast<std::size_t>(up.scale_cols() * part.group_bytes);
    add_part(names_.packed_gate_up, 2 * up.rows, up.scale_cols(),
             [=, make = part.make](SafetensorsWriter& writer) {
               for (std::size_t e = 0; e < gates.size(); ++e) {
                 writer.append(interleaved(make(gates[e]), make(ups[e]), row_bytes));
               }
             });
    add_part(names_.packed_down, down.rows, down.scale_cols(),
             [=, make = part.make](SafetensorsWriter& writer) {
               for (const RandomTensor& matrix : downs) writer.append(make(matrix));
             });
  }

  void plan_packed() {
    const std::int64_t e_count = spec_.num_experts;
    const std::int64_t h = spec_.hidden;
    const std::int64_t i = spec_.intermediate;
    const std::vector<RandomTensor> gates = all_experts(TensorRole::kGate);
    const std::vector<RandomTensor> ups = all_experts(TensorRole::kUp);
    const std::vector<RandomTensor> downs = all_experts(TensorRole::kDown);
    const char* dtype = safetensors_name(ups.front().dtype);
    const std::uint64_t bytes = ups.front().data_bytes() * static_cast<std::uint64_t>(e_count);
    const std::string gate_up_name = base_ + names_.packed_gate_up;
    const std::string down_name = base_ + names_.packed_down;
    switch (names_.packing) {
      case Packing::kRows:
        add(gate_up_name, dtype, {e_count, 2 * i, h}, 2 * bytes, [=](SafetensorsWriter& writer) {
          for (std::size_t e = 0; e < gates.size(); ++e) {
            writer.append(generate(gates[e]));
            writer.append(generate(ups[e]));
          }
        });
        add(down_name, dtype, {e_count, h, i}, bytes, [=](SafetensorsWriter& writer) {
          for (const RandomTensor& down : downs) writer.append(generate(down));
        });
        break;
      case Packing::kColumns:
      case Packing::kInterleavedColumns: {
        const bool interleaved = names_.packing == Packing::kInterleavedColumns;
        add(gate_up_name, dtype, {e_count, h, 2 * i}, 2 * bytes, [=](SafetensorsWriter& writer) {
          const std::size_t element = size_of(ups.front().dtype);
          Bytes both(static_cast<std::size_t>(2 * ups.front().data_bytes()));
          for (std::size_t e = 0; e < gates.size(); ++e) {
            scatter_transposed(generate(gates[e]), i, h, element, both, 2 * i, 0,
                               interleaved ? 2 : 1);
            scatter_transposed(generate(ups[e]), i, h, element, both, 2 * i, interleaved ? 1 : i,
                               interleaved ? 2 : 1);
            writer.append(both);
          }
        });
        add(down_name, dtype, {e_count, i, h}, bytes,
            [=](SafetensorsWriter& writer) { append_transposed(downs, writer); });
        break;
      }
      case Packing::kSeparateTransposed:
        for (const auto& [name, tensors] :
             {std::pair(gate_up_name, gates), std::pair(base_ + names_.packed_up, ups)})
          add(name, dtype, {e_count * i, h}, bytes, [all = tensors](SafetensorsWriter& writer) {
            for (const RandomTensor& tensor : all) writer.append(generate(tensor));
          });
        add(down_name, dtype, {e_count * i, h}, bytes,
            [=](SafetensorsWriter& writer) { append_transposed(downs, writer); });
        break;
    }
    if (spec_.expert_bias) plan_packed_biases();
  }

  static void append_transposed(const std::vector<RandomTensor>& matrices,
                                SafetensorsWriter& writer) {
    Bytes transposed(static_cast<std::size_t>(matrices.front().data_bytes()));
    for (const RandomTensor& matrix : matrices) {
      scatter_transposed(generate(matrix), matrix.rows, matrix.cols, size_of(matrix.dtype),
                         transposed, matrix.rows, 0, 1);
      writer.append(transposed);
    }
  }

  void plan_packed_biases() {
    const std::vector<RandomTensor> gates = all_experts(TensorRole::kGateBias);
    const std::vector<RandomTensor> ups = all_experts(TensorRole::kUpBias);
    const std::vector<RandomTensor> downs = all_experts(TensorRole::kDownBias);
    const std::int64_t e_count = spec_.num_experts;
    const std::int64_t i = spec_.intermediate;
    const bool interleaved = names_.packing == Packing::kInterleavedColumns;
    const char* dtype = safetensors_name(ups.front().dtype);
    const std::uint64_t count = static_cast<std::uint64_t>(e_count);
    add(base_ + names_.packed_gate_up + "_bias", dtype, {e_count, 2 * i},
        2 * ups.front().data_bytes() * count, [=](SafetensorsWriter& writer) {
          const std::size_t element = size_of(ups.front().dtype);
          Bytes both(static_cast<std::size_t>(2 * ups.front().data_bytes()));
          const std::int64_t step = interleaved ? 2 : 1;
          for (std::size_t e = 0; e < gates.size(); ++e) {
            scatter_transposed(generate(gates[e]), i, 1, element, both, 2 * i, 0, step);
            scatter_transposed(generate(ups[e]), i, 1, element, both, 2 * i, interleaved ? 1 : i,
                               step);
            writer.append(both);
          }
        });
    add(base_ + names_.packed_down + "_bias", dtype, {e_count, spec_.hidden},
        downs.front().data_bytes() * count, [=](SafetensorsWriter& writer) {
          for (const RandomTensor& down : downs) writer.append(generate(down));
        });
  }

  const TensorNames& names_;
  const std::string base_;
  const bool packed_;
  const FourBitLayout layout_;
  const LayerSpec& spec_;
  std::map<std::pair<TensorRole, int>, RandomTensor> by_role_;
  std::vector<Planned> planned_;
};

std::vector<Planned> plan_model(const ModelConfig& config, DType dtype, std::uint64_t seed) {
  const TensorNames& names = published_names(config);
  const FourBitLayout layout = four_bit_layout(config, dtype);
  // FP8 and most four-bit types have a published layout only for experts stored one by one.
  const bool one_by_one =
      dtype == DType::kF8E4M3 || (is_four_bit(dtype) && layout != FourBitLayout::kBlocks);
  const bool packed = names.published_packed && !(one_by_one && names.up);
  if (packed && dtype == DType::kF8E4M3)
    throw Error(
        ErrorCode::kUnsupported,
        fmt::format("{} has no published FP8 layout of its experts; use bf16", config.model_type));
  const std::int64_t vocabulary =
      config.vocab_size > 0 ? config.vocab_size : GenerateOptions{}.vocabulary;
  std::vector<Planned> planned;
  for (const int layer : config.moe_layers()) {
    const LayerSpec& spec = *config.layers[static_cast<std::size_t>(layer)];
    LayerWriter writer(names, layer, packed, layout, spec,
                       layer_tensors(spec, dtype, layer_seed(seed, layer), vocabulary));
    for (Planned& tensor : writer.plan()) planned.push_back(std::move(tensor));
  }
  return planned;
}

// Consecutive tensors up to max_bytes each; a larger tensor gets a shard of its own.
std::vector<std::vector<Planned>> split(std::vector<Planned> planned, std::uint64_t max_bytes) {
  std::vector<std::vector<Planned>> shards;
  std::uint64_t filled = 0;
  for (Planned& tensor : planned) {
    if (shards.empty() || (filled > 0 && filled + tensor.bytes > max_bytes)) {
      shards.emplace_back();
      filled = 0;
    }
    filled += tensor.bytes;
    shards.back().push_back(std::move(tensor));
  }
  return shards;
}

// A directory that becomes `target` on commit() and vanishes otherwise.
class TemporaryDirectory {
 public:
  explicit TemporaryDirectory(const std::filesystem::path& target) : target_(target) {
    std::error_code code;
    std::filesystem::create_directories(target_.parent_path(), code);
    if (code) fail("create", target_.parent_path(), code);
    // The directory must be new: whoever had made it could still write to it.
    path_ = make_beside(target_, "mkdir", [](const std::filesystem::path& name) {
      return ::mkdir(name.c_str(), 0777) == 0 ? 0 : errno;
    });
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    if (!committed_) std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }
  void commit() {
    std::error_code code;
    std::filesystem::rename(path_, target_, code);  // over an empty directory, too
    if (code) fail("rename", target_, code);
    committed_ = true;
  }

 private:
  [[noreturn]] static void fail(const char* call, const std::filesystem::path& path,
                                const std::error_code& code) {
    throw Error(ErrorCode::kSystem,
                fmt::format("{}: {} failed: {}; check the path and its permissions",
                            printable(path), call, code.message()));
  }

  const std::filesystem::path target_;
  std::filesystem::path path_;
  bool committed_ = false;
};

// Removes the trailing slash that would make the temporary directory a child of the target.
std::filesystem::path normalized_target(const std::filesystem::path& directory) {
  std::filesystem::path target = std::filesystem::absolute(directory).lexically_normal();
  if (!target.has_filename()) target = target.parent_path();
  return target;
}

void require_vacant(const std::filesystem::path& target) {
  std::error_code ignored;
  if (!std::filesystem::exists(target, ignored)) return;
  if (std::filesystem::is_directory(target, ignored) && std::filesystem::is_empty(target, ignored))
    return;
  throw Error(
      ErrorCode::kInvalidArgument,
      fmt::format("{}: already exists and is not an empty directory; remove it or choose another "
                  "path",
                  printable(target)));
}

void require_space(const std::filesystem::path& directory, std::uint64_t bytes) {
  std::error_code code;
  const std::filesystem::space_info space = std::filesystem::space(directory, code);
  if (!code && bytes > space.available)
    throw Error(
        ErrorCode::kCapacityExceeded,
        fmt::format("{}: the checkpoint needs {} bytes of disk, but {} are available; write fewer "
                    "layers or experts, or free some space",
                    printable(directory), bytes, space.available));
}

}  // namespace

void write_checkpoint(const ModelEntry& entry, const std::filesystem::path& directory,
                      const WriteOptions& options) {
  const DType dtype = options.dtype.value_or(entry.dtype);
  // Four-bit layouts are declared on top of what unquantised layers have.
  const std::string plain_json = rewrite_config(entry.config_json, options.overrides, dtype);
  const ModelConfig config = parse_config(plain_json, "config.json");
  const std::string config_json = declare_layout(plain_json, four_bit_layout(config, dtype));
  const std::filesystem::path target = normalized_target(directory);
  require_vacant(target);
  std::vector<Planned> planned = plan_model(config, dtype, options.seed);
  std::uint64_t total = 0;
  for (const Planned& tensor : planned) total += tensor.bytes;

  TemporaryDirectory temporary(target);
  require_space(temporary.path(), total);
  write_whole(temporary.path() / "config.json", config_json);

  const std::vector<std::vector<Planned>> shards =
      split(std::move(planned), options.max_shard_bytes);
  std::map<std::string, std::string> weight_map;
  std::uint64_t done = 0;
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const std::string name =
        shards.size() == 1 ? "model.safetensors"
                           : fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, shards.size());
    std::vector<TensorInfo> infos;
    for (const Planned& tensor : shards[s]) infos.push_back(tensor.info);
    SafetensorsWriter writer(temporary.path() / name, std::move(infos), {{"format", "pt"}});
    for (const Planned& tensor : shards[s]) {
      tensor.write(writer);
      weight_map[tensor.info.name] = name;
      done += tensor.bytes;
      if (options.progress) options.progress(done, total);
    }
    writer.finish();
  }
  if (shards.size() > 1)
    write_whole(temporary.path() / "model.safetensors.index.json",
                safetensors_index_json(weight_map, total));
  temporary.commit();
}

}  // namespace switchyard
