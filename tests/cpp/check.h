// CHECK counts and prints failures; a test's main returns failures().
#pragma once

#include <cstdio>

namespace kvarn::test {

inline int& failures() {
  static int count = 0;
  return count;
}

}  // namespace kvarn::test

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      if (++kvarn::test::failures() >= 20) return 1;                               \
    }                                                                              \
  } while (false)
