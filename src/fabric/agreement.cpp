#include "fabric/agreement.h"

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "switchyard/error.h"

namespace switchyard {

void agree(Fabric& fabric, std::initializer_list<Declared> mine, const char* remedy) {
  using Text = std::array<char, 32>;
  std::vector<Text> texts;
  for (const Declared& value : mine) {
    Text text{};
    std::copy_n(value.text.begin(), std::min(value.text.size(), text.size() - 1), text.begin());
    texts.push_back(text);
  }
  const std::vector<Text> all = gather_all(fabric, std::span<const Text>(texts));
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::size_t of_rank = i % texts.size();
    if (all[i] == texts[of_rank]) continue;
    throw Error(ErrorCode::kSpecMismatch,
                fmt::format("rank {} and rank {} disagree on {}: {} here, {} there; {}",
                            fabric.rank(), i / texts.size(), (mine.begin() + of_rank)->name,
                            texts[of_rank].data(), all[i].data(), remedy));
  }
}

}  // namespace switchyard
