// kvarn._host: the numbers of layout.h and the facts of this build, for Python. No torch in here.
// Written for Python's stable ABI, so that one build serves Python 3.10 and all later ones.
#include <Python.h>

#include <initializer_list>
#include <string>

#include "kvarn/layout.h"
#include "kvarn/ops.h"
#include "kvarn/version.h"

namespace {

/// False, with a ValueError set, if a rule is broken.
bool check(bool ok, const char* function, const char* rule, const std::string& got) {
  if (!ok) PyErr_Format(PyExc_ValueError, "kvarn::%s: %s, got %s", function, rule, got.c_str());
  return ok;
}

/// Int arguments, by position or name; false, with a TypeError or OverflowError set, if they are
/// others. `names` ends with nullptr.
template <class... Int>
bool parse(PyObject* args, PyObject* kwargs, const char* format, const char* const* names,
           Int*... out) {
  return PyArg_ParseTupleAndKeywords(args, kwargs, format, const_cast<char**>(names), out...);
}

PyObject* record_layout(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* const names[] = {"key_bits", "value_bits", "group", "head_dim", nullptr};
  int key_bits, value_bits, group, head_dim;
  if (!parse(args, kwargs, "iiii:record_layout", names, &key_bits, &value_bits, &group,
             &head_dim)) {
    return nullptr;
  }
  const kvarn::Format format{key_bits, value_bits, group, head_dim};
  if (!check(kvarn::valid(format), "record_layout",
             "key_bits, value_bits, group, head_dim must be valid_bits, valid_bits, valid_groups, "
             "valid_head_dims",
             std::to_string(key_bits) + ", " + std::to_string(value_bits) + ", " +
                 std::to_string(group) + ", " + std::to_string(head_dim))) {
    return nullptr;
  }
  const kvarn::RecordLayout r = kvarn::record_layout(format);
  return Py_BuildValue("{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i}",       //
                       "key_codes", r.key_codes,                      //
                       "key_channel_scale", r.key_channel_scale,      //
                       "key_zero_point", r.key_zero_point,            //
                       "key_token_scale", r.key_token_scale,          //
                       "value_codes", r.value_codes,                  //
                       "value_token_scale", r.value_token_scale,      //
                       "value_zero_point", r.value_zero_point,        //
                       "value_channel_scale", r.value_channel_scale,  //
                       "bytes", r.bytes);
}

using Position = kvarn::FragmentPosition (*)(int token, int channel, int head_dim);

PyObject* code_position(const char* function, Position position, PyObject* args, PyObject* kwargs) {
  static const char* const names[] = {"token", "channel", "head_dim", nullptr};
  int token, channel, head_dim;
  const std::string format = std::string("iii:") + function;
  if (!parse(args, kwargs, format.c_str(), names, &token, &channel, &head_dim) ||
      !check(kvarn::valid_head_dim(head_dim), function, "head_dim must be one of valid_head_dims",
             std::to_string(head_dim)) ||
      !check(token >= 0, function, "token must not be negative", std::to_string(token)) ||
      !check(channel >= 0 && channel < head_dim, function, "channel must be in [0, head_dim)",
             std::to_string(channel))) {
    return nullptr;
  }
  const kvarn::FragmentPosition p = position(token, channel, head_dim);
  return Py_BuildValue("(iiii)", p.fragment, p.lane, p.reg, p.hi);
}

PyObject* key_position(PyObject*, PyObject* args, PyObject* kwargs) {
  return code_position("key_position", kvarn::key_position, args, kwargs);
}

PyObject* value_position(PyObject*, PyObject* args, PyObject* kwargs) {
  return code_position("value_position", kvarn::value_position, args, kwargs);
}

PyObject* field_position(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* const names[] = {"index", "bits", nullptr};
  int index, bits;
  if (!parse(args, kwargs, "ii:field_position", names, &index, &bits) ||
      !check(kvarn::valid_bits(bits), "field_position", "bits must be one of valid_bits",
             std::to_string(bits)) ||
      !check(index >= 0, "field_position", "index must not be negative", std::to_string(index))) {
    return nullptr;
  }
  const kvarn::FieldPosition p = kvarn::field_position(index, bits);
  return Py_BuildValue("(ii)", p.word, p.shift);
}

PyObject* word_offset(PyObject*, PyObject* args, PyObject* kwargs) {
  static const char* const names[] = {"word", "lane", nullptr};
  int word, lane;
  if (!parse(args, kwargs, "ii:word_offset", names, &word, &lane) ||
      !check(word >= 0, "word_offset", "word must not be negative", std::to_string(word)) ||
      !check(lane >= 0 && lane < kvarn::kWarpLanes, "word_offset", "lane must be in [0, 32)",
             std::to_string(lane))) {
    return nullptr;
  }
  return PyLong_FromLong(kvarn::word_offset(word, lane));
}

#if defined(__clang__)
constexpr const char* kCompiler = __VERSION__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif
#ifdef KVARN_CUDA_VERSION
constexpr const char* kCudaVersion = KVARN_CUDA_VERSION;
constexpr const char* kCudaArchitectures = KVARN_CUDA_ARCHITECTURES;
#else
constexpr const char* kCudaVersion = nullptr;  // None
constexpr const char* kCudaArchitectures = "";
#endif

PyObject* build_info(PyObject*, PyObject*) {
  return Py_BuildValue("{s:s,s:i,s:s,s:z,s:s}",                  //
                       "version", KVARN_VERSION,                 //
                       "layout_version", kvarn::kLayoutVersion,  //
                       "compiler", kCompiler,                    //
                       "cuda_version", kCudaVersion,             //
                       "cuda_architectures", kCudaArchitectures);
}

PyObject* cpu_isa(PyObject*, PyObject*) { return PyUnicode_FromString(kvarn::cpu::isa()); }

template <PyCFunctionWithKeywords function>
PyMethodDef with_keywords(const char* name, const char* doc) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
          METH_VARARGS | METH_KEYWORDS, doc};
}

/// Adds `value`, which it takes over; false, with an error set, if that fails.
bool add(PyObject* module, const char* name, PyObject* value) {
  const bool ok = value != nullptr && PyModule_AddObjectRef(module, name, value) == 0;
  Py_XDECREF(value);
  return ok;
}

PyObject* tuple_of(std::initializer_list<int> items) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(items.size()));
  Py_ssize_t i = 0;
  for (const int item : items) {
    if (tuple != nullptr) PyTuple_SetItem(tuple, i++, PyLong_FromLong(item));
  }
  return tuple;
}

int fill(PyObject* module) {
#define KVARN_ITEM(n) n,
  const bool ok = add(module, "valid_bits", tuple_of({KVARN_FOR_EACH_BITS(KVARN_ITEM)})) &&
                  add(module, "valid_groups", tuple_of({KVARN_FOR_EACH_GROUP(KVARN_ITEM)})) &&
                  add(module, "valid_head_dims", tuple_of({KVARN_FOR_EACH_HEAD_DIM(KVARN_ITEM)})) &&
                  add(module, "layout_version", PyLong_FromLong(kvarn::kLayoutVersion)) &&
                  add(module, "version", PyUnicode_FromString(KVARN_VERSION));
#undef KVARN_ITEM
  return ok ? 0 : -1;
}

}  // namespace

PyMODINIT_FUNC PyInit__host() {
  static PyMethodDef methods[] = {
      with_keywords<record_layout>("record_layout",
                                   "Byte offset of each field of a record, and `bytes`, its size."),
      with_keywords<key_position>("key_position",
                                  "(fragment, lane, reg, hi) of the K code of (token, channel)."),
      with_keywords<value_position>("value_position",
                                    "(fragment, lane, reg, hi) of the V code of (token, channel)."),
      with_keywords<field_position>(
          "field_position", "(word, shift) of a lane's half2 number `index` = 4 * fragment + reg."),
      with_keywords<word_offset>("word_offset",
                                 "Byte offset of a lane's 32-bit word inside the codes of a tile."),
      {"build_info", build_info, METH_NOARGS,
       "version, layout_version, compiler; cuda_version is None if no CUDA library was built."},
      {"cpu_isa", cpu_isa, METH_NOARGS,
       "The instruction set of the CPU kernels on this machine: avx512, avx2 or generic."},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef_Slot slots[] = {
      {Py_mod_exec, reinterpret_cast<void*>(fill)},
      {0, nullptr},
  };
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT,
      "_host",
      "The record layout (csrc/include/kvarn/layout.h) and the facts of this build.",
      0,
      methods,
      slots,
      nullptr,
      nullptr,
      nullptr,
  };
  return PyModuleDef_Init(&definition);
}
