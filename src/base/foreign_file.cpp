#include "base/foreign_file.h"

#include <algorithm>
#include <cctype>

namespace switchyard {
namespace {

bool begins_with_any_case(std::string_view text, std::string_view prefix) {
  const auto same = [](char a, char b) {
    return std::tolower(static_cast<unsigned char>(a)) == b;  // `prefix` is in lower case
  };
  return text.size() >= prefix.size() &&
         std::equal(prefix.begin(), prefix.end(), text.begin(),
                    [&](char wanted, char found) { return same(found, wanted); });
}

bool is_html(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
  return begins_with_any_case(text, "<!doctype html") || begins_with_any_case(text, "<html");
}

}  // namespace

std::string foreign_contents(std::string_view begin) {
  if (begin.starts_with("version https://git-lfs.github.com/spec/"))
    return "is a Git LFS pointer, not the file itself; run 'git lfs pull' in the repository, or "
           "download the file";
  if (is_html(begin))
    return "is an HTML page that was stored in place of the file; check that you may read it (a "
           "token, terms to accept), and download it again";
  if (begin.starts_with("PK\x03\x04"))
    return "is a zip archive, such as PyTorch's torch.save() writes; load it there and save it "
           "with safetensors (transformers' save_pretrained does)";
  if (begin.starts_with("GGUF"))
    return "is a GGUF file; use the safetensors checkpoint that the model's publisher ships";
  return "";
}

}  // namespace switchyard
