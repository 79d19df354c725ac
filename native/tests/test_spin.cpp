#include "fixture.hpp"
#include "shmsync/spin.hpp"

using namespace shmsync;
using std::chrono::microseconds;

int main() {
  // It starts with the least, and stays there while answers are quick.
  SpinEstimate estimate;
  CHECK(estimate.spin() == SpinEstimate::kLeast);
  for (int i = 0; i < 100; ++i) estimate.add(microseconds(5));
  CHECK(estimate.spin() == SpinEstimate::kLeast);

  // Answers that usually take a little longer are looked for a little longer.
  for (int i = 0; i < 100; ++i) estimate.add(microseconds(120));
  CHECK(estimate.usual() > microseconds(115) && estimate.usual() <= microseconds(120));
  CHECK(estimate.spin() == 2 * estimate.usual());

  // One that was slow changes it little; many make looking useless. It never goes beyond its bound.
  estimate.add(std::chrono::seconds(10));
  CHECK(estimate.spin() >= SpinEstimate::kLeast && estimate.spin() <= SpinEstimate::kMost);
  for (int i = 0; i < 100; ++i) {
    estimate.add(std::chrono::seconds(10));
    CHECK(estimate.usual() <= 2 * SpinEstimate::kMost && estimate.spin() <= SpinEstimate::kMost);
  }
  CHECK(estimate.spin() == SpinEstimate::kLeast);
  for (int i = 0; i < 40; ++i) estimate.add(microseconds(60));
  CHECK(estimate.spin() > SpinEstimate::kLeast && estimate.spin() <= microseconds(160));

  // What is true is not waited for, and what stays false ends.
  int looks = 0;
  CHECK(spin_until([&] { return ++looks == 1; }, Nanoseconds(0)));
  CHECK(!spin_until([&] { return ++looks < 0; }, Nanoseconds(0)) && looks == 2);
  const auto start = monotonic_ns();
  CHECK(!spin_until([] { return false; }, microseconds(300)));
  CHECK(monotonic_ns() - start >= 300'000);
}
