// EXPECT_ERROR(statement, code, "substring", ...): the statement throws Error with that code, and
// its message contains every substring. The code stands without `ErrorCode::`.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "switchyard/error.h"

namespace switchyard::test {

template <class Statement>
void expect_error(Statement statement, ErrorCode code, std::initializer_list<const char*> parts) {
  try {
    statement();
  } catch (const Error& error) {
    EXPECT_STREQ(to_string(error.code()), to_string(code)) << error.what();
    for (const char* part : parts)
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << "'" << part << "' is not in: " << error.what();
    return;
  }
  ADD_FAILURE() << "nothing was thrown; expected " << to_string(code);
}

}  // namespace switchyard::test

#define EXPECT_ERROR(statement, code, ...)                               \
  ::switchyard::test::expect_error([&] { statement; },                   \
                                   [&] {                                 \
                                     using enum ::switchyard::ErrorCode; \
                                     return code;                        \
                                   }(),                                  \
                                   {__VA_ARGS__})
