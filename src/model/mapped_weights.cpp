#include "model/mapped_weights.h"

#include <algorithm>
#include <utility>

#include "switchyard/weights.h"

namespace switchyard {

MappedWeights::MappedWeights(const MoeWeights& weights) {
  for (const MatrixView* const view : {&weights.router, &weights.hash_table}) add(view->data);
  for (const VectorView* const view :
       {&weights.router_bias, &weights.correction_bias, &weights.shared_gate})
    add(view->data);
  const auto add_ffn = [&](const FfnWeights& ffn) {
    for (const MatrixView* const view : {&ffn.gate, &ffn.up, &ffn.down}) {
      add(view->data);
      add(view->scale);
      add(view->zero);
    }
    for (const VectorView* const view : {&ffn.gate_bias, &ffn.up_bias, &ffn.down_bias})
      add(view->data);
  };
  for (const FfnWeights& expert : weights.experts) add_ffn(expert);
  add_ffn(weights.shared);
  for (const std::shared_ptr<const MappedFile>& file : files_) file->require_size();
}

void MappedWeights::add(const void* data) {
  if (data == nullptr) return;
  // Most views lie in the file of the one before.
  const auto holds = [data](const std::shared_ptr<const MappedFile>& file) {
    return std::less_equal<>()(static_cast<const void*>(file->data()), data) &&
           std::less<>()(data, static_cast<const void*>(file->data() + file->size()));
  };
  if (std::any_of(files_.rbegin(), files_.rend(), holds)) return;
  if (std::shared_ptr<const MappedFile> file = MappedFile::at(data))
    files_.push_back(std::move(file));
}

}  // namespace switchyard
