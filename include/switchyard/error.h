// Typed errors. Every error names what was wrong, with which value, and what to do about it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace switchyard {

enum class ErrorCode {
  kInvalidArgument,   // a value passed by the caller is out of its domain
  kInvalidConfig,     // config.json is malformed, inconsistent or of an unknown family
  kInvalidFile,       // a file is truncated, or its header disagrees with its contents
  kMissingTensor,     // the checkpoint lacks a tensor that the layer needs
  kShapeMismatch,     // a tensor exists, but not with the shape the layer needs
  kDTypeMismatch,     // a tensor exists, but not with a dtype that can be used there
  kUnsupported,       // understood, but not implemented by this build or on this machine
  kCapacityExceeded,  // more tokens than the declared maximum, or not enough memory
  kSpecMismatch,      // the ranks of a world disagree on the layer, the limits or the call
  kTimeout,           // a wait passed its deadline; see TimeoutError
  kAborted,           // another rank failed first; see TimeoutError
  kSystem,            // an operating system call failed
};

// The stable name of a code, as messages show it, e.g. "missing_tensor".
const char* to_string(ErrorCode code);

// Base of all errors. what() is one line that is safe to show on a terminal or write to a log,
// whatever files, arguments and other processes have put into it. Control characters, line breaks
// and bytes that are not UTF-8 are escaped. A message of more than 4096 bytes loses its middle.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message);
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

// The record of a wait that passed its deadline, made by the first such waiter. It is written to
// the symmetric heap of every reachable rank, so that all of them can tell which rank was at fault.
struct WaitFailure {
  int waiter_rank = -1;        // the rank whose deadline passed
  int peer_rank = -1;          // the rank at fault
  const char* phase = "";      // "slots", "counts", "dispatch", "combine", "signal", ...
  std::uint64_t epoch = 0;     // forward passes since the layer was made, or dispatches and
                               // combines since the exchange was, starting at 1
  std::uint64_t slot = 0;      // which counter of that phase (chunk or tile index; of a symmetric
                               // heap the flag's offset)
  std::uint64_t expected = 0;  // the counter value waited for
  std::uint64_t observed = 0;  // the value last seen
  double waited_seconds = 0;   // time since the wait began
};

// Thrown with kTimeout on the rank whose deadline passed first, and with kAborted on the others. If
// a rank does not come to a collective call, every rank that waited for it throws kTimeout.
class TimeoutError : public Error {
 public:
  TimeoutError(ErrorCode code, const std::string& message, const WaitFailure& failure)
      : Error(code, message), failure_(failure) {}
  const WaitFailure& failure() const { return failure_; }

 private:
  WaitFailure failure_;
};

}  // namespace switchyard
