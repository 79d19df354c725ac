#include "shmsync/device_commit.hpp"

namespace shmsync {
namespace {

class Commit final : public Later {
 public:
  explicit Commit(PublicationWriter& writer) : writer_(writer) {}

 private:
  void work() noexcept override { writer_.commit(); }

  PublicationWriter& writer_;
};

}  // namespace

std::shared_ptr<Later> commit_later(PublicationWriter& writer) { return std::make_shared<Commit>(writer); }

}  // namespace shmsync
