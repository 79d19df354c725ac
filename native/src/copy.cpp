#include "shmsync/copy.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "shmsync/failpoints.hpp"
#include "shmsync/shared_copy.hpp"

namespace shmsync {
namespace {

void copy_plain(const CopyOp* ops, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (ops[i].bytes != 0) std::memcpy(ops[i].destination, ops[i].source, ops[i].bytes);
    SHMSYNC_FAILPOINT("copy.leaf");
  }
}

#if defined(__x86_64__)

constexpr std::size_t kTurn = 128;  // bytes a turn of the loop moves: two cache lines
constexpr std::size_t kStride = 4096;
constexpr std::size_t kStreams = 4;
constexpr std::size_t kBlock = kStreams * kStride;

__attribute__((target("avx2"))) inline void stream_turn(std::byte* to, const std::byte* from) {
  const auto* source = reinterpret_cast<const __m256i*>(from);
  auto* target = reinterpret_cast<__m256i*>(to);
  const __m256i a = _mm256_loadu_si256(source);
  const __m256i b = _mm256_loadu_si256(source + 1);
  const __m256i c = _mm256_loadu_si256(source + 2);
  const __m256i d = _mm256_loadu_si256(source + 3);
  _mm256_stream_si256(target, a);
  _mm256_stream_si256(target + 1, b);
  _mm256_stream_si256(target + 2, c);
  _mm256_stream_si256(target + 3, d);
}

__attribute__((target("avx2"))) void stream(std::byte* to, const std::byte* from, std::size_t bytes) {
  const std::size_t head = std::min(bytes, (32 - reinterpret_cast<std::uintptr_t>(to) % 32) % 32);
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  // Four streams side by side keep more of the memory's banks busy than one, and the processor's own prefetcher does
  // not look across pages: a quarter faster than line after line at 1 GB (docs/adr/0003-copy.md). Prefetching beyond
  // the end is harmless.
  for (; bytes >= kBlock; to += kBlock, from += kBlock, bytes -= kBlock) {
    for (std::size_t line = 0; line < kStride; line += kTurn) {
      for (std::size_t at = line; at < kBlock; at += kStride) {
        _mm_prefetch(reinterpret_cast<const char*>(from + at + kBlock), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(from + at + kBlock + 64), _MM_HINT_T0);
        stream_turn(to + at, from + at);
      }
    }
  }
  for (; bytes >= kTurn; to += kTurn, from += kTurn, bytes -= kTurn) stream_turn(to, from);
  std::memcpy(to, from, bytes);
}

void copy_streaming(const CopyOp* ops, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    if (ops[i].bytes != 0) stream(ops[i].destination, ops[i].source, ops[i].bytes);
    SHMSYNC_FAILPOINT("copy.leaf");
  }
  _mm_sfence();  // SYNC seq.end: streaming stores are weakly ordered; the release store alone does not order them
}

#else

void copy_streaming(const CopyOp* ops, std::size_t count) { copy_plain(ops, count); }

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

void copy(const CopyOp* ops, std::size_t count, CopyPath path, unsigned threads) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) total += ops[i].bytes;
  if (path == CopyPath::automatic) path = total > kStreamAbove ? CopyPath::streaming : CopyPath::plain;
  const CopyPieces pieces = path == CopyPath::streaming && streaming_available() ? copy_streaming : copy_plain;
  copy_by_several(ops, count, total < kShareAbove ? 1 : threads, pieces);
}

}  // namespace shmsync
