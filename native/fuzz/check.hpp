// What a fuzzer finds wrong ends it, so that libFuzzer keeps the input.
#pragma once

#include <cstdlib>

#define CHECK(condition) \
  do {                   \
    if (!(condition)) {  \
      std::abort();      \
    }                    \
  } while (false)
