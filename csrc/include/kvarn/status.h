// The result of every launch function: a code and, when it is not OK, a sentence for the caller.
#pragma once

#include <string>
#include <utility>

namespace kvarn {

enum class StatusCode {
  kOk,
  kInvalidArgument,  ///< an argument breaks the rule that the message names; nothing was written
  kUnsupported,      ///< well formed, but this build or device has no kernel for it
  kRuntimeError,     ///< the device or the operating system refused (a failed launch, for one)
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  static Status invalid(std::string message) {
    return {StatusCode::kInvalidArgument, std::move(message)};
  }
  static Status unsupported(std::string message) {
    return {StatusCode::kUnsupported, std::move(message)};
  }
  static Status runtime(std::string message) {
    return {StatusCode::kRuntimeError, std::move(message)};
  }

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace kvarn
