// Looking again and again instead of sleeping, and for how long that pays.
#pragma once

#include <algorithm>

#include "shmsync/futex.hpp"

namespace shmsync {

// Tells the processor that a loop only waits: it uses less power, and leaves more to its other thread.
inline void relax_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Calls done() until it is true, at most `spin`; the processor is kept. Did it become true?
template <class Done>
bool spin_until(Done done, Nanoseconds spin) {
  if (done()) return true;
  if (spin <= Nanoseconds(0)) return false;
  const std::uint64_t start = monotonic_ns();
  do {
    for (int i = 0; i < 16; ++i) {
      relax_processor();
      if (done()) return true;
    }
  } while (Nanoseconds(monotonic_ns() - start) < spin);
  return false;
}

// How long to look again before going to sleep, learned from how long such waits have taken.
//
// Sleeping costs two context switches and the partner a system call. Where the answer usually takes a little longer
// than the least, looking on until then is cheaper; where it takes long, looking on only wastes the processor.
class SpinEstimate {
 public:
  static constexpr Nanoseconds kLeast = std::chrono::microseconds(50);  // three times faster than sleeping at once
  static constexpr Nanoseconds kMost = std::chrono::microseconds(400);

  // A wait took so long. Those beyond `kMost` count as a bit more than it, so that one of them is soon forgotten.
  void add(Nanoseconds took) { usual_ += (std::clamp(took, Nanoseconds(0), 2 * kMost) - usual_) / 8; }
  Nanoseconds usual() const { return usual_; }
  // Twice the usual time if that is worth it.
  Nanoseconds spin() const { return 2 * usual_ <= kMost ? std::max(kLeast, 2 * usual_) : kLeast; }

 private:
  Nanoseconds usual_{0};
};

}  // namespace shmsync
