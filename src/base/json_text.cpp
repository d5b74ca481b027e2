#include "base/json_text.h"

#include <fmt/format.h>

#include "base/printable.h"

namespace switchyard {
namespace {

constexpr int kMaxDepth = 64;

void require_shallow(std::string_view text, ErrorCode code, const std::string& source) {
  const std::optional<std::size_t> at = too_deep_at(text);
  if (!at) return;
  throw Error(code, fmt::format("{}: nested deeper than {} levels at byte {}; this is not a file "
                                "that any model publisher writes, download it again",
                                printable(source), kMaxDepth, *at));
}

}  // namespace

std::optional<std::size_t> too_deep_at(std::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kMaxDepth) return i;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return std::nullopt;
}

nlohmann::json parse_json(std::string_view text, ErrorCode code, const std::string& source) {
  require_shallow(text, code, source);
  try {
    return nlohmann::json::parse(text.begin(), text.end());
  } catch (const nlohmann::json::parse_error& error) {
    throw Error(code,
                fmt::format("{}: not valid JSON at byte {} of {}; the file is damaged or is not "
                            "what it claims to be, download it again",
                            printable(source), error.byte, text.size()));
  } catch (const nlohmann::json::exception& error) {
    throw Error(code, fmt::format("{}: not usable JSON ({}); download the file again",
                                  printable(source), printable(error.what())));
  }
}

std::string excerpt(const nlohmann::json& value) {
  // Replacing invalid UTF-8 instead of throwing: this text is on its way into an error message.
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

}  // namespace switchyard
