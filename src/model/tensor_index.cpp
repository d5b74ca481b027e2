#include "model/tensor_index.h"

#include <fmt/core.h>

#include "base/file_error.h"
#include "base/printable.h"
#include "base/read_file.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

// The index of the largest models names a hundred thousand tensors and has 10 MB.
constexpr std::uint64_t kMostIndexBytes = std::uint64_t{128} << 20;

}  // namespace

void TensorIndex::missing(const std::string& name) const {
  std::vector<std::string_view> names;
  names.reserve(tensors_.size());
  for (const auto& [key, value] : tensors_) names.push_back(key);
  throw Error(ErrorCode::kMissingTensor,
              fmt::format("{}: no tensor '{}'; download the missing shard or correct config.json{}",
                          printable(directory_), printable(name), closest_names(name, names)));
}

void TensorIndex::add(const std::shared_ptr<const SafetensorsFile>& file) {
  files_.push_back(file);
  for (const TensorInfo& info : file->header().tensors) {
    const auto [existing, inserted] = tensors_.try_emplace(info.name, Located{file.get(), &info});
    if (!inserted)
      throw Error(ErrorCode::kInvalidFile,
                  fmt::format("tensor '{}' is in both {} and {}; remove the copy that does not "
                              "belong to this checkpoint",
                              printable(info.name), printable(existing->second.file->path()),
                              printable(file->path())));
  }
}

void TensorIndex::open(const std::filesystem::path& directory) {
  directory_ = directory;
  const std::filesystem::path index = directory / "model.safetensors.index.json";
  if (!is_absent(index)) {
    const auto weight_map =
        parse_safetensors_index(read_text(index, kMostIndexBytes), index.string());
    std::set<std::string> shards;
    for (const auto& [tensor, shard] : weight_map) {
      if (!shards.insert(shard).second) continue;
      if (is_absent(directory / shard))
        throw Error(ErrorCode::kInvalidFile,
                    fmt::format("{}: names shard '{}' (for tensor '{}'), which is not there; "
                                "download it",
                                printable(index), printable(shard), printable(tensor)));
      add(SafetensorsFile::open(directory / shard));
    }
    for (const auto& [tensor, shard] : weight_map)
      if (!has(tensor))
        throw Error(ErrorCode::kInvalidFile,
                    fmt::format("{}: says that tensor '{}' is in '{}', which does not have it; "
                                "download both again",
                                printable(index), printable(tensor), printable(shard)));
    return;
  }
  // transformers' name for a checkpoint in one file. Others beside it, such as
  // consolidated.safetensors, hold the same tensors once more.
  if (const std::filesystem::path whole = directory / "model.safetensors"; !is_absent(whole))
    return add(SafetensorsFile::open(whole));
  std::set<std::filesystem::path> paths;
  std::set<std::string> others;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const std::filesystem::path extension = entry.path().extension();
    if (extension == ".safetensors") paths.insert(entry.path());
    for (const char* const other : {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack"})
      if (extension == other) others.insert(entry.path().filename().string());
  }
  if (paths.empty()) throw_no_weights(others);
  for (const std::filesystem::path& path : paths) add(SafetensorsFile::open(path));
}

void TensorIndex::throw_no_weights(const std::set<std::string>& others) const {
  if (others.empty())
    throw Error(
        ErrorCode::kInvalidFile,
        fmt::format("{}: has no *.safetensors file; download the weights", printable(directory_)));
  throw Error(
      ErrorCode::kInvalidFile,
      fmt::format("{}: has no *.safetensors file, only {}{}, which is another format; download "
                  "the safetensors files, or load the model in transformers and save it with "
                  "save_pretrained()",
                  printable(directory_), printable(*others.begin()),
                  others.size() > 1 ? fmt::format(" and {} more", others.size() - 1) : ""));
}

}  // namespace switchyard
