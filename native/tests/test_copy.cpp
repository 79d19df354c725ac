#include <algorithm>
#include <vector>

#include "fixture.hpp"
#include "shmsync/copy.hpp"

using namespace shmsync;

namespace {

// Every size around the vector and block limits, every misalignment of both sides; guard bytes stay.
void copies_exactly_the_bytes_asked_for(CopyPath path) {
  constexpr std::size_t kRoom = 60000;
  std::vector<std::byte> source(kRoom), target(kRoom);
  for (std::size_t i = 0; i < kRoom; ++i) source[i] = static_cast<std::byte>(i * 31 + i / 256);
  for (const std::size_t bytes : {0u, 1u, 31u, 32u, 33u, 127u, 128u, 4095u, 4096u, 4097u, 16383u, 16384u, 40000u}) {
    for (std::size_t from = 0; from < 40; from += 13) {
      for (std::size_t to = 1; to < 40; to += 7) {
        std::fill(target.begin(), target.end(), std::byte{0xEE});
        const CopyOp op{target.data() + to, source.data() + from, bytes};
        copy(&op, 1, path);
        const auto untouched = [](std::byte b) { return b == std::byte{0xEE}; };
        const auto begin = target.begin() + static_cast<std::ptrdiff_t>(to);
        const auto end = begin + static_cast<std::ptrdiff_t>(bytes);
        CHECK(std::all_of(target.begin(), begin, untouched) && std::all_of(end, target.end(), untouched));
        CHECK(std::equal(begin, end, source.begin() + static_cast<std::ptrdiff_t>(from)));
      }
    }
  }
}

void many_operations_with_streaming_by_their_total() {
  std::vector<std::byte> source(kStreamAbove + 4096), target(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i % 251);
  std::vector<CopyOp> ops;
  for (std::size_t at = 0; at < source.size();) {
    const std::size_t bytes = std::min<std::size_t>(at % 3 ? 100 : 70001, source.size() - at);
    ops.push_back({target.data() + at, source.data() + at, bytes});
    at += bytes;
  }
  copy(ops.data(), ops.size());
  CHECK(source == target);
}

}  // namespace

int main() {
  copies_exactly_the_bytes_asked_for(CopyPath::plain);
  copies_exactly_the_bytes_asked_for(CopyPath::streaming);
  copies_exactly_the_bytes_asked_for(CopyPath::automatic);
  many_operations_with_streaming_by_their_total();
}
