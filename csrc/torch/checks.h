// Argument checks that the CPU and the CUDA op files share. kvarn/ops.py checks before it calls;
// these make a direct call of torch.ops.kvarn.* as safe. A failure throws a std::runtime_error
// that reads `kvarn::<op>: <argument> must be <rule>, got <value>`.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvarn/ops.h"

namespace kvarn::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string name_of(ScalarType t) {
  switch (t) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return torch::headeronly::toString(t);
  }
}

inline std::string name_of(const torch::stable::Device& device) {
  if (device.is_cpu()) return "cpu";
  if (device.is_cuda()) return "cuda:" + std::to_string(device.index());
  return "another kind of device";
}

template <class Items>
std::string bracketed(const Items& items) {
  std::ostringstream text;
  text << '[';
  const char* separator = "";
  for (const auto& item : items) {
    text << separator << item;
    separator = ", ";
  }
  text << ']';
  return text.str();
}

/// A dimension of the shape that an argument must have: a size, or a name that stands for any.
class Dim {
 public:
  Dim(int64_t size) : size_(size) {}      // NOLINT(google-explicit-constructor)
  Dim(const char* name) : name_(name) {}  // NOLINT(google-explicit-constructor)
  bool accepts(int64_t size) const { return size_ < 0 || size == size_; }
  friend std::ostream& operator<<(std::ostream& out, const Dim& dim) {
    return dim.size_ < 0 ? out << dim.name_ : out << dim.size_;
  }

 private:
  int64_t size_ = -1;
  const char* name_ = nullptr;
};

/// What the strides of an argument must allow.
enum class Layout {
  kStrided,     ///< any strides
  kRows,        ///< the last dimension contiguous
  kContiguous,  ///< all of it
};

/// Checks the arguments of one call of one op; all tensors must be on the device of the first.
class Arguments {
 public:
  using DTypes = std::initializer_list<ScalarType>;

  Arguments(const char* op, const Tensor& first) : op_(op), device_(first.device()) {}

  const torch::stable::Device& device() const { return device_; }

  [[noreturn]] void fail(const std::string& message) const {
    throw std::runtime_error(std::string("kvarn::") + op_ + ": " + message);
  }

  template <class Value>
  void require(bool holds, const char* name, const std::string& rule, const Value& got) const {
    if (holds) return;
    std::ostringstream text;
    text << name << " must be " << rule << ", got " << got;
    fail(text.str());
  }

  void ok(const Status& status) const {
    if (!status.ok()) fail(status.message());
  }

  void input(const char* name, const Tensor& t, DTypes dtypes, const std::vector<Dim>& shape,
             Layout layout = Layout::kRows) const {
    const bool right_dtype =
        std::find(dtypes.begin(), dtypes.end(), t.scalar_type()) != dtypes.end();
    const bool right_shape = t.dim() == static_cast<int64_t>(shape.size()) &&
                             std::equal(shape.begin(), shape.end(), t.sizes().begin(),
                                        [](const Dim& dim, int64_t n) { return dim.accepts(n); });
    if (!right_dtype || !right_shape || t.device() != device_) {
      require(false, name, tensor_rule(dtypes, bracketed(shape)), describe(t));
    }
    check_layout(name, t, layout);
  }

  /// The same for an argument of any number of dimensions of which only the last is known.
  void input_rows(const char* name, const Tensor& t, DTypes dtypes, const Dim& last) const {
    const bool right_dtype =
        std::find(dtypes.begin(), dtypes.end(), t.scalar_type()) != dtypes.end();
    if (!right_dtype || t.dim() == 0 || !last.accepts(t.sizes()[t.dim() - 1]) ||
        t.device() != device_) {
      std::ostringstream shape;
      shape << "[..., " << last << ']';
      require(false, name, tensor_rule(dtypes, shape.str()), describe(t));
    }
    check_layout(name, t, Layout::kRows);
  }

  void output(const char* name, const Tensor& t, ScalarType dtype, const std::vector<Dim>& shape,
              Layout layout = Layout::kRows) const {
    input(name, t, {dtype}, shape, layout);
    if (overlaps_itself(t)) {
      fail(std::string(name) + " must not overlap itself, got strides " + bracketed(t.strides()));
    }
  }

  /// `output` may be `other` itself, element for element, or must lie elsewhere in memory.
  void same_or_apart(const char* name, const Tensor& output, const char* other_name,
                     const Tensor& other) const {
    if (!same_elements(output, other)) apart(name, output, other_name, other);
  }

  void apart(const char* name, const Tensor& output, const char* other_name,
             const Tensor& other) const {
    if (output.numel() == 0 || other.numel() == 0) return;
    const auto [a_begin, a_end] = bytes_of(output);
    const auto [b_begin, b_end] = bytes_of(other);
    if (a_begin < b_end && b_begin < a_end && !interleaved(Extent(output), Extent(other))) {
      fail(std::string(name) + " must not overlap " + other_name);
    }
  }

  struct Named {
    const char* name;
    const Tensor* tensor;  ///< null: not given
  };

  /// Index tensors count too: an op that writes over them goes wherever the new numbers lead.
  void apart(const char* name, const Tensor& output, std::initializer_list<Named> others) const {
    for (const Named& other : others) {
      if (other.tensor != nullptr) apart(name, output, other.name, *other.tensor);
    }
  }

  int32_t narrow(const char* name, int64_t value) const {
    require(value >= 0 && value <= std::numeric_limits<int32_t>::max(), name,
            "between 0 and 2147483647", value);
    return static_cast<int32_t>(value);
  }

 private:
  std::string tensor_rule(DTypes dtypes, const std::string& shape) const {
    std::string names;
    size_t left = dtypes.size();
    for (ScalarType t : dtypes) {
      names += name_of(t) + (--left == 0 ? "" : left == 1 ? " or " : ", ");
    }
    return names + " " + shape + " on " + name_of(device_);
  }

  static std::string describe(const Tensor& t) {
    return name_of(t.scalar_type()) + " " + bracketed(t.sizes()) + " on " + name_of(t.device());
  }

  void check_layout(const char* name, const Tensor& t, Layout layout) const {
    const bool holds =
        t.numel() == 0 || layout == Layout::kStrided ||
        (layout == Layout::kContiguous ? t.is_contiguous()
                                       : t.size(t.dim() - 1) == 1 || t.stride(t.dim() - 1) == 1);
    if (holds) return;
    const char* rule =
        layout == Layout::kContiguous ? "contiguous" : "contiguous in its last dimension";
    require(false, name, rule, "strides " + bracketed(t.strides()));
  }

  /// The first byte of a tensor that is not empty, and the one after its last.
  static std::pair<uintptr_t, uintptr_t> bytes_of(const Tensor& t) {
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += t.stride(i) * (t.size(i) - 1);
    const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
    return {begin, begin + static_cast<uintptr_t>(last + 1) * t.element_size()};
  }

  /// Where a tensor lies: its first byte, and its dimensions in bytes.
  struct Extent {
    uintptr_t begin;
    std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size; those of size 1 left out
    int64_t element;

    explicit Extent(const Tensor& t)
        : begin(reinterpret_cast<uintptr_t>(t.const_data_ptr())),
          element(static_cast<int64_t>(t.element_size())) {
      for (int64_t i = 0; i < t.dim(); ++i) {
        if (t.size(i) > 1) dims.emplace_back(t.stride(i) * element, t.size(i));
      }
    }

    /// Bytes that the dimensions of a smaller stride than `period` span; -1 if another one is not
    /// a multiple of it.
    int64_t below(int64_t period) const {
      int64_t bytes = element;
      for (const auto& [stride, size] : dims) {
        if (stride < period) {
          bytes += stride * (size - 1);
        } else if (stride % period != 0) {
          return -1;
        }
      }
      return bytes;
    }
  };

  /// Whether two tensors are slices of one buffer with rows of some length that take different
  /// parts of each row, as queries and keys of a fused projection do.
  static bool interleaved(const Extent& a, const Extent& b) {
    for (const Extent* of : {&a, &b}) {
      for (const auto& dim : of->dims) {
        const int64_t period = dim.first;
        if (period <= 0) continue;
        const int64_t a_bytes = a.below(period), b_bytes = b.below(period);
        if (a_bytes < 0 || b_bytes < 0 || a_bytes > period || b_bytes > period) continue;
        const auto apart =
            static_cast<int64_t>(a.begin < b.begin ? b.begin - a.begin : a.begin - b.begin) %
            period;
        const int64_t shift = a.begin < b.begin || apart == 0 ? apart : period - apart;
        if (shift >= a_bytes && period - shift >= b_bytes) return true;
      }
    }
    return false;
  }

  static bool same_elements(const Tensor& a, const Tensor& b) {
    if (a.const_data_ptr() != b.const_data_ptr()) return false;
    for (int64_t i = 0; i < a.dim(); ++i) {
      if (a.size(i) > 1 && a.stride(i) != b.stride(i)) return false;
    }
    return true;
  }

  /// Whether some dimension steps into the extent of those inside it.
  static bool overlaps_itself(const Tensor& t) {
    if (t.numel() == 0) return false;
    std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
    for (int64_t i = 0; i < t.dim(); ++i) {
      if (t.size(i) > 1) dims.emplace_back(t.stride(i), t.size(i));
    }
    std::sort(dims.begin(), dims.end());
    int64_t inner = 1;
    for (const auto& [stride, size] : dims) {
      if (stride < inner) return true;
      inner = stride * (size - 1) + inner;
    }
    return false;
  }

  const char* op_;
  torch::stable::Device device_;
};

}  // namespace kvarn::binding
