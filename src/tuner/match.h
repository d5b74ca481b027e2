// Checks that a file belongs to a kernel on a machine.
#pragma once

#include <fmt/core.h>

#include <string>
#include <vector>

#include "base/plural.h"
#include "base/printable.h"
#include "switchyard/tuner.h"

namespace switchyard::tuner {

// Each function throws MismatchError if what the file has is not what is wanted. `what` and
// `source` name the file: "the fit", "olmoe.fit.json".
struct Match {
  std::string what, source;

  void require(const char* field, const std::string& found, const std::string& wanted,
               const char* remedy = "measure anew") const {
    if (found == wanted) return;
    throw MismatchError(fmt::format("{} {} is of the {} '{}', and '{}' is wanted; {}", what, source,
                                    field, printable(found), printable(wanted), remedy),
                        field, found, wanted);
  }
  void require_kernel(const std::string& name, std::int64_t version, const std::string& wanted_name,
                      std::int64_t wanted_version) const {
    require("kernel", name, wanted_name);
    if (version == wanted_version) return;
    throw MismatchError(
        fmt::format("{} {} is of version {} of the kernel {}, {} than version {}, which is wanted; "
                    "{}",
                    what, source, version, printable(name),
                    version < wanted_version ? "older" : "newer", wanted_version,
                    version < wanted_version ? "measure anew" : "update this program"),
        "version", fmt::format("{}", version), fmt::format("{}", wanted_version));
  }
  void require_machine(const std::string& found, const std::string& wanted) const {
    require("machine", found, wanted, "measure on this machine");
  }
  void require_device(const Device& found, const Device& wanted) const {
    require_machine(found.machine, wanted.machine);
    require("number of SMs", fmt::format("{}", found.num_sms), fmt::format("{}", wanted.num_sms));
  }
  void require_configurations(const std::vector<Configuration>& found,
                              const std::vector<Configuration>& wanted) const {
    require("number of configurations", fmt::format("{}", found.size()),
            fmt::format("{}", wanted.size()));
    for (std::size_t c = 0; c < found.size(); ++c) {
      require("configuration", found[c].name, wanted[c].name);
      if (found[c] == wanted[c]) continue;
      throw MismatchError(
          fmt::format("{} {} has another configuration by the name '{}' than the kernel; measure "
                      "anew",
                      what, source, printable(found[c].name)),
          "configuration", found[c].name, wanted[c].name);
    }
  }
  void require_model(const Model& found, const Model& wanted) const {
    const auto text = [](const Model& m) {
      return fmt::format("{}: {}, top-{}, N {}, K {}{}", m.name, plural(m.num_experts, "expert"),
                         m.top_k, m.n, m.k, m.unseen ? ", unseen" : "");
    };
    require("model", text(found), text(wanted));
  }
};

}  // namespace switchyard::tuner
