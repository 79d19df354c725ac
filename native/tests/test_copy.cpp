#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "fixture.hpp"
#include "shmsync/copy.hpp"
#include "shmsync/shared_copy.hpp"

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

void many_operations_with_streaming_by_their_total(unsigned threads) {
  std::vector<std::byte> source(kStreamAbove + 4096), target(source.size());
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i % 251);
  std::vector<CopyOp> ops;
  for (std::size_t at = 0; at < source.size();) {
    const std::size_t bytes = std::min<std::size_t>(at % 3 ? 100 : 70001, source.size() - at);
    ops.push_back({target.data() + at, source.data() + at, bytes});
    at += bytes;
  }
  copy(ops.data(), ops.size(), CopyPath::automatic, threads);
  CHECK(source == target);
}

// Sizes around the chunks' borders, in one operation and in many; guard bytes stay.
void several_threads_copy_exactly_the_bytes_asked_for(CopyPath path) {
  for (const std::size_t bytes :
       {kShareAbove, kShareAbove + 1, kShareAbove + kLeastChunk - 1, kShareAbove + 3 * kChunk}) {
    for (const std::size_t piece : {bytes, kChunk, kChunk + 1, std::size_t{70001}}) {
      std::vector<std::byte> source(bytes), target(bytes + 2, std::byte{0xEE});
      for (std::size_t i = 0; i < bytes; ++i) source[i] = static_cast<std::byte>(i % 251);
      std::vector<CopyOp> ops;
      for (std::size_t at = 0; at < bytes; at += piece)
        ops.push_back({target.data() + 1 + at, source.data() + at, std::min(piece, bytes - at)});
      copy(ops.data(), ops.size(), path, 3);
      CHECK(target.front() == std::byte{0xEE} && target.back() == std::byte{0xEE});
      CHECK(std::equal(source.begin(), source.end(), target.begin() + 1));
    }
  }
}

// What helpers stored is there for a reader that sees the version that the caller released; TSan looks at the pairs.
void a_version_is_whole_though_helpers_copied_parts_of_it() {
  constexpr std::uint64_t kVersions = 40;
  const std::size_t words = (kShareAbove + kChunk) / sizeof(std::uint64_t);  // so that helpers are woken for it
  const CopyPieces plain = [](const CopyOp* ops, std::size_t count) { copy(ops, count, CopyPath::plain); };
  const CopyPieces streaming = [](const CopyOp* ops, std::size_t count) { copy(ops, count, CopyPath::streaming); };
  std::vector<std::uint64_t> source(words), target(words);
  std::atomic<std::uint64_t> current{0}, seen{0};
  std::thread reader([&] {
    for (std::uint64_t version = 1; version <= kVersions; ++version) {
      while (current.load(std::memory_order_acquire) != version) std::this_thread::yield();
      CHECK(std::all_of(target.begin(), target.end(), [&](std::uint64_t word) { return word == version; }));
      seen.store(version, std::memory_order_release);
    }
  });
  for (std::uint64_t version = 1; version <= kVersions; ++version) {
    while (seen.load(std::memory_order_acquire) != version - 1) std::this_thread::yield();
    std::fill(source.begin(), source.end(), version);
    const CopyOp op{reinterpret_cast<std::byte*>(target.data()), reinterpret_cast<const std::byte*>(source.data()),
                    words * sizeof(std::uint64_t)};
    copy_by_several(&op, 1, 4, version % 2 ? plain : streaming);
    current.store(version, std::memory_order_release);
  }
  reader.join();
}

std::atomic<int> others_begun{0};
std::atomic<bool> caller_is_done{false};
std::thread::id caller;

// The caller ends although helpers were started: those that come when no chunk is left find nothing to do.
void a_helper_that_comes_late_is_not_waited_for() {
  caller = std::this_thread::get_id();
  const CopyPieces count_others = [](const CopyOp* ops, std::size_t count) {
    if (std::this_thread::get_id() != caller) others_begun.fetch_add(1);
    CHECK(!caller_is_done.load());
    copy(ops, count, CopyPath::plain);
  };
  std::vector<std::byte> source(4 * kChunk, std::byte{7}), target(source.size());
  const CopyOp op{target.data(), source.data(), source.size()};
  for (int i = 0; i < 200; ++i) {
    caller_is_done.store(false);
    copy_by_several(&op, 1, 8, count_others);
    caller_is_done.store(true);  // no helper touches the memory from here on
  }
  CHECK(source == target);
}

// Several threads call the same helpers, which sleep, are called off or in the middle of another copy; TSan
// looks at what passes between them.
void callers_share_the_helpers() {
  const CopyPieces plain = [](const CopyOp* ops, std::size_t count) { copy(ops, count, CopyPath::plain); };
  const auto copy_often = [plain](unsigned char seed) {
    for (int round = 0; round < 60; ++round) {
      const std::size_t bytes = (round % 5 + 2) * kLeastChunk + (round % 2 ? kShareAbove : 0) + seed;
      std::vector<std::byte> source(bytes, static_cast<std::byte>(seed + round));
      std::vector<std::byte> target(source.size());
      const std::vector<CopyOp> ops{{target.data(), source.data(), 99},
                                    {target.data() + 99, source.data() + 99, source.size() - 99}};
      copy_by_several(ops.data(), ops.size(), round % 4 + 1, plain);
      CHECK(source == target);
    }
  };
  std::vector<std::thread> callers;
  for (unsigned char seed = 1; seed <= 3; ++seed) callers.emplace_back(copy_often, seed);
  for (auto& each : callers) each.join();
}

void copy_until_there_is_a_helper() {
  std::vector<std::byte> source(kShareAbove, std::byte{3}), target(source.size());
  const CopyOp op{target.data(), source.data(), source.size()};
  while (helpers_present() == 0) copy(&op, 1, CopyPath::automatic, 4);
}

// A child has none of its parent's helpers, and makes its own.
void helpers_do_not_survive_a_fork() {
  copy_until_there_is_a_helper();
  const pid_t child = fork();
  if (child == 0) {
    if (helpers_present() != 0) _exit(2);
#if !defined(__SANITIZE_THREAD__)  // it starts no threads in a child
    copy_until_there_is_a_helper();
    several_threads_copy_exactly_the_bytes_asked_for(CopyPath::plain);
#endif
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  several_threads_copy_exactly_the_bytes_asked_for(CopyPath::plain);
}

void a_helper_that_nobody_calls_goes() {
  copy_until_there_is_a_helper();
  while (helpers_present() != 0) std::this_thread::yield();
  copy_until_there_is_a_helper();
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// No memory for a helper's stack: the caller copies alone.
void a_thread_that_cannot_be_started_is_not_needed() {
  const pid_t child = fork();
  if (child == 0) {
    std::vector<std::byte> source(kShareAbove + 5, std::byte{3}), target(source.size());
    const rlimit none{0, RLIM_INFINITY};
    if (setrlimit(RLIMIT_AS, &none) != 0) _exit(2);
    const CopyOp op{target.data(), source.data(), source.size()};
    copy(&op, 1, CopyPath::automatic, 4);
    _exit(source == target ? 0 : 1);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
#endif

}  // namespace

int main() {
  copies_exactly_the_bytes_asked_for(CopyPath::plain);
  copies_exactly_the_bytes_asked_for(CopyPath::streaming);
  copies_exactly_the_bytes_asked_for(CopyPath::automatic);
  many_operations_with_streaming_by_their_total(1);
  many_operations_with_streaming_by_their_total(3);
  several_threads_copy_exactly_the_bytes_asked_for(CopyPath::plain);
  several_threads_copy_exactly_the_bytes_asked_for(CopyPath::streaming);
  a_version_is_whole_though_helpers_copied_parts_of_it();
  a_helper_that_comes_late_is_not_waited_for();
  callers_share_the_helpers();
  if (std::thread::hardware_concurrency() > 1) {
    helpers_do_not_survive_a_fork();
    a_helper_that_nobody_calls_goes();
  }
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  a_thread_that_cannot_be_started_is_not_needed();
#endif
}
