#include "shmsync/copy.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shmsync {
namespace {

#if defined(__x86_64__)

constexpr std::size_t kVector = 32;
constexpr std::size_t kBlock = 4 * kVector;  // two cache lines a turn
constexpr std::size_t kSmall = 4096;         // not worth a partial line at either end

__attribute__((target("avx2"))) void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
  const std::size_t head = (kVector - reinterpret_cast<std::uintptr_t>(to) % kVector) % kVector;
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  const std::size_t body = bytes / kBlock * kBlock;
  for (std::size_t i = 0; i < body; i += kBlock) {
    const auto* source = reinterpret_cast<const __m256i*>(from + i);
    auto* target = reinterpret_cast<__m256i*>(to + i);
    const __m256i a = _mm256_loadu_si256(source);
    const __m256i b = _mm256_loadu_si256(source + 1);
    const __m256i c = _mm256_loadu_si256(source + 2);
    const __m256i d = _mm256_loadu_si256(source + 3);
    _mm256_stream_si256(target, a);
    _mm256_stream_si256(target + 1, b);
    _mm256_stream_si256(target + 2, c);
    _mm256_stream_si256(target + 3, d);
  }
  std::memcpy(to + body, from + body, bytes - body);
}

#endif

}  // namespace

bool streaming_available() {
#if defined(__x86_64__)
  static const bool available = __builtin_cpu_supports("avx2");
  return available;
#else
  return false;
#endif
}

void copy(const CopyOp* ops, std::size_t count, CopyPath path) {
  if (path == CopyPath::automatic) {
    std::size_t total = 0;
    for (std::size_t i = 0; i < count; ++i) total += ops[i].bytes;
    path = total > kStreamAbove ? CopyPath::streaming : CopyPath::plain;
  }
#if defined(__x86_64__)
  if (path == CopyPath::streaming && streaming_available()) {
    for (std::size_t i = 0; i < count; ++i) {
      if (ops[i].bytes >= kSmall)
        stream(ops[i].destination, ops[i].source, ops[i].bytes);
      else
        std::memcpy(ops[i].destination, ops[i].source, ops[i].bytes);
    }
    _mm_sfence();  // SYNC copy.sfence: streaming stores are weakly ordered; seq.end alone does not order them
    return;
  }
#endif
  for (std::size_t i = 0; i < count; ++i)
    if (ops[i].bytes != 0) std::memcpy(ops[i].destination, ops[i].source, ops[i].bytes);
}

}  // namespace shmsync
