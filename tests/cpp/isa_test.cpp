// set_isa chooses among the instruction sets that this machine has.
#include <cstring>
#include <string>

#include "check.h"
#include "kvarn/ops.h"

int main() {
  const std::string widest = kvarn::cpu::isa();
  CHECK(widest == "generic" || widest == "avx2" || widest == "avx512");

  CHECK(kvarn::cpu::set_isa("generic"));
  CHECK(kvarn::cpu::isa() == std::string("generic"));
  CHECK(!kvarn::cpu::set_isa("mmx"));
  CHECK(!kvarn::cpu::set_isa(""));
  CHECK(kvarn::cpu::isa() == std::string("generic"));  // a refused name changes nothing
  if (widest == "avx512") CHECK(kvarn::cpu::set_isa("avx2"));

  CHECK(kvarn::cpu::set_isa(widest.c_str()));
  CHECK(kvarn::cpu::isa() == widest);
  return kvarn::test::failures();
}
