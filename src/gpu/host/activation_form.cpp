#include "gpu/host/activation_form.h"

#include <limits>

namespace switchyard::gpu {

// Most activations are v (1 + tanh(u)) / 2 for some u.
ActivationForm form_of(const Activation& activation) {
  constexpr float kNone = std::numeric_limits<float>::infinity();
  constexpr float kMost = std::numeric_limits<float>::max();
  const auto tanh = [](float first, float second, float third, float most) {
    return ActivationForm{true, first, second, third, most, 0, 0, false};
  };
  const auto ramp = [](float least, bool squares) {
    return ActivationForm{false, 0, 0, 0, 0, 0, least, squares};
  };
  switch (activation.kind) {
    case ActivationKind::kSilu: return tanh(0.5f * activation.alpha, 0, 0, kMost);
    case ActivationKind::kGelu:
      // A minimax fit for v^2 up to 20: the result is within 2.5e-5, with an exact tanh.
      return tanh(0.797507884f, 3.70056462e-2f, -3.51516815e-4f, 20);
    case ActivationKind::kGeluTanh: return tanh(0.79788456f, 0.035677408f, 0, kMost);
    case ActivationKind::kRelu: return ramp(0, false);
    case ActivationKind::kRelu2: return ramp(0, true);
    case ActivationKind::kSitu:
      return {false, 1 / activation.alpha, 1 / activation.limit, 0, 0, activation.alpha, 0, false};
    case ActivationKind::kIdentity: break;
  }
  return ramp(-kNone, false);
}

}  // namespace switchyard::gpu
