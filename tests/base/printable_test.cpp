#include "base/printable.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "base/shown.h"
#include "switchyard/error.h"

namespace switchyard {
namespace {

using test::is_shown_safely;

TEST(Printable, PlainTextIsLeftAlone) {
  for (const char* text : {"", "a", "model.layers.0.mlp.gate.weight", "C:\\x1b\\n", "'\"{}%s",
                           "Übergröße", "模型", "модель", "🙂", "\u00a0\ufffd\ud7ff\ue000"}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, WhatATerminalObeysIsEscaped) {
  using namespace std::string_literals;
  EXPECT_EQ(printable("a\x1b[31mb\x07"s), "a\\x1b[31mb\\x07");
  EXPECT_EQ(printable("x\nswitchyard: error\r\tend"s), "x\\nswitchyard: error\\r\\tend");
  EXPECT_EQ(printable("\0\x7f"s), "\\x00\\x7f");
  EXPECT_EQ(printable("\u009b2J"s), "\\u{9b}2J");  // a control sequence of one character
  EXPECT_EQ(printable("\u2028\u202egpj.exe\u200b\ufeff\U000e0041"s),
            "\\u{2028}\\u{202e}gpj.exe\\u{200b}\\u{feff}\\u{e0041}");
}

TEST(Printable, BytesThatAreNotUtf8AreEscaped) {
  using namespace std::string_literals;
  EXPECT_EQ(printable("\xff\xfe"s), "\\xff\\xfe");
  EXPECT_EQ(printable("\x80"s), "\\x80");
  EXPECT_EQ(printable("\xc3"s), "\\xc3");                             // cut off
  EXPECT_EQ(printable("\xe2\x82"s), "\\xe2\\x82");                    // cut off
  EXPECT_EQ(printable("\xc3("s), "\\xc3(");                           // no continuation
  EXPECT_EQ(printable("\xc0\x8a"s), "\\xc0\\x8a");                    // '\n', overlong
  EXPECT_EQ(printable("\xe0\x80\x8a"s), "\\xe0\\x80\\x8a");           // '\n', overlong
  EXPECT_EQ(printable("\xed\xa0\x80"s), "\\xed\\xa0\\x80");           // a surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"s), "\\xf4\\x90\\x80\\x80");  // above U+10FFFF
  EXPECT_EQ(printable("\xf5\x80\x80\x80"s), "\\xf5\\x80\\x80\\x80");
}

TEST(Printable, LongTextLosesItsMiddleAndTellsItsLength) {
  const std::string whole(kMostShown, 'a');
  EXPECT_EQ(printable(whole), whole);
  const std::string text = "begin" + std::string(1 << 20, 'x') + "end";
  const std::string shown = printable(text);
  EXPECT_LE(shown.size(), kMostShown);
  EXPECT_GE(shown.size(), kMostShown - 8);
  EXPECT_EQ(shown.substr(0, 8), "beginxxx");
  EXPECT_EQ(shown.substr(shown.size() - 6), "xxxend");
  EXPECT_NE(shown.find("...[1048584 bytes]..."), std::string::npos) << shown;
  EXPECT_EQ(printable(shown), shown);

  EXPECT_LE(printable(std::string(1000, '\x1b'), 64).size(), 64u);  // escapes count
}

// Cuts fall between characters, wherever they fall.
TEST(Printable, ShorteningSplitsNoCharacter) {
  for (const char* unit : {"ü", "模", "🙂"}) {
    for (std::size_t lead = 0; lead < 8; ++lead) {
      std::string text(lead, 'a');
      while (text.size() < 400) text += unit;
      const std::string shown = printable(text, 100);
      EXPECT_EQ(shown.find('\\'), std::string::npos) << shown;
      EXPECT_TRUE(is_shown_safely(shown));
    }
  }
}

TEST(Printable, AnyBytesBecomeOneHarmlessLineAndOnceIsEnough) {
  std::mt19937 random(7);
  // Few kinds of bytes, so that UTF-8 comes about, whole and broken.
  const std::string kinds = "a\\\n\x1b\x7f\x80\x8a\x9b\xa0\xbf\xc0\xc2\xe0\xe2\xed\xef\xf0\xf4\xff";
  for (int round = 0; round < 20000; ++round) {
    std::string text(random() % 90, '\0');
    for (char& c : text) c = kinds[random() % kinds.size()];
    const std::string shown = printable(text, 64 + random() % 40);
    ASSERT_TRUE(is_shown_safely(shown)) << shown;
    ASSERT_LE(shown.size(), 104u);
    ASSERT_EQ(printable(shown), shown);
  }
}

TEST(Errors, EveryMessageIsOneHarmlessLineOfBoundedLength) {
  const std::string name = "a\nswitchyard: error (system): all is lost\x1b[2J\xff";
  const Error error(ErrorCode::kInvalidFile, "tensor '" + name + "' is bad");
  EXPECT_STREQ(error.what(),
               "tensor 'a\\nswitchyard: error (system): all is lost\\x1b[2J\\xff' is bad");
  const Error again(ErrorCode::kInvalidFile, error.what());
  EXPECT_STREQ(again.what(), error.what());
  std::string lines(1 << 20, '\n');
  lines += "remedy";
  const TimeoutError timeout(ErrorCode::kTimeout, lines, {});
  EXPECT_TRUE(is_shown_safely(timeout.what()));
  EXPECT_LE(std::string(timeout.what()).size(), 4096u);
  EXPECT_TRUE(std::string(timeout.what()).ends_with("remedy"));
}

}  // namespace
}  // namespace switchyard
