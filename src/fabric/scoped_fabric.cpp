#include "fabric/scoped_fabric.h"

#include <utility>

namespace switchyard {
namespace {

class ScopedFabric final : public Fabric {
 public:
  explicit ScopedFabric(std::shared_ptr<Fabric> of)
      : Fabric(of->deadline()),
        of_(std::move(of)),
        hook_(*of_, [this] { abort(of_->abort_cause()); }) {
    view_ = of_->view();
  }

  int rank() const override { return of_->rank(); }
  int size() const override { return of_->size(); }
  const char* name() const override { return of_->name(); }
  void all_gather(std::span<const std::byte> mine, std::span<std::byte> all) override {
    of_->all_gather(mine, all);
  }
  std::shared_ptr<SymmetricSegment> allocate(std::size_t bytes) override {
    return of_->allocate(bytes);
  }
  std::shared_ptr<SymmetricSegment> allocate_heap(std::size_t bytes) override {
    return of_->allocate_heap(bytes);
  }
  std::vector<UniqueFd> exchange_fds(int fd) override { return of_->exchange_fds(fd); }
  std::string liveness(int rank) const override { return of_->liveness(rank); }

 private:
  void abort_collectives() noexcept override {}  // Collectives are the other fabric's.

  const std::shared_ptr<Fabric> of_;
  const AbortHook hook_;
};

}  // namespace

std::shared_ptr<Fabric> make_scoped_fabric(std::shared_ptr<Fabric> of) {
  return make_shared_here<ScopedFabric>(std::move(of));
}

}  // namespace switchyard
