// kvarn._host: the numbers of layout.h and the facts of this build, for Python. No torch in here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "kvarn/layout.h"
#include "kvarn/ops.h"
#include "kvarn/version.h"

namespace py = pybind11;

namespace {

void check(bool ok, const char* function, const char* rule, const std::string& got) {
  if (ok) return;
  throw py::value_error(std::string("kvarn::") + function + ": " + rule + ", got " + got);
}

py::dict record_layout(int key_bits, int value_bits, int group, int head_dim) {
  const kvarn::Format format{key_bits, value_bits, group, head_dim};
  check(kvarn::valid(format), "record_layout",
        "key_bits, value_bits, group, head_dim must be valid_bits, valid_bits, valid_groups, "
        "valid_head_dims",
        std::to_string(key_bits) + ", " + std::to_string(value_bits) + ", " +
            std::to_string(group) + ", " + std::to_string(head_dim));
  const kvarn::RecordLayout layout = kvarn::record_layout(format);
  py::dict d;
  d["key_codes"] = layout.key_codes;
  d["key_channel_scale"] = layout.key_channel_scale;
  d["key_zero_point"] = layout.key_zero_point;
  d["key_token_scale"] = layout.key_token_scale;
  d["value_codes"] = layout.value_codes;
  d["value_token_scale"] = layout.value_token_scale;
  d["value_zero_point"] = layout.value_zero_point;
  d["value_channel_scale"] = layout.value_channel_scale;
  d["bytes"] = layout.bytes;
  return d;
}

py::tuple to_tuple(std::initializer_list<int> items) {
  return py::tuple(py::cast(std::vector<int>(items)));
}

using Position = kvarn::FragmentPosition (*)(int token, int channel, int head_dim);

py::tuple code_position(const char* function, Position position, int token, int channel,
                        int head_dim) {
  check(kvarn::valid_head_dim(head_dim), function, "head_dim must be one of valid_head_dims",
        std::to_string(head_dim));
  check(token >= 0, function, "token must not be negative", std::to_string(token));
  check(channel >= 0 && channel < head_dim, function, "channel must be in [0, head_dim)",
        std::to_string(channel));
  const kvarn::FragmentPosition p = position(token, channel, head_dim);
  return py::make_tuple(p.fragment, p.lane, p.reg, p.hi);
}

py::tuple field_position(int index, int bits) {
  check(kvarn::valid_bits(bits), "field_position", "bits must be one of valid_bits",
        std::to_string(bits));
  check(index >= 0, "field_position", "index must not be negative", std::to_string(index));
  const kvarn::FieldPosition p = kvarn::field_position(index, bits);
  return py::make_tuple(p.word, p.shift);
}

int word_offset(int word, int lane) {
  check(word >= 0, "word_offset", "word must not be negative", std::to_string(word));
  check(lane >= 0 && lane < kvarn::kWarpLanes, "word_offset", "lane must be in [0, 32)",
        std::to_string(lane));
  return kvarn::word_offset(word, lane);
}

py::dict build_info() {
  py::dict d;
  d["version"] = KVARN_VERSION;
  d["layout_version"] = kvarn::kLayoutVersion;
#if defined(__clang__)
  d["compiler"] = __VERSION__;
#else
  d["compiler"] = "GCC " __VERSION__;
#endif
#ifdef KVARN_CUDA_VERSION
  d["cuda_version"] = KVARN_CUDA_VERSION;
  d["cuda_architectures"] = KVARN_CUDA_ARCHITECTURES;
#else
  d["cuda_version"] = py::none();
  d["cuda_architectures"] = "";
#endif
  return d;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() = "The record layout (csrc/include/kvarn/layout.h) and the facts of this build.";

#define KVARN_ITEM(n) n,
  m.attr("valid_bits") = to_tuple({KVARN_FOR_EACH_BITS(KVARN_ITEM)});
  m.attr("valid_groups") = to_tuple({KVARN_FOR_EACH_GROUP(KVARN_ITEM)});
  m.attr("valid_head_dims") = to_tuple({KVARN_FOR_EACH_HEAD_DIM(KVARN_ITEM)});
#undef KVARN_ITEM
  m.attr("layout_version") = kvarn::kLayoutVersion;
  m.attr("version") = KVARN_VERSION;

  m.def("record_layout", &record_layout, py::arg("key_bits"), py::arg("value_bits"),
        py::arg("group"), py::arg("head_dim"),
        "Byte offset of each field of a record, and `bytes`, its size.");
  m.def(
      "key_position",
      [](int token, int channel, int head_dim) {
        return code_position("key_position", kvarn::key_position, token, channel, head_dim);
      },
      py::arg("token"), py::arg("channel"), py::arg("head_dim"),
      "(fragment, lane, reg, hi) of the K code of (token, channel).");
  m.def(
      "value_position",
      [](int token, int channel, int head_dim) {
        return code_position("value_position", kvarn::value_position, token, channel, head_dim);
      },
      py::arg("token"), py::arg("channel"), py::arg("head_dim"),
      "(fragment, lane, reg, hi) of the V code of (token, channel).");
  m.def("field_position", &field_position, py::arg("index"), py::arg("bits"),
        "(word, shift) of a lane's half2 number `index` = 4 * fragment + reg.");
  m.def("word_offset", &word_offset, py::arg("word"), py::arg("lane"),
        "Byte offset of a lane's 32-bit word inside the codes of a tile.");
  m.def("build_info", &build_info,
        "version, layout_version, compiler; cuda_version is None if no CUDA library was built.");
  m.def("cpu_isa", &kvarn::cpu::isa,
        "The instruction set of the CPU kernels on this machine: avx512, avx2 or generic.");
}
