// Structs that carry their size: what callers compiled with other versions of c.h pass.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "switchyard/c.h"
#include "switchyard/error.h"

namespace switchyard::c_api {

template <typename Pointer>
void require(const char* name, const Pointer* pointer) {
  if (pointer != nullptr) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{} is null; pass the address of one", name));
}

// The bytes that a struct had in its first version, which is what every caller has: less than all
// where fields were appended.
template <typename Struct>
inline constexpr std::size_t kFirstSize = sizeof(Struct);
template <>
inline constexpr std::size_t kFirstSize<sy_grouped_gemm_options> = offsetof(sy_grouped_gemm_options,
                                                                            tile_rows);
template <>
inline constexpr std::size_t kFirstSize<sy_grouped_gemm_call> = offsetof(sy_grouped_gemm_call,
                                                                         chosen);

template <>
inline constexpr std::size_t kFirstSize<sy_world_options> = offsetof(sy_world_options,
                                                                     network_chunk_bytes);
template <>
inline constexpr std::size_t kFirstSize<sy_workspace_options> = offsetof(sy_workspace_options,
                                                                         pre_sum_per_host);
template <>
inline constexpr std::size_t kFirstSize<sy_layer_options> = offsetof(sy_layer_options,
                                                                     recorded_steps);
template <>
inline constexpr std::size_t kFirstSize<sy_layer_weights> = offsetof(sy_layer_weights, gate_zero);
template <>
inline constexpr std::size_t kFirstSize<sy_grouped_gemm_spec> = offsetof(sy_grouped_gemm_spec,
                                                                         zero);
template <>
inline constexpr std::size_t kFirstSize<sy_layer_info> = offsetof(sy_layer_info, copies);
template <>
inline constexpr std::size_t kFirstSize<sy_exchange_spec> = offsetof(sy_exchange_spec,
                                                                     large_ids_are_none);
template <>
inline constexpr std::size_t kFirstSize<sy_tune_options> = offsetof(sy_tune_options, prune);
template <>
inline constexpr std::size_t kFirstSize<sy_tune_plan> = offsetof(sy_tune_plan, recordings_file);

template <typename Struct>
void check_size(const char* name, const Struct* given) {
  require(name, given);
  if (given->struct_size >= kFirstSize<Struct>) return;
  throw Error(ErrorCode::kInvalidArgument,
              fmt::format("{}.struct_size is {}, but it has {} bytes; set it to sizeof({})", name,
                          given->struct_size, sizeof(Struct), name));
}

// A newer library may give a reserved field a meaning, which this one must not ignore.
template <typename Struct>
void check_reserved(const char* name, const Struct& given) {
  const auto check = [&](const char* field, std::uint32_t value) {
    if (value == 0) return;
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{}.{} is {}, and this library knows no meaning of it; use a newer "
                            "libswitchyard_c, or set it to 0",
                            name, field, value));
  };
  if constexpr (requires { given.reserved; }) {
    check("reserved", static_cast<std::uint32_t>(given.reserved));
  }
  if constexpr (requires { given.reserved2; }) {
    check("reserved2", static_cast<std::uint32_t>(given.reserved2));
  }
}

// The fields that this library knows. Appended ones that the caller does not have are 0, which is
// their default. Throws Error{kInvalidArgument} without the fields of the first version,
// {kUnsupported} if unknown or reserved ones are set.
template <typename Struct>
Struct read_struct(const char* name, const Struct* given) {
  check_size(name, given);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  const std::size_t known = std::min<std::size_t>(given->struct_size, sizeof(Struct));
  const bool all_zero = std::all_of(bytes + known, bytes + given->struct_size,
                                    [](unsigned char byte) { return byte == 0; });
  if (!all_zero) {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("{} has {} bytes, of which this library knows {}, and others are set; "
                            "use a newer libswitchyard_c, or leave the new fields at 0",
                            name, given->struct_size, sizeof(Struct)));
  }
  Struct result{};
  std::memcpy(&result, bytes, known);
  check_reserved(name, result);
  return result;
}

// Like read_struct(), but returns `defaults` if `given` is null.
template <typename Struct>
Struct read_struct_or(const char* name, const Struct* given, const Struct& defaults) {
  return given == nullptr ? defaults : read_struct(name, given);
}

// Fills the caller's struct and leaves its struct_size and what this library does not know.
template <typename Struct>
void write_struct(const char* name, const Struct& from, Struct* to) {
  check_size(name, to);
  const std::uint32_t size = to->struct_size;
  std::memcpy(to, &from, std::min<std::size_t>(size, sizeof(Struct)));
  to->struct_size = size;
}

}  // namespace switchyard::c_api
