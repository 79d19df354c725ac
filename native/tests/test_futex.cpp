#include <thread>

#include "fixture.hpp"

using namespace shmsync;

int main() {
  // A changed word does not sleep.
  Word32 word{1};
  const auto start = monotonic_ns();
  futex_wait(word, 0, kSlice);
  CHECK(monotonic_ns() - start < static_cast<std::uint64_t>(Nanoseconds(kSlice).count()));

  // The deadline holds, and a longer one is cut to a slice.
  const auto before = monotonic_ns();
  futex_wait(word, 1, std::chrono::milliseconds(5));
  CHECK(monotonic_ns() - before >= 4'000'000);
  futex_wait(word, 1, std::chrono::hours(1));  // returns: the test has a watchdog

  // A wake reaches every sleeper.
  std::atomic<int> awake{0};
  std::vector<std::thread> sleepers;
  for (int i = 0; i < 3; ++i)
    sleepers.emplace_back([&] {
      while (word.load() == 1) futex_wait(word, 1, kSlice);
      ++awake;
    });
  word.store(2);
  futex_wake_all(word);
  for (auto& sleeper : sleepers) sleeper.join();
  CHECK(awake == 3);
}
