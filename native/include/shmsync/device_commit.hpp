// The commit that a device makes, behind the copies of a version.
#pragma once

#include "shmsync/later.hpp"
#include "shmsync/publication.hpp"

namespace shmsync {

// Commits what the writer has written when it is run. While it is pending no other code may call the writer, which
// lives longer.
std::shared_ptr<Later> commit_later(PublicationWriter& writer);

}  // namespace shmsync
